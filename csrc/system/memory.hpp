// Available memory of the machine and its control groups. Knows procfs and sysfs; never knows pages
// or their users.
#pragma once

#include <cstdint>
#include <string>

namespace memascend {

/// The number at the start of a kernel file; 0 if there is no file, or no number.
std::uint64_t read_count(const std::string& path);

/// Physical memory of the machine; 0 if unknown.
std::uint64_t physical_memory_bytes();

/// The bytes that the kernel could hand out now without swapping or killing a process: the minimum
/// of free memory and of the rest under the limits of our control group and every group above it
/// (cgroup v1 and v2). File cache counts as free. 0 only if nothing is known. Files are read below
/// `root`.
std::uint64_t available_memory_bytes(const std::string& root = "");

}  // namespace memascend
