// What workers do with blocks, and keys that all use at once.
#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/check.hpp"
#include "worker.hpp"

namespace memascend::soak {
namespace {

constexpr std::uint64_t kKib = 1024;
constexpr std::uint64_t kRacingBytesMax = 150 * kKib;
constexpr std::size_t kHeldMax = 8;

bool is_filled(const Block& block, std::byte value) {
  const std::span<const std::byte> bytes(block.address(), block.nbytes());
  return std::ranges::all_of(bytes, [value](std::byte byte) { return byte == value; });
}

}  // namespace

std::byte racing_byte(std::size_t key, std::uint64_t at) {
  return static_cast<std::byte>(at * 31 + (at >> 9) + key * 101);
}

std::string racing_name(std::size_t key) { return join("racing ", key); }

// Nothing orders these calls but the store. Whatever is read was written there, for that place.
void Worker::race() {
  const std::size_t key = below(random_, kRacingKeyCount);
  try {
    if (one_in(random_, 12)) {
      store_.discard(racing_name(key));
    } else if (one_in(random_, 2)) {
      race_to_write(key);
    } else {
      race_to_read(key);
    }
  } catch (const StoreFullError&) {
    ++scene_.tally.full_volumes;
  } catch (const StoreError& error) {
    if (error.place().code == ENOENT) return;  // discarded by another
    SOAK_EXPECT(scene_.plan.fails(), "a transfer failed without a fault: ", error.what());
    ++scene_.tally.failed_transfers;
  } catch (const std::invalid_argument& error) {
    if (std::strstr(error.what(), "are not all in") == nullptr) throw;  // made smaller by another
  }
}

void Worker::race_to_write(std::size_t key) {
  const bool whole = one_in(random_, 2);
  const std::uint64_t offset = whole ? 0 : below(random_, kRacingBytesMax);
  Buffer buffer = any_buffer(below(random_, kRacingBytesMax));
  for (std::size_t at = 0; at < buffer.bytes().size(); ++at) {
    buffer.bytes()[at] = racing_byte(key, offset + at);
  }
  const auto place = whole ? std::nullopt : std::optional<std::uint64_t>(offset);
  const auto ticket = store_.write(racing_name(key), buffer.bytes().size(), buffer.memory(), place);
  ++scene_.tally.writes;
  if (one_in(random_, 3)) store_.wait(*ticket);
}

void Worker::race_to_read(std::size_t key) {
  const std::uint64_t offset = below(random_, kRacingBytesMax / 2);
  Buffer buffer = any_buffer(below(random_, kRacingBytesMax / 2));
  const auto ticket = store_.read(racing_name(key), buffer.bytes().size(), buffer.memory(), offset);
  ++scene_.tally.reads;
  store_.wait(*ticket);
  buffer.check_canaries();
  for (std::size_t at = 0; at < buffer.bytes().size(); ++at) {
    if (buffer.bytes()[at] == racing_byte(key, offset + at)) continue;
    fail(join("LOSS: byte ", offset + at, " of \"", racing_name(key), "\" is another's"));
  }
  scene_.tally.checked_bytes += buffer.bytes().size();
}

void Worker::allocate() {
  if (held_.size() >= kHeldMax) return free_one();
  const std::uint64_t nbytes = 1 + below(random_, one_in(random_, 8) ? 3 << 20 : 64 * kKib);
  const bool zero = one_in(random_, 3);
  try {
    auto block = scene_.allocator->allocate(nbytes, component_, zero);
    if (zero) SOAK_EXPECT(is_filled(*block, std::byte{0}), "a block is not zero");
    const auto value = static_cast<std::byte>(random_());
    std::memset(block->address(), std::to_integer<int>(value), nbytes);
    held_.push_back({std::move(block), value});
    held_bytes_ += nbytes;
    ++scene_.tally.blocks;
  } catch (const HostMemoryError& error) {
    SOAK_EXPECT(error.limit_bytes > 0, "the system refused memory: ", error.what());
    ++scene_.tally.memory_limits;
  }
}

void Worker::free_one() {
  if (held_.empty()) return;
  std::swap(held_[below(random_, held_.size())], held_.back());
  const Held& held = held_.back();
  SOAK_EXPECT(is_filled(*held.block, held.value), "a block of ", held.block->nbytes(),
              " bytes was written to by another");
  held_bytes_ -= held.block->nbytes();
  held_.pop_back();
}

void Worker::check_accounts() {
  const auto components = scene_.allocator->components();
  const auto own = components.find(component_);
  const std::uint64_t live_bytes = own == components.end() ? 0 : own->second.live_bytes;
  SOAK_EXPECT(live_bytes == held_bytes_, live_bytes, " bytes are accounted, not ", held_bytes_);
  const AllocatorStats stats = scene_.allocator->stats();
  SOAK_EXPECT(stats.reserved_bytes <= scene_.plan.allocator.limit_bytes, stats.reserved_bytes,
              " bytes are held, beyond the limit");
  if (one_in(random_, 4)) scene_.allocator->trim();
  if (one_in(random_, 4)) SOAK_EXPECT(scene_.allocator->is_valid(), "the allocator is not valid");
}

}  // namespace memascend::soak
