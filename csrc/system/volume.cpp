#include "system/volume.hpp"

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <limits>
#include <memory>
#include <utility>

#include "base/align.hpp"

namespace memascend {
namespace {

constexpr mode_t kOwnerOnly = 0600;
constexpr std::uint64_t kBlockBytes = 4096;  // for devices that do not report their block size
constexpr std::size_t kMemoryNameMax = 200;  // memfd_create refuses more than 249 bytes

/// Allocates space for a part of a file; returns the errno.
int allocate(int descriptor, std::uint64_t begin, std::uint64_t nbytes) {
  int result = 0;
  do {
    result = ::fallocate(descriptor, 0, static_cast<off_t>(begin), static_cast<off_t>(nbytes));
  } while (result != 0 && errno == EINTR);
  return result == 0 ? 0 : errno;
}

/// Makes a hole of a part of a file; returns the errno.
int punch(int descriptor, std::uint64_t begin, std::uint64_t nbytes) {
  int result = 0;
  do {
    result = ::fallocate(descriptor, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                         static_cast<off_t>(begin), static_cast<off_t>(nbytes));
  } while (result != 0 && errno == EINTR);
  return result == 0 ? 0 : errno;
}

// The head of struct statx up to the fields of Linux 6.1, which older C libraries lack.
struct StatxHead {
  std::uint32_t mask;
  std::byte unused[148];
  std::uint32_t dio_memory_bytes;
  std::uint32_t dio_offset_bytes;
  std::byte rest[96];
};
static_assert(offsetof(StatxHead, dio_memory_bytes) == 0x98);
static_assert(sizeof(StatxHead) == 0x100);
constexpr unsigned kStatxDioAlign = 0x2000;

// File systems that never overwrite in place: an overwrite does not go to the preallocated space.
constexpr std::int64_t kBtrfsMagic = 0x9123683e;
constexpr std::int64_t kZfsMagic = 0x2fc12fc1;
constexpr std::int64_t kBcachefsMagic = 0xca451a4e;

// openat2 of Linux 5.6, which older C libraries lack; one number on every architecture.
constexpr long kOpenat2 = 437;
struct HowToOpen {
  std::uint64_t flags;
  std::uint64_t mode;
  std::uint64_t resolve;
};
constexpr std::uint64_t kResolveNoSymbolicLinks = 0x04;

// Opens a directory, and refuses a symbolic link anywhere in its path: a user who may rename a
// directory in it could otherwise redirect a path after it was checked. Returns -1 and sets errno.
int open_directory(const std::string& path) {
  // O_PATH needs no read permission.
  constexpr int kFlags = O_PATH | O_DIRECTORY | O_CLOEXEC;
  const HowToOpen how{kFlags, 0, kResolveNoSymbolicLinks};
  const long opened = ::syscall(kOpenat2, AT_FDCWD, path.c_str(), &how, sizeof(how));
  // An older kernel or a seccomp profile refuses the call: check at least the last component.
  if (opened < 0 && (errno == ENOSYS || errno == EPERM)) {
    return ::open(path.c_str(), kFlags | O_NOFOLLOW);
  }
  return static_cast<int>(opened);
}

// Creates a file with a random name and unlinks it. Safe in between: the file is new, not reached
// through a symbolic link, and accessible to its owner alone.
int create_and_unlink(int directory) {
  std::uint64_t number = 0;
  if (::getrandom(&number, sizeof(number), 0) != sizeof(number)) return -1;
  char name[] = ".memascend-0000000000000000";
  std::to_chars(name + sizeof(".memascend-") - 1, name + sizeof(name) - 1, number, 16);
  const int descriptor =
      ::openat(directory, name, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC | O_NOFOLLOW, kOwnerOnly);
  if (descriptor >= 0) ::unlinkat(directory, name, 0);
  return descriptor;
}

// Opens a file without a name, or returns -1 and sets errno. Opens it buffered: an open that
// creates a file and then refuses O_DIRECT would leave the file behind.
int open_nameless(const std::string& path) {
  const PrivateDescriptor directory(open_directory(path));
  if (directory.get() < 0) return -1;
  const int descriptor =
      ::openat(directory.get(), ".", O_TMPFILE | O_RDWR | O_CLOEXEC | O_EXCL, kOwnerOnly);
  if (descriptor >= 0 || (errno != EOPNOTSUPP && errno != EISDIR)) return descriptor;
  return create_and_unlink(directory.get());
}

}  // namespace

// A seek beyond the limit is refused, at once and without a change to the file.
std::uint64_t largest_file_bytes(int descriptor) {
  constexpr auto kMax = static_cast<std::uint64_t>(std::numeric_limits<off_t>::max());
  std::uint64_t allowed = 0;
  std::uint64_t refused = kMax;
  const auto is_allowed = [descriptor](std::uint64_t offset) {
    return ::lseek(descriptor, static_cast<off_t>(offset), SEEK_SET) >= 0;
  };
  if (is_allowed(kMax) || !is_allowed(0)) return UINT64_MAX;
  while (refused - allowed > 1) {
    const std::uint64_t middle = allowed + (refused - allowed) / 2;
    (is_allowed(middle) ? allowed : refused) = middle;
  }
  return allowed;
}

Volume Volume::open_anonymous(const std::string& directory, std::uint64_t limit_bytes) {
  Volume volume;
  volume.directory_ = directory;
  volume.limit_bytes_ = limit_bytes;
  volume.descriptor_ = PrivateDescriptor(static_cast<int>(
      MA_SYSCALL(open_nameless(directory), "open an anonymous file in ", directory)));
  struct stat state{};
  MA_SYSCALL(::fstat(volume.descriptor(), &state), "look at the file in ", directory);
  volume.device_ = state.st_dev;
  volume.largest_file_bytes_ = largest_file_bytes(volume.descriptor());
  volume.copies_on_write_ = !volume.forbid_copy_on_write();
  // Direct writes would still be copied, checksummed and cached in the page cache (btrfs from 6.14
  // on), in spite of the flag.
  volume.direct_ = volume.find_alignment() && !volume.copies_on_write_ && volume.set_direct(true) &&
                   volume.direct_write_works();
  if (!volume.direct_) volume.set_direct(false);
  // Direct writes of less than a file system block would wait for each other (ext4).
  volume.alignment_.offset_bytes = std::max(volume.alignment_.offset_bytes, kBlockBytes);
  return volume;
}

Volume Volume::adopt_device(int descriptor, const std::string& path, std::uint64_t start_bytes,
                            std::uint64_t limit_bytes) {
  MA_INVARIANT(start_bytes > 0);
  Volume volume;
  volume.directory_ = path;
  volume.descriptor_ = PrivateDescriptor(
      static_cast<int>(MA_SYSCALL(::fcntl(descriptor, F_DUPFD_CLOEXEC, 0), "use ", path)));
  volume.start_bytes_ = start_bytes;  // not 0 from here on, so the destructor does not truncate
  volume.capacity_bytes_ = start_bytes;
  struct stat state{};
  MA_SYSCALL(::fstat(volume.descriptor(), &state), "look at ", path);
  if (!S_ISBLK(state.st_mode)) throw SystemCallError(ENOTBLK, join("use ", path));
  const auto device_bytes = static_cast<std::uint64_t>(
      MA_SYSCALL(::lseek(volume.descriptor(), 0, SEEK_END), "ask for the size of ", path));
  if (!volume.find_alignment()) throw SystemCallError(EOPNOTSUPP, join("use O_DIRECT on ", path));
  if (!volume.set_direct(true)) throw SystemCallError(errno, join("set O_DIRECT on ", path));
  volume.direct_ = true;
  volume.limit_bytes_ = std::min(device_bytes, limit_bytes);
  return volume;
}

Volume Volume::open_in_memory(std::uint64_t limit_bytes, const std::string& name) {
  Volume volume;
  volume.directory_ = name;
  volume.descriptor_ = PrivateDescriptor(static_cast<int>(MA_SYSCALL(
      ::memfd_create(name.substr(0, kMemoryNameMax).c_str(), MFD_CLOEXEC), "memfd_create")));
  volume.direct_ = true;
  volume.alignment_ = {512, 64};
  volume.limit_bytes_ = limit_bytes;
  return volume;
}

Volume::Volume(Volume&& other) noexcept { *this = std::move(other); }

Volume& Volume::operator=(Volume&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  std::swap(directory_, other.directory_);
  std::swap(direct_, other.direct_);
  std::swap(copies_on_write_, other.copies_on_write_);
  std::swap(alignment_, other.alignment_);
  std::swap(start_bytes_, other.start_bytes_);
  std::swap(capacity_bytes_, other.capacity_bytes_);
  std::swap(limit_bytes_, other.limit_bytes_);
  std::swap(largest_file_bytes_, other.largest_file_bytes_);
  std::swap(discarded_, other.discarded_);
  std::swap(device_, other.device_);
  return *this;
}

Volume::~Volume() {
  if (descriptor() < 0) return;
  // Before the close: a process with a copy of the descriptor must not keep the space.
  if (start_bytes_ == 0) (void)!::ftruncate(descriptor(), 0);
}

// In pieces: one call for a whole drive may take minutes, and before Linux 6.10 a signal does not
// interrupt it.
void Volume::discard(const std::function<void(std::uint64_t, std::uint64_t)>& look) {
  if (start_bytes_ == 0 || std::exchange(discarded_, true)) return;
  const std::uint64_t all = capacity_bytes_ - start_bytes_;
  for (std::uint64_t done = 0; done < all;) {
    std::uint64_t range[2] = {start_bytes_ + done, std::min(kDiscardBytes, all - done)};
    if (::ioctl(descriptor(), BLKDISCARD, range) != 0) return;
    done += range[1];
    look(done, all);
  }
}

Growth Volume::growth() const {
  const Growth limited = limited_growth();
  const std::uint64_t device_bytes = device_bytes_left();
  if (limited.nbytes <= device_bytes) return limited;
  return {device_bytes, Growth::Bound::kFileSystem, 0};
}

Growth Volume::limited_growth() const {
  Growth least{UINT64_MAX, Growth::Bound::kFileSystem, 0};
  const auto bound_by = [&](std::uint64_t bound_bytes, Growth::Bound bound) {
    const std::uint64_t left = bound_bytes - std::min(bound_bytes, capacity_bytes_);
    if (left < least.nbytes) least = {left, bound, bound_bytes};
  };
  if (limit_bytes_ != UINT64_MAX) bound_by(limit_bytes_, Growth::Bound::kCapacity);
  if (start_bytes_ > 0) return least;  // the other bounds apply to files only
  if (largest_file_bytes_ != UINT64_MAX) {
    bound_by(largest_file_bytes_, Growth::Bound::kLargestFile);
  }
  struct rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    bound_by(limit.rlim_cur, Growth::Bound::kProcess);
  }
  return least;
}

