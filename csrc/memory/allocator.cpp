#include "memory/allocator.hpp"

#include <algorithm>
#include <cstring>
#include <set>

#include "base/align.hpp"
#include "base/check.hpp"

namespace memascend {
namespace {

constexpr std::size_t kComponentsNamedMax = 3;  // in an error message

std::string mib(std::uint64_t nbytes) {
  const std::uint64_t tenths = nbytes * 10 / (1024 * 1024);
  return join(tenths / 10, ".", tenths % 10, " MiB");
}

std::string largest_components(const std::map<std::string, ComponentStats>& components) {
  std::vector<std::pair<std::uint64_t, std::string>> by_size;
  for (const auto& [name, component] : components) {
    if (component.live_bytes > 0) by_size.emplace_back(component.live_bytes, name);
  }
  std::sort(by_size.rbegin(), by_size.rend());
  if (by_size.size() > kComponentsNamedMax) by_size.resize(kComponentsNamedMax);
  std::string text;
  for (const auto& [live_bytes, name] : by_size) {
    text += join(text.empty() ? "" : ", ", name, " ", mib(live_bytes));
  }
  return text.empty() ? "none" : text;
}

}  // namespace

/// Holds the mutex. At its begin and end it frees blocks whose threads could not wait for the
/// mutex.
class Allocator::Lock {
 public:
  explicit Lock(Allocator& allocator) : allocator_(allocator) {
    allocator.expect_owner();
    lock_ = std::unique_lock(allocator.mutex_);
    allocator_.holder_ = std::this_thread::get_id();
    allocator_.free_late();
  }
  ~Lock() {
    allocator_.free_late();
    allocator_.holder_ = std::thread::id();
  }

