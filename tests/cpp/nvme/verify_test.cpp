// sources: csrc/base/*.cpp csrc/system/*.cpp csrc/nvme/**/*.cpp
//
// Verification in the transfer queue and the store: what is wrong on a volume is found wherever it
// lies in a transfer, and what is right is never refused.
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <future>
#include <random>
#include <vector>

#include "base/align.hpp"
#include "base/check.hpp"
#include "nvme/store.hpp"
#include "support/memory_engines.hpp"

namespace memascend {
namespace {

constexpr std::uint64_t kGrain = Checksums::kGrainBytes;
constexpr std::uint64_t kKeyBytes = 4 * kGrain + 1000;
constexpr std::uint64_t kRoundedBytes = 5 * kGrain;

struct alignas(4096) Buffer {
  std::byte bytes[1 << 20];
};

/// A queue with checksums over the memory engine: a key on two volumes, its grains in turns.
class Bench {
 public:
  explicit Bench(bool read_back = false, double short_transfer = 0) {
    faults_->short_transfer = short_transfer;
    for (int index = 0; index < 2; ++index) {
      volumes_.push_back(Volume::open_in_memory(1 << 20, join("volume", index)));
      volumes_.back().grow(1 << 20);
    }
    for (std::uint64_t grain = 0; grain < kRoundedBytes / kGrain; ++grain) {
      extents_.push_back(
          {static_cast<int>(grain % 2), (1 + grain) * kGrain, kGrain, grain * kGrain});
    }
    checksums_.take(extents_);
    alignment_ = volumes_.front().alignment();
    alignment_.offset_bytes = kGrain;
    TransferOptions options;
    options.bounce = std::span(bounce_->bytes).first(4 * kGrain);
    options.chunk_bytes = 2 * kGrain;
    options.checksums = &checksums_;
    options.read_back = read_back;
    queue_ = std::make_unique<TransferQueue>(
        memory_engines(faults_, 8, volumes_), volumes_, alignment_, options,
        [this](std::span<Transfer* const>) { finished_.set_value(); });
  }

  std::optional<ErrorPlace> run(Operation operation, std::uint64_t offset, std::uint64_t nbytes,
                                std::byte* data) {
    Transfer transfer;
    transfer.operation = operation;
    transfer.key = "layer.0";
    transfer.pieces =
        cut({operation, kKeyBytes, offset, nbytes, data, nbytes}, extents_, alignment_);
    finished_ = {};
    std::future<void> over = finished_.get_future();
    queue_->submit(&transfer);
    over.get();
    return transfer.error;
  }

  /// Flips a bit of the key's byte on its volume; the volume's offset of the byte's grain.
  std::uint64_t flip(std::uint64_t key_offset) {
    const Extent& extent = extents_[key_offset / kGrain];
    const int descriptor = volumes_[static_cast<std::size_t>(extent.volume_index)].descriptor();
    const auto offset = static_cast<off_t>(extent.offset + key_offset % kGrain);
    std::byte byte{};
    MA_INVARIANT(::pread(descriptor, &byte, 1, offset) == 1);
    byte ^= std::byte{16};
    MA_INVARIANT(::pwrite(descriptor, &byte, 1, offset) == 1);
    return extent.offset;
  }

  const TransferCounters& counters() const { return queue_->counters(); }
  MemoryFaults& faults() { return *faults_; }

