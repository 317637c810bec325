// Transfers: what happens between "move these pieces" and an engine's completions, once for all
// engines: splitting into chunks, keeping the queue full, bouncing, resubmitting the rest of short
// transfers, retrying, and naming errors.
//
// A TransferQueue owns an engine and the one thread that issues on it. So I/O goes on while every
// thread of the caller computes, a batch is whatever gathered since the last system call, and
// io_uring's completion work lands on a thread of ours. Knows volumes; never knows what keys mean,
// who waits, or which transfers must follow each other. With checksums (checksums.cpp)
// everything moves in whole grains, and what was read is compared before anybody sees it.
//
// Each volume has a lane: a queue of its own, an equal share of the engine's depth and of the
// bounce buffers, and a watchdog (watch.cpp). A drive that is slow, or silent, fills its
// own lane and no other; one that is far slower than the others is named.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "nvme/engine/engine.hpp"
#include "nvme/engine/errors.hpp"
#include "nvme/space/checksums.hpp"
#include "nvme/transfer/pace.hpp"
#include "nvme/transfer/pieces.hpp"

namespace memascend {

/// One read or write. The submitter fills the first block and keeps the object and the memory until
/// the queue reports it finished; `error` is then its outcome. The rest is the queue's.
struct Transfer {
  Operation operation = Operation::kRead;
  std::string key;
  std::vector<Piece> pieces;

  std::optional<ErrorPlace> error;  // the first one

  std::size_t pieces_left = 0;  // not yet wholly issued
  std::size_t chunks_left = 0;  // issued, not yet completed
  bool reading_back = false;    // written, and now compared
};

class TransferQueue {
 public:
  struct Options {
    std::uint64_t chunk_bytes = std::uint64_t{1} << 20;  // of one request; a multiple of the block
    std::span<std::byte> bounce;                         // a block per volume or more; aligned
    std::chrono::milliseconds watchdog{60'000};  // silence of the device before it is reported
    unsigned eio_retries = 2;                    // of one request; an EIO may be of a moment
    std::chrono::milliseconds eio_pause{100};    // before each of them
    std::vector<double> weights;                 // what is expected of each volume; empty: alike
    Pace::Options pace;
    std::function<void(const std::string&)> report;  // default: a line on stderr
    Checksums* checksums = nullptr;  // of all that is moved; the blocks are then its grains
    bool read_back = false;          // compare writes with them, too
  };
  /// Called on the queue's thread, without its lock, for transfers that are over: their memory is
  /// quiet. May call submit().
  using Finished = std::function<void(std::span<Transfer* const>)>;

  struct Counters {
    std::atomic<std::uint64_t> bytes_read = 0;
    std::atomic<std::uint64_t> bytes_written = 0;
    std::atomic<std::uint64_t> bytes_bounced = 0;
    std::atomic<std::uint64_t> requests = 0;
    std::atomic<std::uint64_t> resubmitted = 0;      // after a short transfer
    std::atomic<std::uint64_t> retries = 0;          // after EAGAIN or EINTR
    std::atomic<std::uint64_t> eio_retries = 0;      // after EIO
    std::atomic<std::uint64_t> stalls = 0;           // reports of the watchdog
    std::atomic<std::uint64_t> slow_spells = 0;      // a volume became far slower than the others
    std::atomic<std::uint64_t> bytes_verified = 0;   // compared with a checksum, read back or not
    std::atomic<std::uint64_t> bytes_read_back = 0;  // after a write
    std::atomic<std::uint64_t> mismatches = 0;       // of requests; each is read once more
    std::atomic<std::uint64_t> corruptions = 0;      // of them, still wrong the second time
  };

  /// Attaches `volumes` (which outlive the queue) to the engine and starts the thread. Throws
  /// SystemCallError when the engine cannot start, std::invalid_argument for unusable options or a
  /// depth that is less than one request per volume.
  TransferQueue(std::unique_ptr<Engine> engine, std::span<const Volume> volumes,
                const Alignment& alignment, Options options, Finished finished);
  /// Pre: every transfer has been reported.
  ~TransferQueue();
  TransferQueue(const TransferQueue&) = delete;
  TransferQueue& operator=(const TransferQueue&) = delete;

