// Volume: an opened file or block device with its alignment rules and capacity.
//
// A file is anonymous: it never has a name that another process could open. So two runs, or two
// models in one process, cannot touch each other's bytes, and the kernel frees the space when the
// last descriptor closes, however the process ends: return, exception, SIGTERM or SIGKILL. That is
// stronger than a lock file with a clean-up by the next run, and no code has to run for it.
//
// A block device is opened, locked and inspected before (memascend/volumes/device.py). The bytes
// before `start_bytes`, a header, are never written here.
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

/// The alignment that direct I/O requires; powers of two.
struct Alignment {
  std::uint64_t offset_bytes;  // offsets and lengths on the volume
  std::uint64_t memory_bytes;  // addresses in memory
};

/// The maximum size of a file in the file system of an open file; UINT64_MAX if it does not report
/// one. Moves the file's position; never slow.
std::uint64_t largest_file_bytes(int descriptor);

/// The file system has no space for the requested growth of a volume. Nothing was changed.
class VolumeFullError : public SystemCallError {
 public:
  explicit VolumeFullError(const std::string& what_failed) : SystemCallError(ENOSPC, what_failed) {}
};

/// Bytes by which a volume may grow, and the limit that allows no more.
struct Growth {
  enum class Bound { kFileSystem, kLargestFile, kProcess, kCapacity };
  std::uint64_t nbytes;
  Bound bound;
  std::uint64_t bound_bytes;  // of the whole volume; 0 with kFileSystem
};

class Volume {
 public:
  /// Opens an anonymous file in `directory` for direct I/O: with O_TMPFILE, or by create and unlink
  /// if the file system has no O_TMPFILE. If the file system refuses O_DIRECT (at open, or in a
  /// write of a first block), has it in name only, or copies on write, the file is buffered and
  /// direct() is false; the owner then calls drop_cache() after every transfer. Throws
  /// SystemCallError naming the directory; refuses a symbolic link in its place, or (from Linux 5.6
  /// on) in any component of its path. The file never grows beyond `limit_bytes`.
  static Volume open_anonymous(const std::string& directory,
                               std::uint64_t limit_bytes = UINT64_MAX);

  /// Uses the block device behind `descriptor`, which is duplicated, with its claim and lock: the
  /// bytes from `start_bytes` to `limit_bytes`, bypassing the page cache. Pre: start_bytes is
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
  /// The directory given to open_anonymous, the device's path, or the name of a volume in memory.
  const std::string& directory() const noexcept { return directory_; }
  bool direct() const noexcept { return direct_; }
  /// Returns whether the file system copies data on overwrite. If so, a write may find no space
  /// although it was reserved, and the file becomes fragmented.
  bool copies_on_write() const noexcept { return copies_on_write_; }
  /// From statx(STATX_DIOALIGN) if the kernel has it, else 4 KiB for both. Offsets in a file are
  /// aligned to at least 4 KiB.
  Alignment alignment() const noexcept { return alignment_; }
  /// Offset of our part: 0 except for a device. capacity_bytes() includes it.
  std::uint64_t start_bytes() const noexcept { return start_bytes_; }
  std::uint64_t capacity_bytes() const noexcept { return capacity_bytes_; }
  /// Bytes by which an unprivileged user may still grow the file: the minimum of the two below. An
  /// estimate, since other programs use the file system; grow() decides. Throws SystemCallError.
  Growth growth() const;
  /// The same without the free space: limited by the volume's own limit, the file system's maximum
  /// file size and RLIMIT_FSIZE. Does not query the file system.
  Growth limited_growth() const;
  /// Free bytes of the file system (statvfs). Throws SystemCallError if it cannot be queried.
  std::uint64_t device_bytes_left() const;
  /// Returns whether both are files of one file system.
  bool shares_device(const Volume& other) const noexcept {
    return device_ != 0 && device_ == other.device_;
  }
  /// Preallocates up to `capacity_bytes` (fallocate; if that is not supported, the space is
  /// compared with growth() and the file is extended). Throws VolumeFullError if the space is not
  /// there: nothing changed.
  void grow(std::uint64_t capacity_bytes);
  /// Gives the space of a range back to the file system; the file keeps its size, and the range
  /// reads as zeros. Returns false, with no change, where that cannot be: on a device, or in a file
  /// system without holes. True means that the space may be gone, also if only a part of it is.
  bool release(std::uint64_t offset, std::uint64_t nbytes) const noexcept;
  /// Preallocates a range that was released, as grow() does.
  void refill(std::uint64_t offset, std::uint64_t nbytes);
  /// Discards the stored data of a device, `kDiscardBytes` at a time: the drive then writes faster,
  /// and later readers get zeros if the device returns them. Best effort; some devices do not
  /// support it, and some take minutes. Calls `look(bytes done, bytes in all)` in between; an
  /// exception of it ends the discard. Done once; does nothing for files.
  void discard(const std::function<void(std::uint64_t, std::uint64_t)>& look);
  static constexpr std::uint64_t kDiscardBytes = std::uint64_t{1} << 30;
  /// Writes a range back and drops it from the page cache. For volumes that are not direct().
  /// Returns the errno of a write that the kernel accepted but could not finish, in this range or
  /// an earlier one; else 0.
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
  std::uint64_t limit_bytes_ = UINT64_MAX;         // maximum of capacity_bytes_
  std::uint64_t largest_file_bytes_ = UINT64_MAX;  // maximum of the file system
  bool discarded_ = false;
  std::uint64_t device_ = 0;  // device of the file system; 0: not on one
};

}  // namespace memascend
