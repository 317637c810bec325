#include "worker.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/check.hpp"

namespace memascend::soak {
namespace {

constexpr std::size_t kPendingMax = 8;

bool is_closed(const std::invalid_argument& error) {
  return std::strstr(error.what(), "the store is closed") != nullptr;
}

// Sizes around what the store treats differently: nothing, parts of blocks, blocks, many chunks.
std::uint64_t any_size(Random& random) {
  constexpr std::uint64_t kBlock = 4096;
  switch (below(random, 8)) {
    case 0:
      return below(random, 3);
    case 1:
      return below(random, 600);
    case 2:
      return kBlock * (1 + below(random, 4)) + below(random, 3) - 1;
    case 3:
      return below(random, 600'000);
    default:
      return below(random, 100'000);
  }
}

}  // namespace

Worker::Worker(Scene& scene, std::size_t index)
    : scene_(scene),
      store_(*scene.store),
      index_(index),
      component_(join("worker ", index)),
      random_(scene.plan.seed * 64 + index) {}

void Worker::run() {
  try {
    for (; operation_ < scene_.plan.operation_count; ++operation_) {
      step();
      ++scene_.tally.operations;
    }
  } catch (const std::invalid_argument& error) {
    SOAK_EXPECT(scene_.closing && is_closed(error), "refused: ", error.what());
  } catch (const std::exception& error) {
    fail(join("not expected: ", error.what()));
  }
  begin_operation(index_, operation_, "settle all");
  settle_all();
  while (!held_.empty()) free_one();
}

void Worker::step() {
  struct Action {
    const char* name;
    std::size_t weight;
    void (Worker::*act)();
  };
  static constexpr Action kActions[] = {
      {"write whole", 18, &Worker::write_whole},
      {"write part", 16, &Worker::write_part},
      {"read", 28, &Worker::read},
      {"settle", 8, &Worker::settle_one},
      {"reserve", 3, &Worker::reserve},
      {"discard", 4, &Worker::discard},
      {"look around", 3, &Worker::look_around},
      {"race", 12, &Worker::race},
      {"allocate", 4, &Worker::allocate},
      {"free", 2, &Worker::free_one},
      {"accounts", 1, &Worker::check_accounts},
  };
  static constexpr std::size_t kTotal = 100;
  std::size_t choice = below(random_, kTotal);
  for (const Action& action : kActions) {
    if (choice >= action.weight) {
      choice -= action.weight;
      continue;
    }
    begin_operation(index_, operation_, action.name);
    (this->*action.act)();
    return;
  }
}

KeyModel& Worker::any_key() { return scene_.keys[below(random_, scene_.keys.size())]; }

Buffer Worker::any_buffer(std::uint64_t nbytes) {
  return Buffer::take(*scene_.allocator, scene_.lent, nbytes, random_, scene_.tally);
}

void Worker::write_whole() {
  Buffer buffer = any_buffer(any_size(random_));
  fill(buffer.bytes(), random_);
  write_whole_from(buffer, any_key());
}

// The write's ticket, or null when the volumes are full.
std::shared_ptr<Ticket> Worker::write_whole_from(Buffer& buffer, KeyModel& key) {
  const std::lock_guard lock(key.mutex);
  const std::uint64_t nbytes = buffer.bytes().size();
  try {
    auto ticket = store_.write(key.name, nbytes, buffer.memory());
    if (!key.present || key.content.size() != nbytes) key.replace(nbytes);
    key.write(0, buffer.bytes(), ticket);
    ++scene_.tally.writes;
    return ticket;
  } catch (const StoreFullError&) {
    ++scene_.tally.full_volumes;  // and nothing has changed
    return nullptr;
  }
}

void Worker::write_part() {
  KeyModel& key = any_key();
  const std::lock_guard lock(key.mutex);
  if (!key.present) return expect_no(key);
  const std::uint64_t offset = below(random_, key.content.size() + 1);
  Buffer buffer = any_buffer(below(random_, key.content.size() - offset + 1));
  fill(buffer.bytes(), random_);
  key.write(offset, buffer.bytes(),
            store_.write(key.name, buffer.bytes().size(), buffer.memory(), offset));
  ++scene_.tally.writes;
}

void Worker::expect_no(const KeyModel& key) {
  try {
    std::byte byte{};
    store_.read(key.name, 1, {&byte, 0, nullptr});
  } catch (const StoreError& error) {
    SOAK_EXPECT(error.place().code == ENOENT, "of a key that is not there: ", error.what());
    return;
  }
  fail(join("\"", key.name, "\" was read and is not there"));
}

void Worker::read() {
  if (pending_.size() >= kPendingMax) settle(below(random_, pending_.size()));
  KeyModel& key = any_key();
  {
    const std::lock_guard lock(key.mutex);
    if (!key.present) return expect_no(key);
    const std::uint64_t offset = below(random_, key.content.size() + 1);
    const std::uint64_t nbytes = below(random_, key.content.size() - offset + 1);
    read_into(any_buffer(nbytes), key, offset);
  }
  if (!pending_.empty() && below(random_, 3) == 0) settle(pending_.size() - 1);
}

// Pre: the key's mutex is held and the range lies in the key.
void Worker::read_into(Buffer buffer, KeyModel& key, std::uint64_t offset) {
  const std::uint64_t nbytes = buffer.bytes().size();
  const Verdict verdict = key.verdict(store_, scene_.plan, scene_.tally);
  try {
    auto ticket = store_.read(key.name, nbytes, buffer.memory(), offset);
    SOAK_EXPECT(verdict != Verdict::kBroken, "\"", key.name, "\" was read though a write failed");
    ++scene_.tally.reads;
    // Sometimes nobody waits: the memory must stay until the transfer is over.
    if (!buffer.is_borrowed() && one_in(random_, 16)) return;
    const auto begin = static_cast<std::ptrdiff_t>(offset);
    const auto end = static_cast<std::ptrdiff_t>(offset + nbytes);
    pending_.push_back({key.name,
                        std::move(ticket),
                        std::move(buffer),
                        {key.content.begin() + begin, key.content.begin() + end},
                        {key.known.begin() + begin, key.known.begin() + end}});
  } catch (const StoreError& error) {
    SOAK_EXPECT(verdict != Verdict::kGood, "no write failed, and yet ", error.what());
    ++scene_.tally.refused_reads;
  }
}

void Worker::settle_one() {
  if (!pending_.empty()) settle(below(random_, pending_.size()));
}

void Worker::settle_all() {
  while (!pending_.empty()) settle(pending_.size() - 1);
}

void Worker::settle(std::size_t index) {
  std::swap(pending_[index], pending_.back());
  PendingRead read = std::move(pending_.back());
  pending_.pop_back();
  Outcome outcome = Outcome::kPending;
  try {
    if (one_in(random_, 2)) store_.wait(*read.ticket);
    while (!store_.wait(*read.ticket, std::chrono::milliseconds(1 + below(random_, 5)))) {
    }
    outcome = Outcome::kDone;
  } catch (const StoreError&) {
    outcome = outcome_of(store_, *read.ticket, read.key, scene_.plan);
    ++scene_.tally.failed_transfers;
  }
  read.buffer.check_canaries();
  if (outcome == Outcome::kFailed) return;
  const std::span<std::byte> bytes = read.buffer.bytes();
  for (std::size_t at = 0; at < bytes.size(); ++at) {
    if (bytes[at] == read.expected[at] || !read.known[at]) continue;
    fail(join("LOSS: byte ", at, " of ", bytes.size(), " read of \"", read.key, "\" is ",
              std::to_integer<int>(bytes[at]), ", not ", std::to_integer<int>(read.expected[at])));
  }
  scene_.tally.checked_bytes += bytes.size();
}

void Worker::reserve() {
  KeyModel& key = any_key();
  const std::lock_guard lock(key.mutex);
  const bool same = key.present && one_in(random_, 3);
  const std::uint64_t nbytes = same ? key.content.size() : any_size(random_);
  try {
    store_.reserve(key.name, nbytes);
    if (!key.present || key.content.size() != nbytes) key.replace(nbytes);
  } catch (const StoreFullError&) {
    ++scene_.tally.full_volumes;
  }
}

void Worker::discard() {
  KeyModel& key = any_key();
  const std::lock_guard lock(key.mutex);
  SOAK_EXPECT(store_.discard(key.name) == key.present, "discard(", key.name, ")");
  key.forget();
}

void Worker::look_around() {
  KeyModel& key = any_key();
  {
    const std::lock_guard lock(key.mutex);
    SOAK_EXPECT(store_.contains(key.name) == key.present, "contains(", key.name, ")");
    if (key.present) {
      SOAK_EXPECT(store_.nbytes(key.name) == key.content.size(), "nbytes(", key.name, ")");
    }
  }
  const auto counts = store_.stats().counts;
  SOAK_EXPECT(counts.at("stalls") == 0, "the watchdog spoke");
  SOAK_EXPECT(counts.at("used_bytes") <= counts.at("reserved_bytes"), "more is used than there is");
  SOAK_EXPECT(store_.keys().size() <= scene_.keys.size() + kRacingKeyCount, "too many keys");
  const std::vector<VolumeStats> volumes = store_.volume_stats();
  for (std::size_t index = 0; index < volumes.size(); ++index) {
    SOAK_EXPECT(volumes[index].used_bytes <= scene_.plan.volumes[index].capacity_bytes, "volume ",
                index, " holds more than it may: ", volumes[index].used_bytes);
  }
  if (one_in(random_, 4)) store_.engine_description();
  if (one_in(random_, 4)) store_.wait_all();
}

}  // namespace memascend::soak
