#include "buffer.hpp"

#include <algorithm>
#include <cstring>

#include "base/align.hpp"
#include "base/check.hpp"

namespace memascend::soak {
namespace {

constexpr std::byte kCanary{0xa5};
constexpr std::uint64_t kCanaryBytes = 512;
constexpr std::uint64_t kShiftBytesMax = 600;

// A block's owner until the last I/O on it is over.
struct Guard {
  Guard(LentBlocks& owner, std::unique_ptr<Block> taken) : lent(owner), block(std::move(taken)) {
    lent.claim(block->address(), block->capacity_bytes());
  }
  ~Guard() { lent.drop(block->address()); }  // and only then the block
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

  LentBlocks& lent;
  std::unique_ptr<Block> block;
};

}  // namespace

void LentBlocks::claim(const std::byte* address, std::uint64_t nbytes) {
  const std::lock_guard lock(mutex_);
  const auto next = live_.upper_bound(address);
  SOAK_EXPECT(next == live_.end() || address + nbytes <= next->first,
              "a block reaches into another");
  if (next != live_.begin()) {
    const auto& [before, before_bytes] = *std::prev(next);
    SOAK_EXPECT(before + before_bytes <= address, "a block in use was allocated again");
  }
  live_[address] = nbytes;
}

void LentBlocks::drop(const std::byte* address) {
  const std::lock_guard lock(mutex_);
  SOAK_EXPECT(live_.erase(address) == 1, "a block was given back twice");
}

std::size_t LentBlocks::count() {
  const std::lock_guard lock(mutex_);
  return live_.size();
}

void fill(std::span<std::byte> memory, Random& random) {
  std::uint64_t word = random();
  for (std::size_t at = 0; at < memory.size(); at += sizeof(word), ++word) {
    std::memcpy(memory.data() + at, &word, std::min(sizeof(word), memory.size() - at));
  }
}

Buffer Buffer::take(Allocator& allocator, LentBlocks& lent, std::uint64_t nbytes, Random& random,
                    Tally& tally) {
  Buffer buffer;
  buffer.nbytes_ = nbytes;
  std::unique_ptr<Block> block;
  try {
    if (!one_in(random, 4)) block = allocator.allocate(nbytes + kShiftBytesMax, "lent", false);
  } catch (const HostMemoryError&) {
    ++tally.memory_limits;
  }
  if (block == nullptr) {
    buffer.lay_on_heap(random);
    return buffer;
  }
  ++tally.lent_blocks;
  buffer.lay_in_block(*block, random);
  buffer.hold_ = std::make_shared<Guard>(lent, std::move(block));
  return buffer;
}

Buffer Buffer::borrow(std::byte* data, std::uint64_t nbytes) {
  Buffer buffer;
  buffer.data_ = data;
  buffer.nbytes_ = buffer.capacity_bytes_ = nbytes;
  return buffer;
}

void Buffer::lay_in_block(const Block& block, Random& random) {
  const std::uint64_t shift = one_in(random, 2) ? 0 : 1 + below(random, kShiftBytesMax - 1);
  std::byte* start = block.address();
  data_ = start + shift;
  const std::uint64_t rest = block.capacity_bytes() - shift;
  const std::uint64_t choices[] = {nbytes_, align_up(nbytes_, kPageBytes), rest};
  capacity_bytes_ = std::min(choices[below(random, 3)], rest);
  const std::uint64_t begin = shift - std::min(shift, kCanaryBytes);
  before_ = {start + begin, shift - begin};
  after_ = {data_ + capacity_bytes_, std::min(rest - capacity_bytes_, kCanaryBytes)};
  std::fill(before_.begin(), before_.end(), kCanary);
  std::fill(after_.begin(), after_.end(), kCanary);
}

// Around these bytes the address sanitizer watches.
void Buffer::lay_on_heap(Random& random) {
  const std::uint64_t shift = below(random, 64);
  auto bytes = std::make_shared<std::vector<std::byte>>(nbytes_ + shift);
  data_ = bytes->data() + shift;
  capacity_bytes_ = nbytes_;
  hold_ = std::move(bytes);
}

void Buffer::check_canaries() const {
  for (const std::span<std::byte> canaries : {before_, after_}) {
    SOAK_EXPECT(std::ranges::all_of(canaries, [](std::byte byte) { return byte == kCanary; }),
                "a transfer of ", nbytes_, " bytes wrote outside its ", capacity_bytes_);
  }
}

}  // namespace memascend::soak
