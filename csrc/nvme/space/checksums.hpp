// Checksums: a CRC-32C of every grain of the volumes.
//
// While an extent holds a grain, its checksum takes four bytes here: 0.006 % of the keys' bytes.
// Checksums are in pages, each for 64 MiB of a volume, in memory that the caller provides. A grain
// that was never written, or whose write failed, has no checksum: it can be read, and is not
// compared.
//
// Knows extents and bytes; never knows keys, requests or files. Thread-safe. The caller makes sure
// that no grain is written and checked at the same time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "nvme/space/extents.hpp"

namespace memascend {

/// The transfers that are compared with checksums.
enum class Verify : std::uint8_t {
  kOff,
  kReads,  // all data read
  kFull,   // and every write, by reading it back
};

/// Parses "off", "reads" or "full"; throws std::invalid_argument for anything else.
Verify parse_verify(const std::string& name);

/// A grain that differs from its checksum.
struct Mismatch {
  std::uint64_t offset;  // on the volume
  std::uint32_t expected;
  std::uint32_t found;
};

class Checksums {
 public:
  /// Bytes of one checksum; with checksums, also the block of every transfer.
  static constexpr std::uint64_t kGrainBytes = std::uint64_t{64} << 10;
  /// Memory is allocated in multiples of this; each covers a GiB of a volume.
  static constexpr std::uint64_t kSlabBytes = std::uint64_t{64} << 10;
  /// Returns memory, or throws. Called without our lock, since it may take long.
  using MemorySource = std::function<std::shared_ptr<std::byte>(std::uint64_t nbytes)>;

  /// `source` may be empty: the memory is then the process's own.
  Checksums(std::size_t volume_count, MemorySource source);
  Checksums(const Checksums&) = delete;
  Checksums& operator=(const Checksums&) = delete;

  /// Allocates in advance, until `nbytes` are held in total.
  void provide(std::uint64_t nbytes);
  std::uint64_t held_bytes() const;

  /// Begins to keep checksums of extents; their grains have none yet. Pre: whole grains, not taken.
  /// Throws the source's exceptions; then only the memory held may have changed.
  void take(std::span<const Extent> extents);
  /// Removes the checksums of extents; their memory is reused.
  void give(std::span<const Extent> extents);

  /// Stores the checksums of bytes about to be written. Pre, here and below: whole grains, taken.
  void note(int volume_index, std::uint64_t offset, std::span<const std::byte> bytes);
  /// Removes the range's checksums: its content is unknown.
  void forget(int volume_index, std::uint64_t offset, std::uint64_t nbytes);
  /// Returns the first grain that differs from its checksum, or nothing. Adds the bytes of grains
  /// with a checksum to `*checked_bytes`.
  std::optional<Mismatch> check(int volume_index, std::uint64_t offset,
                                std::span<const std::byte> bytes,
                                std::uint64_t* checked_bytes) const;

 private:
  /// Checksums of kPageGrains grains of a volume; has memory while one of them is taken.
  struct Page {
    std::uint32_t* words = nullptr;
    std::uint64_t taken_count = 0;
  };

  void add_slab(std::uint64_t nbytes, std::unique_lock<std::mutex>* lock);
  std::size_t missing_page_count(std::span<const Extent> extents);
  Page& page_of(int volume_index, std::uint64_t grain);
  std::uint32_t& word_of(int volume_index, std::uint64_t grain) const;

  MemorySource source_;
  mutable std::mutex mutex_;  // guards the following members
  std::vector<std::vector<Page>> volumes_;
  std::vector<std::uint32_t*> spare_pages_;
  std::vector<std::shared_ptr<std::byte>> slabs_;
  std::uint64_t held_bytes_ = 0;
};

}  // namespace memascend