std::uint64_t Volume::device_bytes_left() const {
  if (device_ == 0) return UINT64_MAX;
  struct statvfs state{};
  MA_SYSCALL(::fstatvfs(descriptor(), &state), "ask for the free space of ", directory_);
  return static_cast<std::uint64_t>(state.f_bavail) * state.f_frsize;
}

void Volume::grow(std::uint64_t capacity_bytes) {
  if (capacity_bytes <= capacity_bytes_) return;
  const std::uint64_t needed = capacity_bytes - capacity_bytes_;
  const std::uint64_t available = growth().nbytes;
  const auto full = [&] {
    return VolumeFullError(join("grow the file in ", directory_, " by ", needed, " bytes (",
                                available, " bytes available)"));
  };
  // Checked in advance: fallocate may fill the disk for minutes before it fails, and growth beyond
  // RLIMIT_FSIZE raises SIGXFSZ.
  if (needed > available) throw full();
  if (start_bytes_ > 0) {  // a device already has its bytes
    capacity_bytes_ = capacity_bytes;
    return;
  }
  // A file in memory takes no memory before it is written.
  int code = device_ == 0 ? EOPNOTSUPP : allocate(descriptor(), capacity_bytes_, needed);
  if (code == EOPNOTSUPP || code == ENOSYS) {
    code = ::ftruncate(descriptor(), static_cast<off_t>(capacity_bytes)) == 0 ? 0 : errno;
  }
  if (code != 0) {
    // A failed fallocate may have allocated a part; give it back so that nothing changes.
    (void)!::ftruncate(descriptor(), static_cast<off_t>(capacity_bytes_));
    // A file system that did not report its limit before.
    if (code == EFBIG) largest_file_bytes_ = std::min(largest_file_bytes_, capacity_bytes - 1);
    if (code == ENOSPC || code == EFBIG || code == EDQUOT) throw full();
    throw SystemCallError(code, join("grow the file in ", directory_, " by ", needed, " bytes"));
  }
  capacity_bytes_ = capacity_bytes;
}

