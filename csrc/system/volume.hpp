// Volume: an opened file or block device with its alignment rules and capacity.
//
// A file is anonymous: it never has a name that another process could open. So two runs, or two
// models in one process, cannot touch each other's bytes, and the kernel takes the space back when
// the last descriptor closes, however the process ends: return, exception, SIGTERM or SIGKILL. That
// is stronger than a lock file plus a clean-up by the next run, and it needs no code that must run.
//
// A block device comes opened, locked and looked at (memascend/volumes/device.py). What lies before
// its first byte for us, a header, is never written here.
//
// Knows the kernel's file interface; never knows keys, extents or engines. grow() belongs to one
// thread at a time; the other const methods may run beside it on any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "base/check.hpp"
#include "system/private_descriptor.hpp"

namespace memascend {

/// The multiples that direct I/O needs of offsets, sizes and memory addresses; all powers of two.
struct Alignment {
  std::uint64_t offset_bytes;  // offsets and lengths on the volume
  std::uint64_t memory_bytes;  // addresses in memory
};

/// The largest file that the file system of an open file can hold, in bytes; UINT64_MAX where it
/// does not say. Moves the file's position, and asks nothing that takes time.
std::uint64_t largest_file_bytes(int descriptor);

/// The file system cannot hold what a volume is to grow to. Nothing was changed.
class VolumeFullError : public SystemCallError {
 public:
  explicit VolumeFullError(const std::string& what_failed) : SystemCallError(ENOSPC, what_failed) {}
};

/// Bytes by which a volume may grow, and the reason why not by more.
struct Growth {
  enum class Bound { kFileSystem, kLargestFile, kProcess, kCapacity };
  std::uint64_t nbytes;
  Bound bound;
  std::uint64_t bound_bytes;  // of the whole volume; 0 with kFileSystem
};

class Volume {
 public:
  /// Opens an anonymous file in `directory` for direct I/O: O_TMPFILE, or create and unlink at once
  /// where the file system has no O_TMPFILE. Where the file system refuses O_DIRECT (at open, or
  /// for a first block really written), has it in name only, or copies on write, the file is used
  /// buffered and direct() is false; the owner then calls drop_cache() behind every transfer.
  /// Throws SystemCallError naming the directory; a symbolic link in its place, or (from Linux 5.6
  /// on) in that of a directory above it, is refused. The file never grows beyond `limit_bytes`.
  static Volume open_anonymous(const std::string& directory,
                               std::uint64_t limit_bytes = UINT64_MAX);

  /// The block device behind `descriptor`, which is duplicated: claim and lock stay with it. Bytes
  /// from `start_bytes` on, up to `limit_bytes`, are used, past the page cache. Pre: start_bytes is
  /// positive. Throws SystemCallError.
  static Volume adopt_device(int descriptor, const std::string& path, std::uint64_t start_bytes,
                             std::uint64_t limit_bytes);

  /// A volume in RAM (memfd) that can grow to `limit_bytes`, with the alignment rules of a strict
  /// device. For tests.
  static Volume open_in_memory(std::uint64_t limit_bytes, const std::string& name = "(memory)");

  Volume(Volume&& other) noexcept;
  Volume& operator=(Volume&& other) noexcept;
  Volume(const Volume&) = delete;
  Volume& operator=(const Volume&) = delete;
  ~Volume();

  int descriptor() const noexcept { return descriptor_.get(); }
  /// The directory as given to open_anonymous, the device's path, or the name of one in memory.
  const std::string& directory() const noexcept { return directory_; }
  bool direct() const noexcept { return direct_; }
  /// The file system writes a copy of what is overwritten, elsewhere: space that was reserved does
  /// not mean that a write finds room, and the file scatters.
  bool copies_on_write() const noexcept { return copies_on_write_; }
  /// From statx(STATX_DIOALIGN) where the kernel has it, else one 4 KiB block for both. Of a file
  /// at least 4 KiB of offset.
  Alignment alignment() const noexcept { return alignment_; }
  /// Where the part begins that is ours: 0 but for a device. capacity_bytes() starts from there.
  std::uint64_t start_bytes() const noexcept { return start_bytes_; }
  std::uint64_t capacity_bytes() const noexcept { return capacity_bytes_; }
  /// What an unprivileged user may still grow the file by: the least of the two below. An estimate,
  /// since others use the same file system; grow() is what decides. Throws SystemCallError.
  Growth growth() const;
  /// The same without the free space: what the volume's own limit, the largest file of the file
  /// system and RLIMIT_FSIZE leave. Asks no file system.
  Growth limited_growth() const;
  /// Bytes that the file system has (statvfs). Throws SystemCallError where it does not answer.
  std::uint64_t device_bytes_left() const;
  /// Both are files of one file system.
  bool shares_device(const Volume& other) const noexcept {
    return device_ != 0 && device_ == other.device_;
  }
  /// Preallocates up to `capacity_bytes` (fallocate; where that is not supported, the space is
  /// compared with growth() and the file is extended). Throws VolumeFullError when the space is not
  /// there: nothing changed.
  void grow(std::uint64_t capacity_bytes);
  /// Tells a device that what was stored is of no use any more, `kDiscardBytes` at a time: the
  /// drive writes faster for it, and the next reader finds nothing where it then gives zeros. Best
  /// effort; not every device can, and some take minutes. Calls `look(bytes done, bytes in all)`
  /// between two; what that throws ends it. Done once; does nothing for files.
  void discard(const std::function<void(std::uint64_t, std::uint64_t)>& look);
  static constexpr std::uint64_t kDiscardBytes = std::uint64_t{1} << 30;
  /// Takes a range out of the page cache, after writing it back. For volumes that are not direct().
  /// The errno of a write that the kernel took and could not finish, of this range or of an earlier
  /// one; else 0.
  int drop_cache(std::uint64_t offset, std::uint64_t nbytes) const noexcept;

 private:
  Volume() = default;
  bool find_alignment();
  bool forbid_copy_on_write() const;
  bool set_direct(bool direct) const;
  bool direct_write_works() const;

  PrivateDescriptor descriptor_;
  std::string directory_;
  bool direct_ = false;
  bool copies_on_write_ = false;
  Alignment alignment_{4096, 4096};
  std::uint64_t start_bytes_ = 0;
  std::uint64_t capacity_bytes_ = 0;
  std::uint64_t limit_bytes_ = UINT64_MAX;         // of capacity_bytes_
  std::uint64_t largest_file_bytes_ = UINT64_MAX;  // of the file system
  bool discarded_ = false;
  std::uint64_t device_ = 0;  // of the file system; 0: none that others could fill
};

}  // namespace memascend
