// sources: csrc/system/private_descriptor.cpp csrc/system/volume.cpp
// Volumes: nameless files that grow in whole or not at all.
#include "system/volume.hpp"

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/align.hpp"
#include "base/check.hpp"
#include "support/expect.hpp"

namespace {

// A file system whose files end there.
off_t largest_bytes = 0;  // 0: the real one's
bool hides_largest = false;
// A device of so many bytes, and what it was told to forget.
off_t device_bytes = 0;  // 0: files are files
std::vector<std::pair<std::uint64_t, std::uint64_t>> discarded;
int discard_error = 0;

}  // namespace

// These stand before libc's.
extern "C" off_t lseek(int descriptor, off_t offset, int whence) noexcept {
  if (whence == SEEK_END && device_bytes > 0) return device_bytes;
  if (largest_bytes > 0 && !hides_largest && offset > largest_bytes) {
    errno = EINVAL;
    return -1;
  }
  return ::syscall(SYS_lseek, descriptor, offset, whence);
}
extern "C" int fallocate(int descriptor, int mode, off_t offset, off_t nbytes) {
  if (largest_bytes > 0 && offset + nbytes > largest_bytes) {
    errno = EFBIG;
    return -1;
  }
  return static_cast<int>(::syscall(SYS_fallocate, descriptor, mode, offset, nbytes));
}
extern "C" int fstat(int descriptor, struct stat* state) noexcept {
  const int result = ::fstatat(descriptor, "", state, AT_EMPTY_PATH);
  if (device_bytes > 0) state->st_mode = (state->st_mode & ~S_IFMT) | S_IFBLK;
  return result;
}
extern "C" int ioctl(int descriptor, unsigned long request, ...) noexcept {
  va_list rest;
  va_start(rest, request);
  void* argument = va_arg(rest, void*);
  va_end(rest);
  if (request != BLKDISCARD) {
    return static_cast<int>(::syscall(SYS_ioctl, descriptor, request, argument));
  }
  const auto* range = static_cast<const std::uint64_t*>(argument);
  discarded.emplace_back(range[0], range[1]);
  errno = discard_error;
  return discard_error == 0 ? 0 : -1;
}