 private:
  std::shared_ptr<MemoryFaults> faults_ = std::make_shared<MemoryFaults>();
  std::unique_ptr<Buffer> bounce_ = std::make_unique<Buffer>();
  std::vector<Volume> volumes_;
  std::vector<Extent> extents_;
  Checksums checksums_{2, {}};
  Alignment alignment_{};
  std::promise<void> finished_;
  std::unique_ptr<TransferQueue> queue_;
};

void fill(std::byte* data, std::uint64_t nbytes, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  for (std::uint64_t index = 0; index < nbytes; ++index) {
    data[index] = static_cast<std::byte>(random());
  }
}

void expect_corruption(const std::optional<ErrorPlace>& error, std::uint64_t offset,
                       std::uint64_t key_offset) {
  MA_INVARIANT(error.has_value());
  MA_INVARIANT(error->corruption.has_value());
  MA_INVARIANT(error->code == EBADMSG);
  MA_INVARIANT(error->key == "layer.0");
  MA_INVARIANT(error->volume == join("volume", key_offset / kGrain % 2));
  MA_INVARIANT(error->offset == offset);
  MA_INVARIANT(error->nbytes == kGrain);
}

// Direct pieces, the bounced tail, a bounced head, and a transfer whose memory fits nothing; the
// pieces alternate between two volumes.
void a_flipped_bit_is_found_wherever_it_lies() {
  const auto data = std::make_unique<Buffer>();
  struct Case {
    std::uint64_t begin;
    std::uint64_t end;
    std::uint64_t shift;    // of the memory
    std::uint64_t flipped;  // byte of the key, in a grain that the transfer touches
  };
  const Case cases[] = {
      {0, kKeyBytes, 0, 0},                                 // direct, first byte
      {0, kKeyBytes, 0, 4 * kGrain - 1},                    // direct, last byte
      {0, kKeyBytes, 0, 4 * kGrain + 999},                  // tail
      {0, kKeyBytes, 0, kRoundedBytes - 1},                 // padding behind the key
      {100, 3 * kGrain, 100, 99},                           // beside a head
      {100, 3 * kGrain, 100, 100},                          // in a head
      {100, 3 * kGrain, 0, 2 * kGrain + 7},                 // bounced as a whole
      {kGrain, kGrain + 1, 0, kGrain + 2},                  // beside a single byte
      {2 * kGrain - 1, 2 * kGrain + 1, 0, 2 * kGrain - 1},  // over a border
  };
  for (const Case& one : cases) {
    Bench bench(false, 0.3);
    fill(data->bytes, kKeyBytes, 1);
    MA_INVARIANT(!bench.run(Operation::kWrite, 0, kKeyBytes, data->bytes));
    std::byte* target = data->bytes + one.shift;
    MA_INVARIANT(!bench.run(Operation::kRead, one.begin, one.end - one.begin, target));
    const std::uint64_t offset = bench.flip(one.flipped);
    expect_corruption(bench.run(Operation::kRead, one.begin, one.end - one.begin, target), offset,
                      one.flipped);
    MA_INVARIANT(bench.counters().mismatches == 1);
    MA_INVARIANT(bench.counters().corruptions == 1);
    bench.flip(one.flipped);  // back
    MA_INVARIANT(!bench.run(Operation::kRead, one.begin, one.end - one.begin, target));
  }
}

// What lies beside the bytes of a write must not be written back under a new checksum.
void a_write_of_a_part_checks_what_it_keeps() {
  const auto data = std::make_unique<Buffer>();
  for (const std::uint64_t flipped : {std::uint64_t{0}, std::uint64_t{100}, kGrain - 1}) {
    Bench bench;
    fill(data->bytes, kKeyBytes, 2);
    MA_INVARIANT(!bench.run(Operation::kWrite, 0, kKeyBytes, data->bytes));
    const std::uint64_t offset = bench.flip(flipped);
    expect_corruption(bench.run(Operation::kWrite, 100, 50, data->bytes), offset, flipped);
    // A write that covers the grain needs nothing of it.
    MA_INVARIANT(!bench.run(Operation::kWrite, 0, kGrain, data->bytes));
    MA_INVARIANT(!bench.run(Operation::kRead, 0, kKeyBytes, data->bytes));
  }
}

void parts_of_space_never_written_may_be_read() {
  const auto data = std::make_unique<Buffer>();
  Bench bench;
  bench.flip(5);
  MA_INVARIANT(!bench.run(Operation::kRead, 0, kKeyBytes, data->bytes));
  MA_INVARIANT(bench.counters().bytes_verified == 0);
  MA_INVARIANT(!bench.run(Operation::kWrite, 100, kGrain, data->bytes));
  MA_INVARIANT(!bench.run(Operation::kRead, 0, kKeyBytes, data->bytes));
  MA_INVARIANT(bench.counters().bytes_verified == 2 * kGrain);
}

// Half of all requests move a part only; both checksums and contents must be those of the whole.
void short_transfers_are_verified_as_a_whole() {
  const auto data = std::make_unique<Buffer>();
  const auto target = std::make_unique<Buffer>();
  Bench bench(true, 0.5);
  std::mt19937_64 random(3);
  std::vector<std::byte> model(kKeyBytes);
  MA_INVARIANT(!bench.run(Operation::kWrite, 0, kKeyBytes, model.data()));
  for (std::uint64_t turn = 0; turn < 200; ++turn) {
    const std::uint64_t begin = random() % kKeyBytes;
    const std::uint64_t nbytes = 1 + random() % (kKeyBytes - begin);
    fill(data->bytes, nbytes, turn);
    std::memcpy(model.data() + begin, data->bytes, nbytes);
    MA_INVARIANT(!bench.run(Operation::kWrite, begin, nbytes, data->bytes));
    MA_INVARIANT(!bench.run(Operation::kRead, 0, kKeyBytes, target->bytes));
    MA_INVARIANT(std::memcmp(target->bytes, model.data(), kKeyBytes) == 0);
  }
  MA_INVARIANT(bench.counters().resubmitted > 0);
  MA_INVARIANT(bench.counters().mismatches == 0);
  MA_INVARIANT(bench.counters().bytes_read_back > 0);
}

std::unique_ptr<Buffer> bounce_of_stores = std::make_unique<Buffer>();

std::shared_ptr<Store> open_store(Verify verify, const std::shared_ptr<MemoryFaults>& faults) {
  StoreOptions options;
  options.volumes = {{"one"}, {"two"}};
  options.engine = "memory";
  options.engine_options.queue_depth = 8;
  options.engine_options.faults = faults;
  options.grow_bytes = std::uint64_t{4} << 20;
  options.verify = verify;
  options.transfer.chunk_bytes = 4 * kGrain;
  options.transfer.bounce = std::span(bounce_of_stores->bytes);
  return Store::open(std::move(options));
}

// A drive that says it has written and has not: a later read finds the old bytes.
void a_lost_write_is_found_when_it_is_read() {
  auto faults = std::make_shared<MemoryFaults>();
  faults->lost = 0.4;
  faults->seed = 4;
  const auto data = std::make_unique<Buffer>();
  const auto store = open_store(Verify::kReads, faults);
  int found = 0;
  for (std::uint64_t turn = 0; turn < 20; ++turn) {
    fill(data->bytes, kKeyBytes, turn);
    store->wait(*store->write("k", kKeyBytes, {data->bytes, 0, nullptr}));
    try {
      store->wait(*store->read("k", kKeyBytes, {data->bytes, 0, nullptr}));
    } catch (const CorruptionError& error) {
      MA_INVARIANT(std::string(error.what()).find("crc32c") != std::string::npos);
      ++found;
    }
  }
  MA_INVARIANT(found > 0);
  MA_INVARIANT(store->stats().counts.at("corruptions") >= static_cast<std::uint64_t>(found));
}

// With everything read back the write itself says so, and the key is broken as after any failure.
void a_lost_write_fails_where_it_is_read_back() {
  auto faults = std::make_shared<MemoryFaults>();
  faults->lost = 1;
  const auto data = std::make_unique<Buffer>();
  const auto store = open_store(Verify::kFull, faults);
  store->set_recovery("resume from checkpoint 7");
  fill(data->bytes, kKeyBytes, 1);
  const auto ticket = store->write("k", kKeyBytes, {data->bytes, 0, nullptr});
  for (const bool reads : {false, true}) {
    bool thrown = false;
    try {
      if (reads) store->read("k", kKeyBytes, {data->bytes, 0, nullptr});
      store->wait(*ticket);
    } catch (const CorruptionError& error) {
      MA_INVARIANT(std::string(error.what()).find("resume from checkpoint 7") != std::string::npos);
      thrown = true;
    }
    MA_INVARIANT(thrown);
  }
}

// A bit that flips on its way to us is right when it is read again.
void a_bit_that_flips_on_its_way_is_read_again() {
  auto faults = std::make_shared<MemoryFaults>();
  faults->flip = 0.1;
  faults->seed = 5;
  const auto data = std::make_unique<Buffer>();
  const auto target = std::make_unique<Buffer>();
  const auto store = open_store(Verify::kFull, faults);
  for (std::uint64_t turn = 0; turn < 150; ++turn) {
    fill(data->bytes, kKeyBytes, turn);
    store->wait(*store->write("k", kKeyBytes, {data->bytes, 0, nullptr}));
    store->wait(*store->read("k", kKeyBytes, {target->bytes, 0, nullptr}));
    MA_INVARIANT(std::memcmp(data->bytes, target->bytes, kKeyBytes) == 0);
  }
  MA_INVARIANT(store->stats().counts.at("mismatches") > 0);
  MA_INVARIANT(store->stats().counts.at("corruptions") == 0);
}

// Space that other keys had says nothing about the one that has it now.
void discarded_space_is_used_again() {
  const auto data = std::make_unique<Buffer>();
  const auto store = open_store(Verify::kReads, std::make_shared<MemoryFaults>());
  for (std::uint64_t turn = 0; turn < 50; ++turn) {
    const std::uint64_t nbytes = 1 + turn * 7919 % kKeyBytes;
    fill(data->bytes, nbytes, turn);
    const std::string key = join("k", turn % 3);
    store->reserve(key, nbytes);
    store->wait(*store->read(key, nbytes, {data->bytes, 0, nullptr}));
    store->wait(*store->write(key, nbytes, {data->bytes, 0, nullptr}));
    store->wait(*store->read(key, nbytes, {data->bytes, 0, nullptr}));
    if (turn % 2 == 0) store->discard(key);
  }
  for (const std::string& key : store->keys()) store->discard(key);
  MA_INVARIANT(store->stats().counts.at("used_bytes") == 0);
  MA_INVARIANT(store->stats().counts.at("corruptions") == 0);
  MA_INVARIANT(store->stats().counts.at("checksum_bytes") == Checksums::kSlabBytes);
}

// A write that failed leaves grains of which nobody knows the bytes: no reason to speak of damage.
void a_failed_write_is_no_corruption() {
  auto faults = std::make_shared<MemoryFaults>();
  faults->enospc = 0.3;
  faults->seed = 6;
  const auto data = std::make_unique<Buffer>();
  const auto store = open_store(Verify::kFull, faults);
  store->reserve("k", kKeyBytes);
  std::mt19937_64 random(7);
  int failed = 0;
  for (int turn = 0; turn < 200; ++turn) {
    const std::uint64_t begin = random() % kKeyBytes;
    try {
      store->wait(
          *store->write("k", 1 + random() % (kKeyBytes - begin), {data->bytes, 0, nullptr}, begin));
    } catch (const StoreError& error) {
      MA_INVARIANT(!error.place().corruption);
      ++failed;
    }
  }
  MA_INVARIANT(failed > 0);
  MA_INVARIANT(store->stats().counts.at("mismatches") == 0);
}

}  // namespace
}  // namespace memascend

int main() {
  memascend::a_flipped_bit_is_found_wherever_it_lies();
  memascend::a_write_of_a_part_checks_what_it_keeps();
  memascend::parts_of_space_never_written_may_be_read();
  memascend::short_transfers_are_verified_as_a_whole();
  memascend::a_lost_write_is_found_when_it_is_read();
  memascend::a_lost_write_fails_where_it_is_read_back();
  memascend::a_bit_that_flips_on_its_way_is_read_again();
  memascend::discarded_space_is_used_again();
  memascend::a_failed_write_is_no_corruption();
  return 0;
}
