// Volume: an opened file (later: block device) with its alignment rules and capacity.
//
// Knows the kernel's file interface; never knows keys, extents or engines. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace memascend {

/// What direct I/O asks of offsets, sizes and memory addresses; all powers of two.
struct Alignment {
  std::uint64_t offset_bytes;  // offsets and lengths on the volume
  std::uint64_t memory_bytes;  // addresses in memory
};

class Volume {
 public:
  /// Opens an anonymous file in `directory` for direct I/O: O_TMPFILE, or create and unlink at once
  /// where the file system has no O_TMPFILE. The file has no name, so no other run can touch it and
  /// the kernel takes its space back however the process ends (also SIGKILL).
  /// Where the file system refuses O_DIRECT the file is opened buffered and direct() is false; the
  /// page cache is then dropped behind every write by the engines' owner.
  /// Throws SystemCallError naming the directory.
  static Volume open_anonymous(const std::string& directory);

  Volume(Volume&& other) noexcept;
  Volume& operator=(Volume&& other) noexcept;
  Volume(const Volume&) = delete;
  Volume& operator=(const Volume&) = delete;
  ~Volume();

  int descriptor() const noexcept { return descriptor_; }
  const std::string& directory() const noexcept { return directory_; }
  bool direct() const noexcept { return direct_; }
  /// From statx(STATX_DIOALIGN) where the kernel tells, else from the device's logical block size.
  Alignment alignment() const noexcept { return alignment_; }
  std::uint64_t capacity_bytes() const noexcept { return capacity_bytes_; }
  /// Bytes that an unprivileged user may still reserve on the file system.
  std::uint64_t available_bytes() const;
  /// Preallocates up to `capacity_bytes` (fallocate; where that is not supported, statvfs is checked
  /// and the file is extended). Throws VolumeFullError when the space is not there: nothing changed.
  void grow(std::uint64_t capacity_bytes);

 private:
  Volume() = default;
  int descriptor_ = -1;
  std::string directory_;
  bool direct_ = false;
  Alignment alignment_{4096, 4096};
  std::uint64_t capacity_bytes_ = 0;
};

}  // namespace memascend