namespace memascend {
namespace {

std::uint64_t file_bytes(const Volume& volume) {
  struct stat state{};
  MA_INVARIANT(::fstat(volume.descriptor(), &state) == 0);
  return static_cast<std::uint64_t>(state.st_size);
}

template <typename Action>
bool is_full(Action action) {
  try {
    action();
  } catch (const VolumeFullError& error) {
    MA_INVARIANT(error.code() == ENOSPC);
    return true;
  }
  return false;
}

void a_file_has_no_name_and_grows() {
  Volume volume = Volume::open_anonymous(".");
  struct stat state{};
  MA_INVARIANT(::fstat(volume.descriptor(), &state) == 0);
  MA_INVARIANT(state.st_nlink == 0);
  MA_INVARIANT((state.st_mode & 0777) == 0600);
  MA_INVARIANT(is_power_of_two(volume.alignment().offset_bytes));
  MA_INVARIANT(is_power_of_two(volume.alignment().memory_bytes));
  volume.grow(1 << 20);
  MA_INVARIANT(file_bytes(volume) == 1 << 20);
  volume.grow(1 << 19);  // never shrinks
  MA_INVARIANT(volume.capacity_bytes() == 1 << 20);
  Volume moved = std::move(volume);
  MA_INVARIANT(volume.descriptor() == -1);
  MA_INVARIANT(moved.capacity_bytes() == 1 << 20);
}

void growth_that_does_not_fit_changes_nothing() {
  Volume volume = Volume::open_anonymous(".");
  volume.grow(1 << 20);
  MA_INVARIANT(is_full([&] { volume.grow(std::uint64_t{1} << 62); }));
  std::signal(SIGXFSZ, SIG_DFL);  // would end this process if the limit were ever hit
  const struct rlimit limit{2 << 20, RLIM_INFINITY};
  MA_INVARIANT(::setrlimit(RLIMIT_FSIZE, &limit) == 0);
  MA_INVARIANT(volume.growth().nbytes == 1 << 20);
  MA_INVARIANT(volume.growth().bound == Growth::Bound::kProcess);
  MA_INVARIANT(is_full([&] { volume.grow(3 << 20); }));
  MA_INVARIANT(volume.capacity_bytes() == 1 << 20);
  MA_INVARIANT(file_bytes(volume) == 1 << 20);
  volume.grow(2 << 20);
  const struct rlimit less{512, RLIM_INFINITY};  // than the block that is tried at the start
  MA_INVARIANT(::setrlimit(RLIMIT_FSIZE, &less) == 0);
  MA_INVARIANT(is_full([] { Volume::open_anonymous(".").grow(4096); }));
}

void the_largest_file_of_the_file_system_is_a_limit() {
  largest_bytes = (3 << 20) + 1024;
  Volume volume = Volume::open_anonymous(".");
  volume.grow(1 << 20);
  const Growth growth = volume.growth();
  MA_INVARIANT(growth.bound == Growth::Bound::kLargestFile);
  MA_INVARIANT(growth.nbytes == (2 << 20) + 1024);
  MA_INVARIANT(growth.bound_bytes == (3 << 20) + 1024);
  MA_INVARIANT(is_full([&] { volume.grow(4 << 20); }));
  volume.grow(3 << 20);
  largest_bytes = 0;
  MA_INVARIANT(largest_file_bytes(volume.descriptor()) > std::uint64_t{1} << 32);
}

void a_largest_file_that_nobody_told_of_is_learned() {
  largest_bytes = 3 << 20;
  hides_largest = true;
  Volume volume = Volume::open_anonymous(".");
  MA_INVARIANT(is_full([&] { volume.grow(4 << 20); }));
  MA_INVARIANT(file_bytes(volume) == 0);
  MA_INVARIANT(volume.growth().nbytes < 4 << 20);
  MA_INVARIANT(volume.growth().bound == Growth::Bound::kLargestFile);
  volume.grow(3 << 20);
  largest_bytes = 0;
  hides_largest = false;
}

constexpr std::uint64_t kGib = std::uint64_t{1} << 30;

Volume open_device() {
  Volume file = Volume::open_anonymous(".");
  device_bytes = 10 * kGib;
  Volume device = Volume::adopt_device(file.descriptor(), "device", kGib, UINT64_MAX);
  device_bytes = 0;
  device.grow(kGib + 2 * kGib + 4096);
  discarded.clear();
  return device;
}

void a_device_forgets_in_pieces_that_somebody_looks_at() {
  Volume device = open_device();
  std::vector<std::uint64_t> looks;
  device.discard([&](std::uint64_t done, std::uint64_t all) {
    MA_INVARIANT(all == 2 * kGib + 4096);
    looks.push_back(done);
  });
  MA_INVARIANT((looks == std::vector<std::uint64_t>{kGib, 2 * kGib, 2 * kGib + 4096}));
  MA_INVARIANT((discarded == std::vector<std::pair<std::uint64_t, std::uint64_t>>{
                                 {kGib, kGib}, {2 * kGib, kGib}, {3 * kGib, 4096}}));
  device.discard([](std::uint64_t, std::uint64_t) {});
  MA_INVARIANT(discarded.size() == 3);
}

void an_exception_ends_the_forgetting() {
  {
    Volume device = open_device();
    try {
      device.discard([](std::uint64_t, std::uint64_t) { throw std::runtime_error("Ctrl-C"); });
      MA_INVARIANT(false && "went on");
    } catch (const std::runtime_error&) {
    }
  }
  MA_INVARIANT(discarded.size() == 1);
}

void a_device_that_cannot_forget_is_asked_once() {
  discard_error = EOPNOTSUPP;
  Volume device = open_device();
  device.discard([](std::uint64_t, std::uint64_t) { MA_INVARIANT(false); });
  MA_INVARIANT(discarded.size() == 1);
  discard_error = 0;
}

void memory_has_its_limit() {
  Volume volume = Volume::open_in_memory(1 << 20);
  volume.grow(1 << 20);
  MA_INVARIANT(volume.growth().nbytes == 0);
  MA_INVARIANT(volume.growth().bound == Growth::Bound::kCapacity);
  MA_INVARIANT(is_full([&] { volume.grow((1 << 20) + 4096); }));
}

void what_is_no_device_is_not_adopted() {
  Volume file = Volume::open_anonymous(".");
  file.grow(1 << 20);
  try {
    Volume::adopt_device(file.descriptor(), "no device", 1 << 20, UINT64_MAX);
    MA_INVARIANT(false && "adopted");
  } catch (const SystemCallError& error) {
    MA_INVARIANT(error.code() == ENOTBLK);
  }
}

void a_directory_that_is_not_there_is_named() {
  try {
    Volume::open_anonymous("./no such directory");
    MA_INVARIANT(false && "opened");
  } catch (const SystemCallError& error) {
    MA_INVARIANT(error.code() == ENOENT);
    MA_INVARIANT(std::string(error.what()).find("./no such directory") != std::string::npos);
  }
}

// Links in place of the directory and of one above it; what they lead to could be used.
void a_symbolic_link_on_the_way_is_refused() {
  if (is_emulated()) return;  // qemu has no openat2
  char base[] = "/tmp/memascend-volume-XXXXXX";
  MA_INVARIANT(::mkdtemp(base) != nullptr);
  const std::string real = join(base, "/real"), link = join(base, "/link");
  MA_INVARIANT(::mkdir(real.c_str(), 0700) == 0);
  MA_INVARIANT(::mkdir((real + "/below").c_str(), 0700) == 0);
  MA_INVARIANT(::symlink("real", link.c_str()) == 0);
  Volume::open_anonymous(real + "/below");
  for (const std::string& path : {link, link + "/below"}) {
    try {
      Volume::open_anonymous(path);
      MA_INVARIANT(false && "followed");
    } catch (const SystemCallError& error) {
      MA_INVARIANT(error.code() == ELOOP);
    }
  }
  MA_INVARIANT(::rmdir((real + "/below").c_str()) == 0);  // nothing is left in it
  MA_INVARIANT(::rmdir(real.c_str()) == 0);
  MA_INVARIANT(::unlink(link.c_str()) == 0);
  MA_INVARIANT(::rmdir(base) == 0);
}

}  // namespace
}  // namespace memascend

int main() {
  memascend::a_file_has_no_name_and_grows();
  memascend::the_largest_file_of_the_file_system_is_a_limit();
  memascend::a_largest_file_that_nobody_told_of_is_learned();
  memascend::a_device_forgets_in_pieces_that_somebody_looks_at();
  memascend::an_exception_ends_the_forgetting();
  memascend::a_device_that_cannot_forget_is_asked_once();
  memascend::memory_has_its_limit();
  memascend::what_is_no_device_is_not_adopted();
  memascend::a_directory_that_is_not_there_is_named();
  memascend::a_symbolic_link_on_the_way_is_refused();
  memascend::growth_that_does_not_fit_changes_nothing();  // last: it lowers a limit
  return 0;
}
