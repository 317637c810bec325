// sources: csrc/system/memory.cpp
// What control groups leave, from files in a folder of the test's own.
#include "system/memory.hpp"

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "support/expect.hpp"

using namespace memascend;

namespace {

constexpr std::uint64_t kMebibyte = std::uint64_t{1} << 20;

/// The files of a kernel, below a folder that goes with it.
class Kernel {
 public:
  Kernel() {
    char name[] = "/tmp/memascend-memory-XXXXXX";
    EXPECT(::mkdtemp(name) != nullptr);
    root_ = name;
  }
  ~Kernel() { std::filesystem::remove_all(root_); }
  void set(const std::string& path, const std::string& text) const {
    std::filesystem::create_directories(std::filesystem::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text;
  }
  std::uint64_t available_bytes() const { return available_memory_bytes(root_); }
  std::uint64_t available_mebibytes() const { return available_bytes() / kMebibyte; }

 private:
  std::string root_;
};

std::string mebibytes(std::uint64_t count) { return std::to_string(count * kMebibyte) + "\n"; }

void the_machine_has_memory() {
  EXPECT(physical_memory_bytes() > 0);
  EXPECT(available_memory_bytes() <= physical_memory_bytes());
}

void without_any_file_nothing_is_known() {
  const Kernel kernel;
  EXPECT(kernel.available_bytes() == 0);
}

void a_group_below_the_root_counts_and_so_do_those_above() {
  const Kernel kernel;
  kernel.set("/proc/meminfo", "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n");
  EXPECT(kernel.available_mebibytes() == 4096);
  kernel.set("/proc/self/cgroup", "0::/jobs/mine\n");
  kernel.set("/sys/fs/cgroup/jobs/mine/memory.max", "max\n");
  EXPECT(kernel.available_mebibytes() == 4096);
  kernel.set("/sys/fs/cgroup/jobs/memory.max", mebibytes(3000));
  kernel.set("/sys/fs/cgroup/jobs/memory.current", mebibytes(1000));
  EXPECT(kernel.available_mebibytes() == 2000);
  kernel.set("/sys/fs/cgroup/jobs/mine/memory.max", mebibytes(1500));
  kernel.set("/sys/fs/cgroup/jobs/mine/memory.current", mebibytes(1000));
  EXPECT(kernel.available_mebibytes() == 500);
  kernel.set("/sys/fs/cgroup/jobs/mine/memory.stat",
             "anon 5\ninactive_file " + mebibytes(100) + "active_file " + mebibytes(50));
  EXPECT(kernel.available_mebibytes() == 650);
}

void groups_of_version_1_and_those_outside_the_namespace_count() {
  const Kernel kernel;
  kernel.set("/proc/meminfo", "MemAvailable: 4194304 kB\n");
  kernel.set("/proc/self/cgroup", "9:cpu,cpuacct:/other\n4:memory:/../../job\n0::/\n");
  kernel.set("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "9223372036854771712\n");
  kernel.set("/sys/fs/cgroup/memory/memory.limit_in_bytes", mebibytes(900));
  kernel.set("/sys/fs/cgroup/memory/memory.usage_in_bytes", mebibytes(200));
  kernel.set("/sys/fs/cgroup/memory/memory.stat",
             "inactive_file 7\ntotal_inactive_file " + mebibytes(30));
  EXPECT(kernel.available_mebibytes() == 730);
}

void a_full_group_leaves_next_to_nothing() {
  const Kernel kernel;
  kernel.set("/proc/self/cgroup", "0::/\n");
  kernel.set("/sys/fs/cgroup/memory.max", mebibytes(10));
  kernel.set("/sys/fs/cgroup/memory.current", mebibytes(11));
  EXPECT(kernel.available_bytes() == 1);  // 0 would mean that nothing is known
}

}  // namespace

int main() {
  the_machine_has_memory();
  without_any_file_nothing_is_known();
  a_group_below_the_root_counts_and_so_do_those_above();
  groups_of_version_1_and_those_outside_the_namespace_count();
  a_full_group_leaves_next_to_nothing();
  return 0;
}
