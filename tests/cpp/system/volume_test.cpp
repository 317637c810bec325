// sources: csrc/system/private_descriptor.cpp csrc/system/volume.cpp
// Volumes: nameless files that grow in whole or not at all.
#include "system/volume.hpp"

#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <string>
#include <utility>

#include "base/align.hpp"
#include "base/check.hpp"
#include "support/expect.hpp"

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
  MA_INVARIANT(volume.available_bytes() == 1 << 20);
  MA_INVARIANT(is_full([&] { volume.grow(3 << 20); }));
  MA_INVARIANT(volume.capacity_bytes() == 1 << 20);
  MA_INVARIANT(file_bytes(volume) == 1 << 20);
  volume.grow(2 << 20);
}

void memory_has_its_limit() {
  Volume volume = Volume::open_in_memory(1 << 20);
  volume.grow(1 << 20);
  MA_INVARIANT(volume.available_bytes() == 0);
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
  memascend::memory_has_its_limit();
  memascend::what_is_no_device_is_not_adopted();
  memascend::a_directory_that_is_not_there_is_named();
  memascend::a_symbolic_link_on_the_way_is_refused();
  memascend::growth_that_does_not_fit_changes_nothing();  // last: it lowers a limit
  return 0;
}
