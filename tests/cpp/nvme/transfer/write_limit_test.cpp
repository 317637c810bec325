// sources: csrc/base/crc32c.cpp
//
// How many bytes of writes may be in a queue of 64 chunks while reads are waited for.
#include "nvme/transfer/write_limit.hpp"

#include "support/expect.hpp"

using namespace memascend;

namespace {

constexpr std::uint64_t kChunk = 2 << 20;
constexpr std::uint64_t kQueue = 64 * kChunk;

/// Begins writes of a chunk until no more may, at most `most`; how many.
std::uint64_t fill(WriteLimit* limit, std::uint64_t most = 1000) {
  std::uint64_t count = 0;
  for (; count < most && limit->allows(kChunk); ++count) limit->begin(kChunk);
  return count;
}

void writes_alone_are_not_limited() {
  WriteLimit limit(kQueue);
  EXPECT(fill(&limit) == 1000);
}

void behind_a_needed_read_they_fill_a_part_of_the_queue() {
  WriteLimit limit(kQueue);
  limit.note_needed_read();
  EXPECT(fill(&limit) == 64 / WriteLimit::kQueueShare);
  limit.end(kChunk);
  EXPECT(fill(&limit) == 1);
}

void one_write_of_any_size_may_begin() {
  WriteLimit limit(kChunk);
  limit.note_needed_read();
  EXPECT(limit.allows(kChunk));
  limit.begin(kChunk);
  EXPECT(!limit.allows(1));
}

void many_writes_without_a_needed_read_lift_the_limit_and_one_read_sets_it() {
  WriteLimit limit(kQueue);
  limit.note_needed_read();
  std::uint64_t begun = 0;
  while (begun < WriteLimit::kQuietQueues * kQueue) {
    EXPECT(limit.allows(kChunk));
    limit.begin(kChunk);
    limit.end(kChunk);
    begun += kChunk;
  }
  EXPECT(fill(&limit, 64) == 64);
  limit.note_needed_read();
  EXPECT(!limit.allows(kChunk));
}

}  // namespace

int main() {
  writes_alone_are_not_limited();
  behind_a_needed_read_they_fill_a_part_of_the_queue();
  one_write_of_any_size_may_begin();
  many_writes_without_a_needed_read_lift_the_limit_and_one_read_sets_it();
  return 0;
}
