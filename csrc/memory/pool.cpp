#include "memory/pool.hpp"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/align.hpp"
#include "base/check.hpp"

namespace memascend {

/// Shared by a lease and the I/O on its slot; the last one to go gives the slot back.
struct Pool::SlotHold {
  SlotHold(std::shared_ptr<Pool> pool, SizeClass& size_class, std::uint32_t index)
      : owner(std::move(pool)), home(size_class), slot(index) {}
  ~SlotHold() { owner->give_back(home, slot); }
  SlotHold(const SlotHold&) = delete;
  SlotHold& operator=(const SlotHold&) = delete;

  std::shared_ptr<Pool> owner;
  SizeClass& home;
  std::uint32_t slot;
};

Lease::~Lease() = default;

std::byte* Lease::address() const {
  MA_EXPECT(!released(), "the lease on a slot of class '", class_name_,
            "' was released: its bytes may belong to another lease now");
  return address_;
}

std::shared_ptr<void> Lease::hold() const {
  MA_EXPECT(!released(), "cannot hold a released lease of class '", class_name_,
            "'. likely cause: I/O started after release(); take the hold before");
  return hold_;
}

std::shared_ptr<Pool> Pool::create(std::shared_ptr<Allocator> allocator, std::string component) {
  return std::shared_ptr<Pool>(new Pool(std::move(allocator), std::move(component)));
}

Pool::Pool(std::shared_ptr<Allocator> allocator, std::string component)
    : allocator_(std::move(allocator)), component_(std::move(component)) {
  MA_EXPECT(allocator_ != nullptr, "a pool needs an allocator");
  MA_EXPECT(!component_.empty(), "a pool needs a component name");
}

void Pool::add_class(const std::string& name, std::uint64_t slot_bytes, std::uint64_t slot_count) {
  MA_EXPECT(!name.empty(), "a size class needs a name");
  MA_EXPECT(slot_bytes > 0, "slot_bytes of class '", name, "' must be positive, got 0");
  MA_EXPECT(slot_bytes <= std::numeric_limits<std::uint64_t>::max() - kPageBytes,
            "slot_bytes of class '", name, "' is too large: ", slot_bytes);
  const std::uint64_t rounded_bytes = align_up(slot_bytes, kPageBytes);
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [other_bytes, other] : classes_) {
      MA_EXPECT(other.stats.name != name, "size class '", name, "' exists already");
      MA_EXPECT(other_bytes != rounded_bytes, "size class '", other.stats.name, "' already has ",
                "slots of ", rounded_bytes, " bytes; add slots to it instead of adding '", name,
                "'");
    }
    ClassStats& stats = classes_[rounded_bytes].stats;
    stats.name = name;
    stats.slot_bytes = rounded_bytes;
  }
  if (slot_count > 0) add_slots(name, slot_count);
}

void Pool::add_slots(const std::string& name, std::uint64_t count) {
  MA_EXPECT(count > 0, "count of slots to add to class '", name, "' must be positive, got 0");
  std::uint64_t slot_bytes = 0;
  {
    const std::lock_guard lock(mutex_);
    const SizeClass& size_class = find(name);
    slot_bytes = size_class.stats.slot_bytes;
    const std::uint64_t slots_max = std::numeric_limits<std::uint32_t>::max();
    MA_EXPECT(count <= slots_max - size_class.slots.size(), "class '", name, "' cannot have ",
              count, " more slots");
    MA_EXPECT(count <= std::numeric_limits<std::uint64_t>::max() / slot_bytes, "class '", name,
              "' cannot have ", count, " more slots of ", slot_bytes, " bytes");
  }
  // Without the lock: memory may take seconds to come, and leases must go back meanwhile.
  std::unique_ptr<Block> slab = allocator_->allocate(count * slot_bytes, component_, false);
  const std::lock_guard lock(mutex_);
  SizeClass& size_class = find(name);
  const std::size_t first = size_class.slots.size();
  size_class.slots.reserve(first + count);
  size_class.free_slots.reserve(first + count);  // so that give_back never allocates
  size_class.leased.resize(first + count, false);
  for (std::uint64_t index = 0; index < count; ++index) {
    size_class.slots.push_back(slab->address() + index * slot_bytes);
  }
  // Lowest address on top, so that a fresh slab is used from its start.
  for (std::uint64_t index = count; index-- > 0;) {
    size_class.free_slots.push_back(static_cast<std::uint32_t>(first + index));
  }
  size_class.stats.slot_count += count;
  size_class.slabs.push_back(std::move(slab));
  MA_INVARIANT_SLOW(is_valid_locked());
}

