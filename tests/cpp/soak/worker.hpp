// Workers: threads that do random things to one store, and compare with the model.
#pragma once

#include <atomic>
#include <deque>
#include <map>

#include "buffer.hpp"
#include "model.hpp"
#include "plan.hpp"

namespace memascend::soak {

/// What the workers of one store share.
struct Scene {
  const Plan& plan;
  Tally& tally;
  std::shared_ptr<Allocator> allocator;
  LentBlocks& lent;
  std::shared_ptr<Store> store;
  std::deque<KeyModel> keys;  // used by all, each begun under its mutex
  std::atomic<bool> closing = false;
};

/// Keys that all use with nothing between them. Each byte follows from its place, so that whoever
/// reads one knows it.
std::byte racing_byte(std::size_t key, std::uint64_t at);
std::string racing_name(std::size_t key);
inline constexpr std::size_t kRacingKeyCount = 3;

class Worker {
 public:
  Worker(Scene& scene, std::size_t index);
  /// Does its operations, or ends when the store is closed; then looks at what is still open.
  void run();

 private:
  struct PendingRead {
    std::string key;
    std::shared_ptr<Ticket> ticket;
    Buffer buffer;
    std::vector<std::byte> expected;
    std::vector<bool> known;
  };
  struct Held {
    std::unique_ptr<Block> block;
    std::byte value;
  };

  void step();
  KeyModel& any_key();
  Buffer any_buffer(std::uint64_t nbytes);

  void write_whole();
  std::shared_ptr<Ticket> write_whole_from(Buffer& buffer, KeyModel& key);
  void write_part();
  void expect_no(const KeyModel& key);
  void read();
  void read_into(Buffer buffer, KeyModel& key, std::uint64_t offset);
  void settle_one();
  void settle(std::size_t index);
  void settle_all();
  void reserve();
  void discard();
  void look_around();

  void race();
  void race_to_write(std::size_t key);
  void race_to_read(std::size_t key);
  void allocate();
  void free_one();
  void check_accounts();

  Scene& scene_;
  Store& store_;
  const std::size_t index_;
  const std::string component_;
  Random random_;
  std::uint64_t operation_ = 0;
  std::vector<PendingRead> pending_;
  std::vector<Held> held_;
  std::uint64_t held_bytes_ = 0;
};

}  // namespace memascend::soak
