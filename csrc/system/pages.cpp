#include "system/pages.hpp"

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bitset>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <system_error>
#include <thread>

#include "base/align.hpp"
#include "base/check.hpp"
#include "system/memory.hpp"

namespace memascend {
namespace {

// Newer than the C library headers of some supported systems.
constexpr int kMadvPopulateWrite = 23;  // Linux 5.14
constexpr int kMadvCollapse = 25;       // Linux 6.1
constexpr int kMapFixedNoReplace = 0x100000;

// Below this share per thread, starting a thread costs more than it saves.
constexpr std::uint64_t kPrefaultShareBytes = 32 * 1024 * 1024;
constexpr int kReserveFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

std::string read_word(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::string memlock_limit_text() {
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return "unknown";
  return limit.rlim_cur == RLIM_INFINITY ? "unlimited" : join(limit.rlim_cur / 1024, " KiB");
}

/// Runs `work` over equal, huge-page aligned shares of `piece`, one thread each.
template <typename Work>
void for_each_share(std::span<std::byte> piece, unsigned threads, const Work& work) {
  if (threads == 0) {
    threads = std::min(std::max(std::thread::hardware_concurrency(), 1u), kPrefaultThreadsMax);
  }
  const std::uint64_t useful = std::max<std::uint64_t>(piece.size() / kPrefaultShareBytes, 1);
  const std::uint64_t count = std::min<std::uint64_t>(threads, useful);
  const std::uint64_t share = align_up((piece.size() + count - 1) / count, kHugePageBytes);
  std::vector<std::thread> workers;
  for (std::uint64_t offset = share; offset < piece.size(); offset += share) {
    const auto part = piece.subspan(offset, std::min<std::uint64_t>(share, piece.size() - offset));
    try {
      workers.emplace_back([&work, part] { work(part); });
    } catch (const std::system_error&) {
      work(part);  // no more threads allowed: slower, not wrong
    }
  }
  work(piece.first(std::min<std::uint64_t>(share, piece.size())));
  for (std::thread& worker : workers) worker.join();
}

/// Makes every page resident. Returns 0, or the errno of the kernel if it has no memory.
int prefault(std::span<std::byte> piece, unsigned threads) {
  std::atomic<int> failure{0};
  for_each_share(piece, threads, [&failure](std::span<std::byte> share) {
    int result = 0;
    do {
      result = madvise(share.data(), share.size(), kMadvPopulateWrite);
    } while (result != 0 && (errno == EINTR || errno == EAGAIN));
    if (result == 0) return;
    if (errno != EINVAL) {
      failure.store(errno);
      return;
    }
    // A kernel without MADV_POPULATE_WRITE. The piece holds nothing yet, so writing zero is safe.
    for (std::uint64_t offset = 0; offset < share.size(); offset += kPageBytes) {
      *reinterpret_cast<volatile std::byte*>(share.data() + offset) = std::byte{0};
    }
  });
  return failure.load();
}

/// Returns whether MADV_POPULATE_WRITE works. Without it, a page without memory raises SIGBUS when
/// it is first touched.
bool can_populate() {
  static const bool can = [] {
    void* page =
        mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) return false;
    const bool populated = madvise(page, kPageBytes, kMadvPopulateWrite) == 0;
    munmap(page, kPageBytes);
    return populated;
  }();
  return can;
}

/// Best effort: turns the small pages of whole huge pages inside `piece` into huge ones. Works in
/// parts, so that it ends when its time is over. Ignores refusals of the kernel, since
/// measure_pages() reports the result.
void collapse(std::span<std::byte> piece, PageOptions& options, Notes& notes) {
  using Clock = std::chrono::steady_clock;
  const auto start = reinterpret_cast<std::uintptr_t>(piece.data());
  const std::uint64_t first = align_up(start, kHugePageBytes);
  const std::uint64_t last = align_down(start + piece.size(), kHugePageBytes);
  if (first >= last) return;  // `last` may be before the piece
  const Clock::time_point began = Clock::now();
  const Clock::time_point end = began + options.collapse_time;
  std::atomic<bool> ended = false;
  for_each_share(piece.subspan(first - start, last - first), options.prefault_threads,
                 [&](std::span<std::byte> share) {
                   while (!share.empty()) {
                     if (Clock::now() >= end) {
                       ended = true;
                       return;
                     }
                     const auto part =
                         share.first(std::min<std::size_t>(share.size(), kCollapseBytes));
                     (void)madvise(part.data(), part.size(), kMadvCollapse);
                     share = share.subspan(part.size());
                   }
                 });
  const auto used = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - began);
  options.collapse_time -= std::min(options.collapse_time, used);
  if (!ended) return;
  notes.add(
      "the kernel takes long to make huge pages, so some memory stays in small ones: memory is "
      "fragmented. fix: echo 1 > /proc/sys/vm/compact_memory, or explicit ones (sysctl "
      "vm.nr_hugepages=<bytes / 2 MiB>), before the start");
}

/// Asks for pages of one node. Preferred, not bound: when the node is full, memory of another node
/// is slower, but a strict binding would invoke the out-of-memory killer.
void prefer_node(std::span<std::byte> piece, int node, Notes& notes) {
  const std::string online = read_word("/sys/devices/system/node/online");
  if (node < 0 || online.empty() || online == "0") return;
  std::bitset<1024> mask;
  if (static_cast<std::size_t>(node) < mask.size()) mask.set(static_cast<std::size_t>(node));
  if (syscall(SYS_mbind, piece.data(), piece.size(), MPOL_PREFERRED, &mask, mask.size(), 0) != 0) {
    notes.add(join("memory is not bound to NUMA node ", node, ": mbind: ", std::strerror(errno),
                   "; online nodes: ", online));
  }
}

bool try_hugetlb(std::span<std::byte> piece, const PageOptions& options, Notes& notes) {
  const bool by_name = options.huge_pages == HugePages::kExplicit;
  // A control group may allow fewer pages than the machine has: only an attempt can tell.
  if (!by_name && (options.huge_pages != HugePages::kAuto || !can_populate())) return false;
  const char* directory = "/sys/kernel/mm/hugepages/hugepages-2048kB/";
  const std::uint64_t free_count = read_count(join(directory, "free_hugepages"));
  const std::uint64_t promised_count = read_count(join(directory, "resv_hugepages"));
  const std::uint64_t needed_count = piece.size() / kHugePageBytes;
  const bool whole =
      is_aligned(piece.data(), kHugePageBytes) && is_aligned(piece.size(), kHugePageBytes);
  if (!whole || free_count < promised_count + needed_count) {
    if (by_name) {
      notes.add(
          "explicit huge pages were asked for but not enough whole ones are free, transparent ones "
          "are used instead. fix: sysctl vm.nr_hugepages=<bytes / 2 MiB>, before the start");
    }
    return false;
  }
  void* mapped = mmap(piece.data(), piece.size(), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_HUGETLB, -1, 0);
  if (mapped != MAP_FAILED) {
    prefer_node(piece, options.numa_node, notes);
    (void)madvise(piece.data(), piece.size(), MADV_DONTFORK);
    if (prefault(piece, options.prefault_threads) == 0) return true;
    // Counted as free, but not for us (a cgroup, another node): restore the reserved addresses.
    mapped = mmap(piece.data(), piece.size(), PROT_NONE, kReserveFlags | MAP_FIXED, -1, 0);
    notes.add("explicit huge pages are counted as free but could not be used; a cgroup limit?");
  } else {
    notes.add(
        join("explicit huge pages refused: ", std::strerror(errno), "; transparent ones used"));
    // A failed MAP_FIXED may have unmapped the piece; reserve it again, unless it is mapped by now.
    mapped = mmap(piece.data(), piece.size(), PROT_NONE, kReserveFlags | kMapFixedNoReplace, -1, 0);
    if (mapped == MAP_FAILED && errno == EEXIST) mapped = piece.data();  // it was not unmapped
  }
  if (mapped != piece.data()) {
    throw HostMemoryError("cannot restore an address range after explicit huge pages failed",
                          piece.size(), 0, 0);
  }
  return false;
}

void note_transparent_setting(Notes& notes) {
  const char* path = "/sys/kernel/mm/transparent_hugepage/enabled";
  const std::string setting = read_word(path);
  if (setting.empty()) notes.add("no transparent huge pages: this kernel has none");
  if (setting.find("[never]") != std::string::npos) {
    notes.add(join("transparent huge pages are switched off. fix: echo madvise > ", path));
  }
}

}  // namespace

