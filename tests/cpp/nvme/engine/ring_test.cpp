// sources: csrc/nvme/engine/ring.cpp csrc/system/private_descriptor.cpp csrc/system/volume.cpp
// The ring by itself: no-ops, a timed wait, a full queue, a write and a read.
#include "nvme/engine/ring.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <set>

#include "base/check.hpp"
#include "system/volume.hpp"

namespace memascend {
namespace {

using std::chrono::milliseconds;

void submit_no_op(Ring* ring, std::uint64_t tag) {
  io_uring_sqe* entry = ring->next_submission();
  entry->opcode = IORING_OP_NOP;
  entry->user_data = tag;
}

void every_no_op_completes_once() {
  Ring ring(8);
  ring.start();
  std::set<std::uint64_t> seen;
  for (std::uint64_t turn = 0; turn < 100; ++turn) {
    for (std::uint64_t index = 0; index < 8; ++index) submit_no_op(&ring, turn * 8 + index);
    MA_INVARIANT(ring.enter(8, milliseconds(1000)) == 0);
    io_uring_cqe completion;
    while (ring.next_completion(&completion)) {
      MA_INVARIANT(completion.res == 0);
      MA_INVARIANT(seen.insert(completion.user_data).second);
    }
  }
  MA_INVARIANT(seen.size() == 800);
}

void a_wait_for_nothing_ends_in_time() {
  Ring ring(4);
  ring.start();
  const auto start = std::chrono::steady_clock::now();
  MA_INVARIANT(ring.enter(1, milliseconds(50)) == 0);
  const auto waited = std::chrono::steady_clock::now() - start;
  MA_INVARIANT(waited >= milliseconds(45));
  MA_INVARIANT(waited < milliseconds(5000));
  io_uring_cqe completion;
  MA_INVARIANT(!ring.next_completion(&completion));
}

std::int32_t move(Ring* ring, std::uint8_t opcode, const Volume& volume, void* data,
                  unsigned nbytes) {
  io_uring_sqe* entry = ring->next_submission();
  entry->opcode = opcode;
  entry->fd = volume.descriptor();
  entry->addr = reinterpret_cast<std::uint64_t>(data);
  entry->len = nbytes;
  MA_INVARIANT(ring->enter(1, milliseconds(10'000)) == 0);
  io_uring_cqe completion;
  MA_INVARIANT(ring->next_completion(&completion));
  return completion.res;
}

void what_is_written_is_read_back() {
  constexpr std::size_t kBytes = 65536;
  const Volume volume = Volume::open_anonymous(".");
  Ring ring(4);
  ring.start();
  const std::unique_ptr<void, decltype(&std::free)> source(std::aligned_alloc(4096, kBytes),
                                                           &std::free);
  const std::unique_ptr<void, decltype(&std::free)> target(std::aligned_alloc(4096, kBytes),
                                                           &std::free);
  std::memset(source.get(), 0x5a, kBytes);
  std::memset(target.get(), 0, kBytes);
  MA_INVARIANT(move(&ring, IORING_OP_WRITE, volume, source.get(), kBytes) == kBytes);
  MA_INVARIANT(move(&ring, IORING_OP_READ, volume, target.get(), kBytes) == kBytes);
  MA_INVARIANT(std::memcmp(source.get(), target.get(), kBytes) == 0);
}

}  // namespace
}  // namespace memascend

int main() {
  try {
    memascend::Ring probe(1);
  } catch (const memascend::SystemCallError& error) {
    std::printf("skipped: %s\n", error.what());
    return 77;
  }
  memascend::every_no_op_completes_once();
  memascend::a_wait_for_nothing_ends_in_time();
  memascend::what_is_written_is_read_back();
  return 0;
}
