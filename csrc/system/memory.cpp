#include "system/memory.hpp"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

namespace memascend {
namespace {

// The mount and the file names of one kind of control groups.
struct GroupKind {
  const char* mount;
  const char* limit;
  const char* used;
  const char* of_all_below;  // prefix in memory.stat of sums that include child groups
};
constexpr GroupKind kUnified{"/sys/fs/cgroup", "memory.max", "memory.current", ""};
constexpr GroupKind kHybrid{"/sys/fs/cgroup/unified", "memory.max", "memory.current", ""};
constexpr GroupKind kVersion1{"/sys/fs/cgroup/memory", "memory.limit_in_bytes",
                              "memory.usage_in_bytes", "total_"};

// A "Name:   123 kB" line of /proc/meminfo, in bytes; 0 if it is missing.
std::uint64_t meminfo_bytes(const std::string& root, const std::string& name) {
  std::ifstream file(root + "/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, name.size() + 1, name + ":") == 0) {
      return std::strtoull(line.c_str() + name.size() + 1, nullptr, 10) * 1024;
    }
  }
  return 0;
}

std::uint64_t left_in_group(const std::string& folder, const GroupKind& kind) {
  const std::uint64_t limit = read_count(folder + "/" + kind.limit);  // 0: none, or "max"
  if (limit == 0) return UINT64_MAX;
  std::uint64_t used = read_count(folder + "/" + kind.used);
  // File cache counts as used there, but the kernel can reclaim it.
  const std::string inactive = std::string(kind.of_all_below) + "inactive_file";
  const std::string active = std::string(kind.of_all_below) + "active_file";
  std::ifstream file(folder + "/memory.stat");
  std::string name;
  for (std::uint64_t nbytes = 0; file >> name >> nbytes;) {
    if (name == inactive || name == active) used -= std::min(used, nbytes);
  }
  return limit - std::min(limit, used);
}

// Memory left in our group and all above it. A process outside its namespace sees "/../..": nothing
// above the mount is visible. In a container the group's path may not exist below the mount, but
// the folders above it still have limits that apply.
std::uint64_t left_in_groups(const std::string& mount, const std::string& name,
                             const GroupKind& kind) {
  std::string group;
  std::istringstream parts(name);
  for (std::string part; std::getline(parts, part, '/');) {
    if (!part.empty() && part != "..") group += "/" + part;
  }
  std::uint64_t least = left_in_group(mount + group, kind);
  while (!group.empty()) {
    group.resize(group.rfind('/'));
    least = std::min(least, left_in_group(mount + group, kind));
  }
  return least;
}

}  // namespace

std::uint64_t read_count(const std::string& path) {
  std::ifstream file(path);
  std::uint64_t count = 0;
  return file >> count ? count : 0;
}

std::uint64_t physical_memory_bytes() { return meminfo_bytes("", "MemTotal"); }

std::uint64_t available_memory_bytes(const std::string& root) {
  std::uint64_t least = meminfo_bytes(root, "MemAvailable");
  if (least == 0) least = UINT64_MAX;
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {  // number:controllers:group
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string group = line.substr(second + 1);
    const auto take = [&](const GroupKind& kind) {
      least = std::min(least, left_in_groups(root + kind.mount, group, kind));
    };
    if (controllers == ",,") {
      take(kUnified);
      take(kHybrid);
    } else if (controllers.find(",memory,") != std::string::npos) {
      take(kVersion1);
    }
  }
  return least == UINT64_MAX ? 0 : std::max<std::uint64_t>(least, 1);
}

}  // namespace memascend
