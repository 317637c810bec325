// Memory of the machine, and what the control groups leave of it. Knows procfs and sysfs; never
// knows pages or who wants them.
#pragma once

#include <cstdint>
#include <string>

namespace memascend {

/// The number that a file of the kernel begins with; 0 where there is no file, or no number.
std::uint64_t read_count(const std::string& path);

/// Physical memory of the machine; 0 where unknown.
std::uint64_t physical_memory_bytes();

/// What the kernel could hand out now without swapping, and without ending a process: the least of
/// what is free, and of what the limit of our control group, and of every group above it (version 1
/// and 2), leaves. File cache counts as free. Never 0 but where nothing is known. Files are read
/// below `root`.
std::uint64_t available_memory_bytes(const std::string& root = "");

}  // namespace memascend