void Notes::add(std::string note) {
  if (std::find(notes_.begin(), notes_.end(), note) == notes_.end()) {
    notes_.push_back(std::move(note));
  }
}

void require_page_bytes(std::uint64_t system_page_bytes) {
  if (system_page_bytes == kPageBytes) return;
  throw HostMemoryError(
      join("cannot divide host memory: this kernel has pages of ", system_page_bytes,
           " bytes, memascend is made for ", kPageBytes, ". fix: a kernel with pages of 4 KiB"),
      system_page_bytes, 0, 0);
}

AddressRange::AddressRange(std::uint64_t nbytes, std::uint64_t nbytes_min) {
  require_page_bytes(static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE)));
  const std::uint64_t least = align_up(std::max<std::uint64_t>(nbytes_min, 1), kHugePageBytes);
  nbytes_ = std::max(align_up(nbytes, kHugePageBytes), least);
  while (true) {
    // Space to align, and at least one inaccessible page on either side, so that no foreign mapping
    // merges with ours and an overrun faults.
    mapping_bytes_ = nbytes_ + 2 * kHugePageBytes;
    void* mapped = mmap(nullptr, mapping_bytes_, PROT_NONE, kReserveFlags, -1, 0);
    if (mapped != MAP_FAILED) {
      mapping_ = static_cast<std::byte*>(mapped);
      const auto address = reinterpret_cast<std::uintptr_t>(mapped);
      base_ = mapping_ + (align_up(address + kPageBytes, kHugePageBytes) - address);
      return;
    }
    if (nbytes_ == least) {
      throw HostMemoryError(
          join("cannot reserve ", nbytes_, " bytes of addresses: ", std::strerror(errno),
               ". likely cause: an address space limit. fix: ulimit -v unlimited"),
          nbytes_, 0, 0);
    }
    nbytes_ = std::max(align_up(nbytes_ / 2, kHugePageBytes), least);
  }
}

