#include "nvme/space/checksums.hpp"

#include <algorithm>
#include <new>
#include <set>
#include <utility>

#include "base/align.hpp"
#include "base/check.hpp"
#include "base/crc32c.hpp"

namespace memascend {
namespace {

constexpr std::uint64_t kPageBytes = 4096;
constexpr std::uint64_t kPageGrains = kPageBytes / sizeof(std::uint32_t);
constexpr std::uint32_t kNone = 0;

// kNone means "no checksum"; a checksum of that value is replaced by another.
std::uint32_t checksum(std::span<const std::byte> grain) {
  const std::uint32_t crc = crc32c(grain);
  return crc == kNone ? 1 : crc;
}

std::shared_ptr<std::byte> own_memory(std::uint64_t nbytes) {
  return {new (std::align_val_t{kPageBytes}) std::byte[nbytes],
          [](std::byte* data) { ::operator delete[](data, std::align_val_t{kPageBytes}); }};
}

/// Calls `action(first grain, count)` for the grains of an extent, page by page.
template <typename Action>
void for_each_page(const Extent& extent, Action action) {
  MA_INVARIANT(is_aligned(extent.offset | extent.nbytes, Checksums::kGrainBytes));
  std::uint64_t grain = extent.offset / Checksums::kGrainBytes;
  const std::uint64_t end = grain + extent.nbytes / Checksums::kGrainBytes;
  while (grain < end) {
    const std::uint64_t part = std::min(end - grain, kPageGrains - grain % kPageGrains);
    action(grain, part);
    grain += part;
  }
}

}  // namespace

Verify parse_verify(const std::string& name) {
  if (name == "off") return Verify::kOff;
  if (name == "reads") return Verify::kReads;
  MA_EXPECT(name == "full", "verify must be off, reads or full, got '", name, "'");
  return Verify::kFull;
}

Checksums::Checksums(std::size_t volume_count, MemorySource source)
    : source_(source ? std::move(source) : own_memory), volumes_(volume_count) {}

void Checksums::provide(std::uint64_t nbytes) {
  std::unique_lock lock(mutex_);
  if (nbytes > held_bytes_) add_slab(align_up(nbytes - held_bytes_, kSlabBytes), &lock);
}

std::uint64_t Checksums::held_bytes() const {
  const std::lock_guard lock(mutex_);
  return held_bytes_;
}

// Allocation may take long, so the lock is released meanwhile.
void Checksums::add_slab(std::uint64_t nbytes, std::unique_lock<std::mutex>* lock) {
  lock->unlock();
  std::shared_ptr<std::byte> slab = source_(nbytes);
  lock->lock();
  slabs_.push_back(std::move(slab));
  held_bytes_ += nbytes;
  for (std::uint64_t offset = 0; offset < nbytes; offset += kPageBytes) {
    spare_pages_.push_back(reinterpret_cast<std::uint32_t*>(slabs_.back().get() + offset));
  }
}

void Checksums::take(std::span<const Extent> extents) {
  std::unique_lock lock(mutex_);
  // Allocate first, so that a failure leaves nothing half taken.
  for (;;) {
    const std::size_t count = missing_page_count(extents);
    if (count <= spare_pages_.size()) break;
    add_slab(align_up((count - spare_pages_.size()) * kPageBytes, kSlabBytes), &lock);
  }
  for (const Extent& extent : extents) {
    for_each_page(extent, [&](std::uint64_t grain, std::uint64_t count) {
      Page& page = page_of(extent.volume_index, grain);
      if (page.words == nullptr) {
        page.words = spare_pages_.back();
        spare_pages_.pop_back();
        std::fill_n(page.words, kPageGrains, kNone);
      }
      page.taken_count += count;
      MA_INVARIANT(page.taken_count <= kPageGrains);
    });
  }
}

std::size_t Checksums::missing_page_count(std::span<const Extent> extents) {
  std::set<std::pair<int, std::uint64_t>> missing;  // stripes share pages
  for (const Extent& extent : extents) {
    for_each_page(extent, [&](std::uint64_t grain, std::uint64_t) {
      if (page_of(extent.volume_index, grain).words != nullptr) return;
      missing.emplace(extent.volume_index, grain / kPageGrains);
    });
  }
  return missing.size();
}

void Checksums::give(std::span<const Extent> extents) {
  const std::lock_guard lock(mutex_);
  for (const Extent& extent : extents) {
    for_each_page(extent, [&](std::uint64_t grain, std::uint64_t count) {
      Page& page = page_of(extent.volume_index, grain);
      MA_INVARIANT(page.taken_count >= count);
      page.taken_count -= count;
      std::fill_n(page.words + grain % kPageGrains, count, kNone);
      if (page.taken_count > 0) return;
      spare_pages_.push_back(page.words);
      page.words = nullptr;
    });
  }
}

void Checksums::note(int volume_index, std::uint64_t offset, std::span<const std::byte> bytes) {
  MA_INVARIANT(is_aligned(offset | bytes.size(), kGrainBytes));
  for (std::uint64_t begin = 0; begin < bytes.size(); begin += kGrainBytes) {
    const std::uint32_t crc = checksum(bytes.subspan(begin, kGrainBytes));
    const std::lock_guard lock(mutex_);
    word_of(volume_index, (offset + begin) / kGrainBytes) = crc;
  }
}

void Checksums::forget(int volume_index, std::uint64_t offset, std::uint64_t nbytes) {
  MA_INVARIANT(is_aligned(offset | nbytes, kGrainBytes));
  const std::lock_guard lock(mutex_);
  for (std::uint64_t begin = 0; begin < nbytes; begin += kGrainBytes) {
    word_of(volume_index, (offset + begin) / kGrainBytes) = kNone;
  }
}

std::optional<Mismatch> Checksums::check(int volume_index, std::uint64_t offset,
                                         std::span<const std::byte> bytes,
                                         std::uint64_t* checked_bytes) const {
  MA_INVARIANT(is_aligned(offset | bytes.size(), kGrainBytes));
  for (std::uint64_t begin = 0; begin < bytes.size(); begin += kGrainBytes) {
    std::uint32_t expected = kNone;
    {
      const std::lock_guard lock(mutex_);
      expected = word_of(volume_index, (offset + begin) / kGrainBytes);
    }
    if (expected == kNone) continue;
    *checked_bytes += kGrainBytes;
    const std::uint32_t found = checksum(bytes.subspan(begin, kGrainBytes));
    if (found != expected) return Mismatch{offset + begin, expected, found};
  }
  return std::nullopt;
}

Checksums::Page& Checksums::page_of(int volume_index, std::uint64_t grain) {
  std::vector<Page>& pages = volumes_[static_cast<std::size_t>(volume_index)];
  const std::uint64_t index = grain / kPageGrains;
  if (index >= pages.size()) pages.resize(index + 1);
  return pages[index];
}

std::uint32_t& Checksums::word_of(int volume_index, std::uint64_t grain) const {
  const std::vector<Page>& pages = volumes_[static_cast<std::size_t>(volume_index)];
  MA_INVARIANT(grain / kPageGrains < pages.size());
  const Page& page = pages[grain / kPageGrains];
  MA_INVARIANT(page.words != nullptr);
  return page.words[grain % kPageGrains];
}

}  // namespace memascend