  /// Any thread; never waits for I/O. Pre: the transfer has at least one piece.
  void submit(Transfer* transfer);
  /// One phrase on what the engine really obtained.
  const std::string& engine_description() const noexcept { return engine_description_; }
  const Counters& counters() const noexcept { return counters_; }

 private:
  /// A piece on its way out.
  struct Cursor {
    Transfer* transfer;
    const Piece* piece;
    std::uint64_t next;  // on the volume
  };
  /// A request in flight, or the rest of it.
  struct Chunk {
    Transfer* transfer = nullptr;
    const Piece* piece = nullptr;
    Operation operation = Operation::kRead;  // of the request: bounced writes may read first
    std::uint64_t offset = 0;
    std::uint64_t nbytes = 0;
    std::uint64_t done_bytes = 0;
    std::byte* data = nullptr;
    std::byte* bounce = nullptr;
    unsigned retry_count = 0;
    unsigned eio_count = 0;
    bool read_again = false;  // because it did not match its checksums
    std::uint64_t serial = 0;
  };
  /// The pieces that wait for one volume, and the chunks in flight there.
  struct Lane {
    std::deque<Cursor> direct;
    std::deque<Cursor> bounced;
    std::deque<Cursor> read_backs;  // through bounce buffers, too
    std::vector<std::byte*> free_bounces;
    std::size_t in_flight_count = 0;
    std::size_t paused_count = 0;  // of these, not with the engine
    bool slow_reported = false;
    bool heard = false;                              // a completion since the last watch()
    std::chrono::steady_clock::time_point heard_at;  // the last completion, or idle until then
    bool stall_reported = false;
  };

  void run(std::promise<void>* started);
  bool turn();
  bool take_inbox();
  void fill_batch();
  bool open_chunk(Lane* lane, std::deque<Cursor>* cursors, std::uint64_t nbytes_max);
  void begin_bounced(Lane* lane, Chunk* chunk);
  void push_request(const Chunk& chunk);
  void complete(const Completion& completion);
  void retry(Chunk* chunk, std::atomic<std::uint64_t>* counter, int code);
  bool pause(Chunk* chunk);
  void resume_paused(Pace::Clock::time_point now);
  std::chrono::milliseconds patience(Pace::Clock::time_point now) const;
  void end_phase(Chunk* chunk);
  void fail(Chunk* chunk, int code);
  void close(Chunk* chunk);
  void close_if_over(Transfer* transfer);
  void note_write(const Chunk& chunk);
  void forget_write(const Chunk& chunk);
  bool matches(Chunk* chunk);
  bool begin_read_back(Transfer* transfer);
  int drop_cache(const Chunk& chunk) const;
  const Volume& volume_of(const Chunk& chunk) const;
  Lane& lane_of(const Piece& piece);
  std::size_t wanted_count() const;
  void watch();
  void report_stall(int volume_index);
  void report_slow(const SlowVolume& slow);

  std::unique_ptr<Engine> engine_;
  std::span<const Volume> volumes_;
  Alignment alignment_;
  Options options_;
  Finished finished_callback_;
  Counters counters_;
  std::string engine_description_;

  // The queue's thread only.
  std::vector<Lane> lanes_;     // of the volume with the same index
  std::size_t lane_depth_ = 0;  // requests in flight in one lane
  std::vector<Chunk> chunks_;   // the index is the request's tag
  std::vector<std::size_t> free_chunks_;
  std::uint64_t bounce_bytes_ = 0;  // of one bounce buffer
  std::vector<Request> batch_;
  std::vector<Completion> completions_;
  std::vector<Transfer*> finished_;
  std::uint64_t serial_ = 0;
  struct Paused {
    Pace::Clock::time_point until;
    std::size_t chunk_index;
  };
  std::deque<Paused> paused_;  // each pause is as long, so the first is over first
  Pace pace_;
  Pace::Clock::time_point turn_began_;

  std::mutex mutex_;  // what follows
  std::vector<Transfer*> inbox_;
  bool wake_sent_ = false;  // since the thread last looked into the inbox
  bool stopping_ = false;

  std::thread thread_;
};

}  // namespace memascend