 private:
  Allocator& allocator_;
  std::unique_lock<std::mutex> lock_;
};

Block::~Block() {
  if (allocator_ != nullptr) allocator_->free(*this);  // null: allocate() threw
}

std::shared_ptr<Allocator> Allocator::create(const AllocatorOptions& options) {
  return std::shared_ptr<Allocator>(new Allocator(options));
}

Allocator::Allocator(const AllocatorOptions& options)
    : limit_bytes_(align_down(options.limit_bytes, kPageBytes)),
      arena_(options.arena),
      free_(arena_.range_bytes()) {
  MA_EXPECT(options.limit_bytes == 0 || limit_bytes_ > 0, "limit_bytes must be 0 (no limit) or ",
            "at least a page of ", kPageBytes, " bytes, got ", options.limit_bytes);
}

std::unique_ptr<Block> Allocator::allocate(std::uint64_t nbytes, const std::string& component,
                                           bool zero) {
  MA_EXPECT(nbytes > 0, "nbytes must be positive, got 0");
  MA_EXPECT(!component.empty(), "a block needs a component name");
  MA_EXPECT(nbytes <= arena_.range_bytes(), "nbytes=", nbytes, " exceeds the ",
            arena_.range_bytes(), " addresses of the arena");
  std::unique_ptr<Block> block(new Block);
  block->component_ = component;
  block->nbytes_ = nbytes;
  block->capacity_bytes_ = align_up(nbytes, kPageBytes);
  const std::uint64_t capacity_bytes = block->capacity_bytes_;
  bool fresh = false;
  {
    const Lock lock(*this);
    const auto hole = free_.best_backed(capacity_bytes);
    Place place{0, false};
    if (hole) {
      place.offset = hole->offset;
    } else if (arena_.registers()) {
      place = grow_registered(capacity_bytes, component);
    } else {
      place = grow(capacity_bytes, component);
    }
    const std::uint64_t offset = place.offset;
    fresh = place.fresh;
    auto& account = components_[component];
    used_.emplace(offset, Used{nbytes, capacity_bytes, &account});
    free_.take(offset, capacity_bytes);
    account.live_bytes += nbytes;
    account.peak_bytes = std::max(account.peak_bytes, account.live_bytes);
    ++account.block_count;
    stats_.requested_bytes += nbytes;
    stats_.used_bytes += capacity_bytes;
    stats_.peak_used_bytes = std::max(stats_.peak_used_bytes, stats_.used_bytes);
    ++stats_.block_count;
    block->address_ = arena_.base() + offset;
    block->allocator_ = shared_from_this();
    MA_INVARIANT_SLOW(is_valid_locked());
  }
  // Outside the lock: the bytes already belong to this thread alone.
  if (zero && !fresh) std::memset(block->address_, 0, capacity_bytes);
  return block;
}

void Allocator::trim() {
  const Lock lock(*this);
  decommit_free(0, arena_.range_bytes());
  MA_INVARIANT_SLOW(is_valid_locked());
}

ArenaReport Allocator::report() {
  const Lock lock(*this);
  return arena_.report();
}

std::vector<std::string> Allocator::notes() const {
  expect_owner();
  const std::lock_guard lock(mutex_);
  return arena_.notes();
}

AllocatorStats Allocator::stats() {
  const Lock lock(*this);
  AllocatorStats stats = stats_;
  stats.reserved_bytes = arena_.reserved_bytes();
  stats.registered_bytes = arena_.registered_bytes();
  return stats;
}

std::map<std::string, ComponentStats> Allocator::components() {
  const Lock lock(*this);
  return components_;
}

bool Allocator::contains(std::uintptr_t address) {
  const auto base = reinterpret_cast<std::uintptr_t>(arena_.base());
  if (address < base) return false;
  const Lock lock(*this);
  auto next = used_.upper_bound(address - base);
  if (next == used_.begin()) return false;
  --next;
  return address - base < next->first + next->second.capacity_bytes;
}

bool Allocator::is_valid() {
  const Lock lock(*this);
  return is_valid_locked();
}

/// A child's copy has no memory behind it, and another thread may have held its locks at the fork.
void Allocator::expect_owner() const {
  MA_EXPECT(owner_.is_current(), "host memory belongs to the process that took it (",
            owner_.number(), "); make an allocator in this child, or copy what it needs before");
}

void Allocator::free(const Block& block) noexcept {
  if (!owner_.is_current()) return;
  {
    const std::lock_guard lock(late_mutex_);
    late_.push_back(static_cast<std::uint64_t>(block.address_ - arena_.base()));
  }
  if (holder_.load() == std::this_thread::get_id()) return;  // called from within a registrar
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (lock) free_late();
}

void Allocator::free_late() noexcept {
  std::vector<std::uint64_t> late;
  {
    const std::lock_guard lock(late_mutex_);
    late.swap(late_);
  }
  for (const std::uint64_t offset : late) free_locked(offset);
}

void Allocator::free_locked(std::uint64_t freed) noexcept {
  const auto found = used_.find(freed);
  MA_INVARIANT(found != used_.end());
  const auto [offset, used] = *found;
  used_.erase(found);
  free_.give(offset, used.capacity_bytes);
  used.component->live_bytes -= used.nbytes;
  --used.component->block_count;
  stats_.requested_bytes -= used.nbytes;
  stats_.used_bytes -= used.capacity_bytes;
  --stats_.block_count;
  MA_INVARIANT_SLOW(is_valid_locked());
}

/// Commits memory behind the best free run of addresses.
Allocator::Place Allocator::grow(std::uint64_t capacity_bytes, const std::string& component) {
  const auto run = free_.best_any(capacity_bytes);
  if (!run) {
    throw HostMemoryError(join("no run of ", capacity_bytes, " free addresses is left in the ",
                               arena_.range_bytes(), " of the arena. fix: ulimit -v unlimited"),
                          capacity_bytes, arena_.reserved_bytes(), limit_bytes_);
  }
  const std::uint64_t block_end = run->offset + capacity_bytes;
  const std::uint64_t run_end = run->offset + run->nbytes;
  // Only the run at the end of the range gets a tail; a hole in the middle gets exactly the block.
  std::uint64_t end = block_end;
  if (run_end == arena_.range_bytes()) end = std::min(align_up(end, kHugePageBytes), run_end);
  decommit_free(0, run->offset);
  decommit_free(end, arena_.range_bytes());
  end = within_limit(run->offset, block_end, end, component);
  const bool fresh = free_.pieces(run->offset, block_end, true).empty();
  commit(run->offset, end);
  drop_surplus(end, run_end);
  return {run->offset, fresh};
}

/// Adds a piece. If the limit, the system or the addresses refuse it, gives back free pieces, then
/// also the free parts of other pieces.
Allocator::Place Allocator::grow_registered(std::uint64_t capacity_bytes,
                                            const std::string& component) {
  for (const auto pieces : {Arena::Pieces::kWhole, Arena::Pieces::kCut}) {
    try {
      return add_piece(capacity_bytes, component);
    } catch (const HostMemoryError&) {
      decommit_free(0, arena_.range_bytes(), pieces);
    }
  }
  return add_piece(capacity_bytes, component);
}

/// Adds a piece in a run of uncommitted addresses: a block must not straddle two registrations.
Allocator::Place Allocator::add_piece(std::uint64_t capacity_bytes, const std::string& component) {
  const auto run = free_.best_untouched(capacity_bytes);
  if (!run) {
    throw HostMemoryError(
        join("no run of ", capacity_bytes, " free addresses is left in the arena"), capacity_bytes,
        arena_.reserved_bytes(), limit_bytes_);
  }
  const std::uint64_t run_end = run->offset + run->nbytes;
  std::uint64_t begin = align_up(run->offset, kHugePageBytes);
  if (begin + capacity_bytes > run_end) begin = run->offset;
  const std::uint64_t end_min = begin + capacity_bytes;
  // A tail serves small blocks. Under a limit there is none: the memory was promised to others, and
  // a tail can only be given back together with the block.
  const std::uint64_t rounded = std::min(align_up(end_min, kHugePageBytes), run_end);
  const std::uint64_t end =
      within_limit(begin, end_min, limit_bytes_ == 0 ? rounded : end_min, component);
  arena_.commit(begin, end - begin);
  free_.add_boundary(begin);
  free_.add_boundary(end);
  free_.mark(begin, end - begin, true);
  stats_.peak_reserved_bytes = std::max(stats_.peak_reserved_bytes, arena_.reserved_bytes());
  drop_surplus(end, run_end);
  return {begin, true};
}

/// Returns `end` if memory up to there fits the limit, else `end_min` if that fits; else throws.
std::uint64_t Allocator::within_limit(std::uint64_t begin, std::uint64_t end_min, std::uint64_t end,
                                      const std::string& component) const {
  if (limit_bytes_ == 0) return end;
  for (const std::uint64_t candidate : {end, end_min}) {
    std::uint64_t needed_bytes = 0;
    for (const FreeRun& hole : free_.pieces(begin, candidate, false)) needed_bytes += hole.nbytes;
    if (arena_.reserved_bytes() + needed_bytes <= limit_bytes_) return candidate;
    if (candidate == end_min) throw_limit(needed_bytes, component);
  }
  return end_min;
}

void Allocator::commit(std::uint64_t begin, std::uint64_t end) {
  for (const FreeRun& hole : free_.pieces(begin, end, false)) {
    arena_.commit(hole.offset, hole.nbytes);
    free_.mark(hole.offset, hole.nbytes, true);
  }
  stats_.peak_reserved_bytes = std::max(stats_.peak_reserved_bytes, arena_.reserved_bytes());
}

/// The kernel may have backed a whole huge page though only the part before `end` was requested. If
/// the rest is a hole, gives it back, so that the process holds the bytes that stats() reports.
void Allocator::drop_surplus(std::uint64_t end, std::uint64_t run_end) {
  const std::uint64_t surplus_end = std::min(align_up(end, kHugePageBytes), run_end);
  for (const FreeRun& hole : free_.pieces(end, surplus_end, false)) {
    arena_.drop_surplus(hole.offset, hole.nbytes);
  }
}

void Allocator::decommit_free(std::uint64_t begin, std::uint64_t end, Arena::Pieces pieces) {
  for (const FreeRun& hole : free_.pieces(begin, end, true)) {
    if (!arena_.decommit(hole.offset, hole.nbytes, pieces)) continue;
    free_.mark(hole.offset, hole.nbytes, false);
    for (const std::uint64_t offset : {hole.offset, hole.offset + hole.nbytes}) {
      // The boundary of a neighbouring piece, or of the rest of this one.
      if (arena_.is_boundary(offset)) {
        free_.add_boundary(offset);
      } else {
        free_.remove_boundary(offset);
      }
    }
  }
}

void Allocator::throw_limit(std::uint64_t needed_bytes, const std::string& component) const {
  throw HostMemoryError(
      join("host memory limit reached: '", component, "' needs ", mib(needed_bytes), " more (",
           needed_bytes, " bytes), ", mib(arena_.reserved_bytes()), " are held (",
           arena_.reserved_bytes(), " bytes), the limit is ", mib(limit_bytes_), " (", limit_bytes_,
           " bytes); largest components: ", largest_components(components_),
           ". fix: raise the limit, or shrink the largest component"),
      needed_bytes, arena_.reserved_bytes(), limit_bytes_);
}

bool Allocator::is_valid_locked() const {
  if (!free_.is_valid()) return false;
  std::uint64_t requested_bytes = 0;
  std::uint64_t used_bytes = 0;
  std::map<const ComponentStats*, ComponentStats> seen;
  std::uint64_t end = 0;
  for (const auto& [offset, used] : used_) {
    if (offset < end) return false;
    end = offset + used.capacity_bytes;
    if (used.nbytes > used.capacity_bytes) return false;
    if (!is_aligned(offset, kPageBytes) || !is_aligned(used.capacity_bytes, kPageBytes)) {
      return false;
    }
    if (!free_.is_taken(offset, used.capacity_bytes)) return false;
    requested_bytes += used.nbytes;
    used_bytes += used.capacity_bytes;
    seen[used.component].live_bytes += used.nbytes;
    ++seen[used.component].block_count;
  }
  for (const auto& [name, component] : components_) {
    if (component.live_bytes != seen[&component].live_bytes) return false;
    if (component.block_count != seen[&component].block_count) return false;
    if (component.peak_bytes < component.live_bytes) return false;
  }
  if (stats_.requested_bytes != requested_bytes) return false;
  if (stats_.used_bytes != used_bytes) return false;
  if (stats_.block_count != used_.size()) return false;
  if (used_bytes + free_.free_bytes() != arena_.range_bytes()) return false;
  // Every committed byte is either used or free and backed.
  if (arena_.reserved_bytes() != used_bytes + free_.backed_bytes()) return false;
  return are_pieces_valid();
}

/// Pieces do not overlap and hold all memory, their ends are the boundaries, no block straddles
/// two.
bool Allocator::are_pieces_valid() const {
  if (!arena_.registers()) return free_.boundaries().empty();
  std::set<std::uint64_t> boundaries;
  std::uint64_t pieces_bytes = 0;
  std::uint64_t end = 0;
  auto used = used_.begin();
  for (const auto& [offset, piece] : arena_.pieces()) {
    if (offset < end) return false;
    end = offset + piece.nbytes;
    boundaries.insert({offset, end});
    pieces_bytes += piece.nbytes;
    for (; used != used_.end() && used->first < end; ++used) {
      if (used->first < offset) return false;
      if (used->first + used->second.capacity_bytes > end) return false;
    }
  }
  if (used != used_.end()) return false;
  if (pieces_bytes != arena_.reserved_bytes()) return false;
  return boundaries == free_.boundaries();
}

}  // namespace memascend