std::unique_ptr<Lease> Pool::acquire(std::uint64_t nbytes, bool allow_larger) {
  MA_EXPECT(nbytes > 0, "nbytes must be positive, got 0");
  std::unique_ptr<Lease> lease(new Lease);
  const std::lock_guard lock(mutex_);
  auto found = classes_.lower_bound(nbytes);
  while (allow_larger && found != classes_.end() && found->second.free_slots.empty()) ++found;
  if (found == classes_.end() || found->second.free_slots.empty()) return nullptr;
  auto& [slot_bytes, size_class] = *found;
  const std::uint32_t slot = size_class.free_slots.back();
  lease->class_name_ = size_class.stats.name;
  lease->pool_ = shared_from_this();
  // Made before the slot is taken: if this throws, nothing has changed. Dropping a half-made hold
  // would take the lock again, so nothing may throw from here on.
  lease->hold_ = std::make_shared<SlotHold>(lease->pool_, size_class, slot);
  size_class.free_slots.pop_back();
  size_class.leased[slot] = true;
  ClassStats& stats = size_class.stats;
  ++stats.leased_count;
  stats.leased_count_peak = std::max(stats.leased_count_peak, stats.leased_count);
  lease->address_ = size_class.slots[slot];
  lease->nbytes_ = nbytes;
  lease->slot_bytes_ = slot_bytes;
  MA_INVARIANT_SLOW(is_valid_locked());
  return lease;
}

Exhaustion Pool::exhaustion(std::uint64_t nbytes) const {
  const std::lock_guard lock(mutex_);
  const auto found = classes_.lower_bound(nbytes);
  Exhaustion exhaustion;
  exhaustion.requested_bytes = nbytes;
  if (found == classes_.end()) return exhaustion;
  const ClassStats& stats = found->second.stats;
  exhaustion.class_name = stats.name;
  exhaustion.slot_bytes = stats.slot_bytes;
  exhaustion.slot_count = stats.slot_count;
  exhaustion.leased_count = stats.leased_count;
  return exhaustion;
}

std::vector<ClassStats> Pool::classes() const {
  const std::lock_guard lock(mutex_);
  std::vector<ClassStats> all;
  for (const auto& [slot_bytes, size_class] : classes_) all.push_back(size_class.stats);
  return all;
}

bool Pool::is_valid() const {
  const std::lock_guard lock(mutex_);
  return is_valid_locked();
}

Pool::SizeClass& Pool::find(const std::string& name) {
  for (auto& [slot_bytes, size_class] : classes_) {
    if (size_class.stats.name == name) return size_class;
  }
  std::string known;
  for (const auto& [slot_bytes, size_class] : classes_) known += " " + size_class.stats.name;
  throw std::invalid_argument(join("no size class '", name, "'. Known:", known));
}

void Pool::give_back(SizeClass& size_class, std::uint32_t slot) noexcept {
  const std::lock_guard lock(mutex_);
  MA_INVARIANT(size_class.leased[slot]);
  size_class.leased[slot] = false;
  size_class.free_slots.push_back(slot);
  --size_class.stats.leased_count;
  MA_INVARIANT_SLOW(is_valid_locked());
}

bool Pool::is_valid_locked() const {
  for (const auto& [slot_bytes, size_class] : classes_) {
    const ClassStats& stats = size_class.stats;
    if (stats.slot_bytes != slot_bytes) return false;
    if (!is_aligned(slot_bytes, kPageBytes)) return false;
    if (size_class.slots.size() != stats.slot_count) return false;
    if (size_class.leased.size() != stats.slot_count) return false;
    if (size_class.free_slots.size() + stats.leased_count != stats.slot_count) return false;
    if (stats.leased_count_peak < stats.leased_count) return false;
    std::vector<bool> seen = size_class.leased;
    for (const std::uint32_t slot : size_class.free_slots) {
      if (seen[slot]) return false;  // leased, or free twice
      seen[slot] = true;
    }
    std::uint64_t slab_bytes = 0;
    for (const auto& slab : size_class.slabs) slab_bytes += slab->capacity_bytes();
    if (slab_bytes != stats.slot_count * slot_bytes) return false;
  }
  return true;
}

}  // namespace memascend
