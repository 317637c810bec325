// Lane: one volume with its own thread, engine, bounce memory and watchdog. It does the work
// between "move these pieces" and an engine's completions, once for all engines: splits into
// chunks, keeps the queue full, bounces, continues short transfers, retries, verifies checksums
// (checksums.cpp), watches the device (watch.cpp), and names errors.
//
// So I/O continues while every thread of the caller computes, and a batch holds all requests since
// the last system call. A drive that is slow, silent or blocks in a system call delays only its own
// I/O. (A lane that is blocked in a system call cannot report that.) Knows one volume; never knows
// the meaning of keys, or the order of transfers.
//
// Pieces wait in three classes: of transfers that a caller waits for, of other reads, of other
// writes. An earlier class goes first, but a later one is not passed over forever.
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
  /// Called on the lane's thread, without its lock, with transfers whose last part ended on this
  /// lane: their memory is no longer used. May call submit().
  using Finished = std::function<void(std::span<Transfer* const>)>;
  /// The state that the lanes of one queue share; outlives them.
  struct Shared {
    TransferOptions options;
    Alignment alignment;
    std::span<const Volume> volumes;
    Finished finished;
    Pace pace;
    TransferCounters counters;
  };

  /// Starts the thread of the volume with this index. `bounce` has at least one block. Throws
  /// SystemCallError if the engine cannot start.
  Lane(std::unique_ptr<Engine> engine, std::size_t volume_index, std::span<std::byte> bounce,
       Shared* shared);
  /// Pre: every part has ended.
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  /// Any thread; never waits for I/O. Pre: the part has at least one piece.
  void submit(Part* part);
  /// Moves waiting pieces of transfers that have become needed to the first class. Any thread.
  void hurry();
  /// Bytes moved so far, without reads that verify a write. Any thread; so is traffic().
  MovedBytes moved() const { return {bytes_read_, bytes_written_}; }
  LaneTraffic traffic() const;
  /// Throws StoreError if the device has been silent for the watchdog's time. Any thread.
  void refuse_silence(const std::string& recovery);
  /// One phrase on the engine and the features it obtained.
  const std::string& engine_description() const noexcept { return engine_description_; }

 private:
  /// The unissued rest of a piece.
  struct Cursor {
    Part* part;
    const Piece* piece;
    std::uint64_t next;  // on the volume
  };
  /// The waiting pieces of one class.
  struct Waiting {
    std::deque<Cursor> direct;
    std::deque<Cursor> bounced;
    bool direct_next = false;        // they alternate while both have pieces that can be issued
    unsigned passed_over_count = 0;  // chunks of earlier classes since one of this
    bool empty() const noexcept { return direct.empty() && bounced.empty(); }
  };
  enum Class { kNeeded, kReads, kWrites, kClassCount };
  /// A request in flight, or its rest.
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
    Pace::Clock::time_point again_since{};  // start of consecutive EAGAINs or ENOMEMs
    bool read_again = false;                // after a checksum mismatch
    bool paused = false;                    // waits for a retry; the device does not have it
    bool limited = false;                   // counts towards the write limit
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
  std::multimap<Pace::Clock::time_point, std::size_t> paused_;  // end of the pause -> chunk
  Pace::Clock::time_point turn_began_;
  Pace::Clock::time_point reaped_at_;
  Pace::Clock::time_point heard_at_;  // last completion, or end of idle time
  bool heard_ = false;                // a completion since the last watch()

  // Written by the lane's thread only.
  std::atomic<std::uint64_t> bytes_read_ = 0;
  std::atomic<std::uint64_t> bytes_written_ = 0;
  std::atomic<std::int64_t> busy_nanoseconds_ = 0;
  enum Kind { kReadNeeded, kReadAhead, kWriteNeeded, kWriteBehind, kKindCount };
  std::array<Latencies, kKindCount> latencies_;

  std::atomic<bool> any_waiting_ = false;  // there may be pieces for hurry() to move

  std::mutex mutex_;  // guards the following members
  std::vector<Part*> inbox_;
  bool hurried_ = false;
  bool wake_sent_ = false;  // since the thread last read the inbox
  bool stopping_ = false;
  // The oldest request of a silent device. Only the lane's thread writes it, and reads it unlocked.
  std::optional<std::pair<Operation, ErrorPlace>> silence_;

  std::thread thread_;
};

}  // namespace memascend