AddressRange::~AddressRange() {
  if (owner_.is_current()) munmap(mapping_, mapping_bytes_);
}

Backing back_pages(std::span<std::byte> piece, PageOptions& options, Notes& notes) {
  MA_INVARIANT(is_aligned(piece.data(), kPageBytes));
  MA_INVARIANT(is_aligned(piece.size(), kPageBytes));
  if (try_hugetlb(piece, options, notes)) return Backing::kHugetlb;
  // Prefaulting more than is available would invoke the out-of-memory killer instead of failing
  // here.
  const std::uint64_t available = available_memory_bytes();
  if (available != 0 && piece.size() > available) {
    throw HostMemoryError(join("cannot commit ", piece.size(), " bytes of host memory: ", available,
                               " bytes are available. fix: offload more, or use fewer ranks here"),
                          piece.size(), 0, 0);
  }
  if (mprotect(piece.data(), piece.size(), PROT_READ | PROT_WRITE) != 0) {
    throw HostMemoryError(
        join("cannot commit ", piece.size(), " bytes of host memory: ", std::strerror(errno),
             ". likely cause: vm.overcommit_memory=2 or vm.max_map_count"),
        piece.size(), 0, 0);
  }
  const bool huge = options.huge_pages != HugePages::kOff;
  (void)madvise(piece.data(), piece.size(), huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  // A forked child (a data loader's worker) never needs these pages. If they were shared, every
  // later write here would copy a page while the child lives.
  (void)madvise(piece.data(), piece.size(), MADV_DONTFORK);
  prefer_node(piece, options.numa_node, notes);
  if (const int code = prefault(piece, options.prefault_threads); code != 0) {
    (void)madvise(piece.data(), piece.size(), MADV_DONTNEED);
    throw HostMemoryError(join("cannot commit ", piece.size(),
                               " bytes of host memory: prefault: ", std::strerror(code)),
                          piece.size(), 0, 0);
  }
  if (huge) {
    collapse(piece, options, notes);
    note_transparent_setting(notes);
  }
  return Backing::kPages;
}

bool lock_pages(std::span<std::byte> piece, Notes& notes) {
  if (mlock(piece.data(), piece.size()) == 0) return true;
  notes.add(join("host memory is not page-locked: mlock: ", std::strerror(errno),
                 "; the limit on locked memory (RLIMIT_MEMLOCK) is ", memlock_limit_text(),
                 ". fix: ulimit -l unlimited; in docker --ulimit memlock=-1"));
  return false;
}

bool discard_pages(std::span<std::byte> piece, Notes& notes) {
  // MADV_DONTNEED refuses locked pages; munlock of unlocked pages has no effect.
  const bool unlocked = munlock(piece.data(), piece.size()) == 0;
  if (unlocked && madvise(piece.data(), piece.size(), MADV_DONTNEED) == 0) return true;
  notes.add(join("free host memory could not be given back: ", std::strerror(errno),
                 ". likely cause: vm.max_map_count"));
  return false;
}

PageUsage measure_pages(std::span<const std::byte> range, Notes& notes) {
  PageUsage usage;
  std::ifstream file("/proc/self/smaps");
  if (!file) notes.add("huge and locked bytes cannot be measured: no /proc/self/smaps here");
  const auto first = reinterpret_cast<std::uintptr_t>(range.data());
  bool ours = false;
  for (std::string line; std::getline(file, line);) {
    std::uintptr_t start = 0;
    std::uintptr_t end = 0;
    if (std::sscanf(line.c_str(), "%" SCNxPTR "-%" SCNxPTR " ", &start, &end) == 2) {
      ours = start < first + range.size() && end > first;
      continue;
    }
    char name[32];
    std::uint64_t kib = 0;
    if (!ours || std::sscanf(line.c_str(), "%31[A-Za-z_]: %" SCNu64 " kB", name, &kib) != 2) {
      continue;
    }
    const std::string_view field(name);
    if (field == "Rss") usage.resident_bytes += kib * 1024;
    if (field == "Locked") usage.locked_bytes += kib * 1024;
    if (field == "AnonHugePages") usage.huge_page_bytes += kib * 1024;
    if (field == "Private_Hugetlb") {  // not in the other fields, and never swapped out
      usage.resident_bytes += kib * 1024;
      usage.locked_bytes += kib * 1024;
      usage.huge_page_bytes += kib * 1024;
    }
  }
  return usage;
}

int node_of_page(const std::byte* page) {
  int node = -1;
  const long result =
      syscall(SYS_get_mempolicy, &node, nullptr, 0, page, MPOL_F_NODE | MPOL_F_ADDR);
  return result == 0 ? node : -1;
}

}  // namespace memascend
