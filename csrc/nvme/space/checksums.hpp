// Checksums: what the bytes of the volumes should be. A CRC-32C for every grain of them.
//
// A grain has four bytes here for as long as an extent holds it: 0.006 % of what the keys take.
// They come in pages, each for 64 MiB of a volume, out of memory that the caller provides. A grain
// that was never written, or whose write failed, has no checksum: it may be read, and is not
// compared.
//
// Knows extents and bytes; never knows keys, requests or files. Thread-safe. That no grain is
// written and checked at once is the caller's care.
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
  kReads,  // what is read
  kFull,   // and every write, by reading it back
};

/// Parses "off", "reads" or "full"; throws std::invalid_argument for anything else.
Verify parse_verify(const std::string& name);

/// A grain that is not what was written.
struct Mismatch {
  std::uint64_t offset;  // on the volume
  std::uint32_t expected;
  std::uint32_t found;
};

class Checksums {
 public:
  /// The bytes that one checksum stands for; with checksums it is the block of every transfer.
  static constexpr std::uint64_t kGrainBytes = std::uint64_t{64} << 10;
  /// Memory is asked for in multiples of this, each for a GiB of a volume.
  static constexpr std::uint64_t kSlabBytes = std::uint64_t{64} << 10;
  /// Gives memory, or throws. Called with nothing locked here, since it may take long.
  using MemorySource = std::function<std::shared_ptr<std::byte>(std::uint64_t nbytes)>;

  /// `source` may be empty: then the memory is the process's own.
  Checksums(std::size_t volume_count, MemorySource source);
  Checksums(const Checksums&) = delete;
  Checksums& operator=(const Checksums&) = delete;

  /// Takes memory ahead, until `nbytes` are held in all.
  void provide(std::uint64_t nbytes);
  std::uint64_t held_bytes() const;

  /// Begins to keep checksums of extents, none of which has one yet. Pre: they are whole grains and
  /// not taken. Throws what the source throws: nothing was changed but the memory held.
  void take(std::span<const Extent> extents);
  /// Forgets them; their memory serves others.
  void give(std::span<const Extent> extents);

  /// Notes what is about to be written. Pre, here and below: whole grains, taken.
  void note(int volume_index, std::uint64_t offset, std::span<const std::byte> bytes);
  /// Forgets the range: its content is unknown.
  void forget(int volume_index, std::uint64_t offset, std::uint64_t nbytes);
  /// The first grain that is not what was noted, or nothing. Adds the bytes of grains that have a
  /// checksum to `*checked_bytes`.
  std::optional<Mismatch> check(int volume_index, std::uint64_t offset,
                                std::span<const std::byte> bytes,
                                std::uint64_t* checked_bytes) const;

 private:
  /// For kPageGrains grains of a volume; has memory while one of them is taken.
  struct Page {
    std::uint32_t* words = nullptr;
    std::uint64_t taken_count = 0;
  };

  void add_slab(std::uint64_t nbytes, std::unique_lock<std::mutex>* lock);
  std::size_t missing_page_count(std::span<const Extent> extents);
  Page& page_of(int volume_index, std::uint64_t grain);
  std::uint32_t& word_of(int volume_index, std::uint64_t grain) const;

  MemorySource source_;
  mutable std::mutex mutex_;  // what follows
  std::vector<std::vector<Page>> volumes_;
  std::vector<std::uint32_t*> spare_pages_;
  std::vector<std::shared_ptr<std::byte>> slabs_;
  std::uint64_t held_bytes_ = 0;
};

}  // namespace memascend
