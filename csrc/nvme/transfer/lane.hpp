// Lane: one volume with its own thread, engine, bounce memory and watchdog. What happens between
// "move these pieces" and an engine's completions, once for all engines: splitting into chunks,
// keeping the queue full, bouncing, resubmitting the rest of short transfers, retrying, checksums
// (checksums.cpp), patience (watch.cpp), and naming errors.
//
// So I/O goes on while every thread of the caller computes, a batch is whatever gathered since the
// last system call, and the I/O of a drive that is slow, silent or blocks in a system call holds up
// nothing but what lies on it. (In a system call a lane cannot report itself.) Knows one volume;
// never knows what keys mean, or which transfers must follow each other.
//
// Three classes of pieces wait here: of transfers that somebody waits for, of other reads, of other
// writes. A class goes before the later ones, but none is passed over for ever.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/free_space.hpp"
#include "nvme/engine/engine.hpp"
#include "nvme/transfer/traffic.hpp"
#include "nvme/transfer/transfer.hpp"
#include "nvme/transfer/write_limit.hpp"

namespace memascend {

class Lane {
 public:
  /// Called on the lane's thread, without its lock, for transfers of which this lane had the last
  /// part: their memory is quiet. May call submit().
  using Finished = std::function<void(std::span<Transfer* const>)>;
  /// What the lanes of one queue have in common; outlives them.
  struct Shared {
    TransferOptions options;
    Alignment alignment;
    std::span<const Volume> volumes;
    Finished finished;
    Pace pace;
    TransferCounters counters;
  };

  /// Starts the thread of the volume with this index. `bounce` is one block or more. Throws
  /// SystemCallError when the engine cannot start.
  Lane(std::unique_ptr<Engine> engine, std::size_t volume_index, std::span<std::byte> bounce,
       Shared* shared);
  /// Pre: every part is over.
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  /// Any thread; never waits for I/O. Pre: the part has at least one piece.
  void submit(Part* part);
  /// Looks again at which of the waiting transfers are needed. Any thread.
  void hurry();
  /// So far, without reads that only compare a write. Any thread; so is traffic().
  MovedBytes moved() const { return {bytes_read_, bytes_written_}; }
  LaneTraffic traffic() const;
  /// Throws StoreError while the device has not answered for the watchdog's time. Any thread.
  void refuse_silence(const std::string& recovery);
  /// One phrase on what the engine really obtained.
  const std::string& engine_description() const noexcept { return engine_description_; }

 private:
  /// A piece on its way out.
  struct Cursor {
    Part* part;
    const Piece* piece;
    std::uint64_t next;  // on the volume
  };
  /// The pieces of one class that wait.
  struct Waiting {
    std::deque<Cursor> direct;
    std::deque<Cursor> bounced;
    bool direct_next = false;        // they take turns, while both wait and can be issued
    unsigned passed_over_count = 0;  // chunks of earlier classes since one of this
    bool empty() const noexcept { return direct.empty() && bounced.empty(); }
  };
  enum Class { kNeeded, kReads, kWrites, kClassCount };
  /// A request in flight, or the rest of it.
  struct Chunk {
    Part* part = nullptr;
    const Piece* piece = nullptr;
    Operation operation = Operation::kRead;  // of the request: bounced writes may read first
    std::uint64_t offset = 0;
    std::uint64_t nbytes = 0;
    std::uint64_t done_bytes = 0;
    std::byte* data = nullptr;
    std::byte* bounce = nullptr;
    unsigned retry_count = 0;
    unsigned eio_count = 0;
    Pace::Clock::time_point again_since{};  // of EAGAIN or ENOMEM alone
    bool read_again = false;                // because it did not match its checksums
    bool paused = false;                    // and not with the device
    bool limited = false;                   // counts as a write behind the reads
    std::uint64_t serial = 0;
    Pace::Clock::time_point issued_at{};
  };

  void run(std::promise<void>* started);
  bool turn();
  bool take_inbox();
  void enqueue(Part* part);
  void promote();
  void fill_batch();
  bool open_next();
  bool open_chunk(std::deque<Cursor>* cursors);
  bool limit_write(Chunk* chunk);
  bool take_bounce(Chunk* chunk);
  void begin_bounced(Chunk* chunk);
  void push_request(const Chunk& chunk);
  void complete(const Completion& completion);
  void note_moved(const Chunk& chunk, std::uint64_t nbytes);
  void retry(Chunk* chunk, std::atomic<std::uint64_t>* counter, int code);
  bool pause_again(Chunk* chunk);
  bool pause_eio(Chunk* chunk);
  void pause(Chunk* chunk, std::chrono::milliseconds time);
  void resume_paused(Pace::Clock::time_point now);
  std::chrono::milliseconds patience(Pace::Clock::time_point now) const;
  void end_phase(Chunk* chunk);
  void fail(Chunk* chunk, ErrorPlace error);
  void fail(Chunk* chunk, int code);
  void close(Chunk* chunk);
  void close_if_over(Part* part);
  void note_write(const Chunk& chunk);
  void forget_write(const Chunk& chunk);
  bool matches(Chunk* chunk);
  bool begin_read_back(Part* part);
  int drop_cache(const Chunk& chunk) const;
  void watch();
  void report_stall(const Chunk& oldest);
  void report_slow(const SlowVolume& slow);

  std::unique_ptr<Engine> engine_;
  const std::size_t volume_index_;
  const Volume& volume_;
  Shared& shared_;
  const TransferOptions& options_;
  TransferCounters& counters_;
  std::string engine_description_;

  // The lane's thread only.
  std::array<Waiting, kClassCount> waiting_;
  std::vector<Chunk> chunks_;  // the index is the request's tag
  std::vector<std::size_t> free_chunks_;
  const std::span<std::byte> bounce_;
  FreeSpace free_bounce_;
  WriteLimit write_limit_;
  std::vector<Request> batch_;
  std::vector<Completion> completions_;
  std::vector<Transfer*> finished_;
  std::uint64_t serial_ = 0;
  std::multimap<Pace::Clock::time_point, std::size_t> paused_;  // when it is over, and the chunk
  Pace::Clock::time_point turn_began_;
  Pace::Clock::time_point reaped_at_;
  Pace::Clock::time_point heard_at_;  // the last completion, or idle until then
  bool heard_ = false;                // a completion since the last watch()

  // Written by the lane's thread only.
  std::atomic<std::uint64_t> bytes_read_ = 0;
  std::atomic<std::uint64_t> bytes_written_ = 0;
  std::atomic<std::int64_t> busy_nanoseconds_ = 0;
  enum Kind { kReadNeeded, kReadAhead, kWriteNeeded, kWriteBehind, kKindCount };
  std::array<Latencies, kKindCount> latencies_;

  std::atomic<bool> any_waiting_ = false;  // there are pieces that hurry() may move

  std::mutex mutex_;  // what follows
  std::vector<Part*> inbox_;
  bool hurried_ = false;
  bool wake_sent_ = false;  // since the thread last looked into the inbox
  bool stopping_ = false;
  // What a device has not answered for too long; only the lane's thread writes it, and reads it so.
  std::optional<std::pair<Operation, ErrorPlace>> silence_;

  std::thread thread_;
};

}  // namespace memascend