bool Volume::release(std::uint64_t offset, std::uint64_t nbytes) const noexcept {
  if (start_bytes_ > 0) return false;
  const int code = punch(descriptor(), offset, nbytes);
  return code != EOPNOTSUPP && code != ENOSYS;  // after another error a part may be gone
}

void Volume::refill(std::uint64_t offset, std::uint64_t nbytes) {
  const std::string failed = join("refill ", nbytes, " bytes of the file in ", directory_);
  // fallocate would fill a full drive first, and fail then.
  if (nbytes > device_bytes_left()) throw VolumeFullError(failed);
  const int code = device_ == 0 ? 0 : allocate(descriptor(), offset, nbytes);
  if (code == 0 || code == EOPNOTSUPP || code == ENOSYS) return;
  // It may have allocated a part; give it back so that nothing changes.
  (void)punch(descriptor(), offset, nbytes);
  if (code == ENOSPC || code == EDQUOT) throw VolumeFullError(failed);
  throw SystemCallError(code, failed);
}

int Volume::drop_cache(std::uint64_t offset, std::uint64_t nbytes) const noexcept {
  const auto start = static_cast<off_t>(offset);
  const auto length = static_cast<off_t>(nbytes);
  const int result = ::sync_file_range(
      descriptor(), start, length,
      SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
  const int code = result == 0 || errno == ENOSYS ? 0 : errno;
  ::posix_fadvise(descriptor(), start, length, POSIX_FADV_DONTNEED);
  return code;
}

// Queries the file system; false if it reports no direct I/O for this file, though it may accept
// O_DIRECT (ext4 with data=journal, fscrypt).
bool Volume::find_alignment() {
  StatxHead state{};
  const long result = ::syscall(SYS_statx, descriptor(), "", AT_EMPTY_PATH, kStatxDioAlign, &state);
  if (result != 0 || (state.mask & kStatxDioAlign) == 0) return true;
  if (state.dio_offset_bytes == 0 || state.dio_memory_bytes == 0) return false;
  if (is_power_of_two(state.dio_offset_bytes) && is_power_of_two(state.dio_memory_bytes)) {
    alignment_ = {state.dio_offset_bytes, state.dio_memory_bytes};
  }
  return true;
}

// Makes overwrites go to the reserved space; false if the file system still copies on write. Pre:
// the file is empty.
bool Volume::forbid_copy_on_write() const {
  struct statfs state{};
  if (::fstatfs(descriptor(), &state) != 0) return true;
  const auto magic = static_cast<std::int64_t>(static_cast<std::uint32_t>(state.f_type));
  if (magic == kZfsMagic || magic == kBcachefsMagic) return false;
  if (magic != kBtrfsMagic) return true;
  int flags = 0;
  if (::ioctl(descriptor(), FS_IOC_GETFLAGS, &flags) != 0) return false;
  flags = (flags & ~FS_COMPR_FL) | FS_NOCOW_FL;
  if (::ioctl(descriptor(), FS_IOC_SETFLAGS, &flags) != 0) return false;
  return ::ioctl(descriptor(), FS_IOC_GETFLAGS, &flags) == 0 && (flags & FS_NOCOW_FL) != 0;
}

// Also clears O_NONBLOCK, with which a device is opened: a mapped device would return EAGAIN.
bool Volume::set_direct(bool direct) const {
  const int flags = ::fcntl(descriptor(), F_GETFL);
  if (flags < 0) return false;
  const int others = flags & ~(O_DIRECT | O_NONBLOCK);
  return ::fcntl(descriptor(), F_SETFL, others | (direct ? O_DIRECT : 0)) == 0;
}

bool Volume::direct_write_works() const {
  const std::size_t block_bytes =
      std::max({kBlockBytes, alignment_.offset_bytes, alignment_.memory_bytes});
  const std::unique_ptr<void, decltype(&std::free)> block(
      std::aligned_alloc(block_bytes, block_bytes), &std::free);
  if (block == nullptr) throw std::bad_alloc();
  // Too small a limit on files, whose SIGXFSZ would end the process, does not rule direct I/O out,
  // nor does a full disk.
  if (limited_growth().nbytes < block_bytes) return true;
  std::memset(block.get(), 0, block_bytes);
  const ssize_t written = ::pwrite(descriptor(), block.get(), block_bytes, 0);
  const int code = errno;
  MA_SYSCALL(::ftruncate(descriptor(), 0), "empty the file in ", directory_);
  if (written < 0 && code != EINVAL && code != ENOSPC) {
    throw SystemCallError(code, join("write a first block in ", directory_));
  }
  return written >= 0 || code == ENOSPC;
}

}  // namespace memascend
