#include "nvme/transfer/transfer.hpp"

#include <algorithm>
#include <cstring>
#include <future>
#include <utility>

#include "base/align.hpp"
#include "base/check.hpp"
#include "system/thread.hpp"

namespace memascend {
namespace {

// EAGAIN, EINTR or no whole block moved, in a row, before a chunk is given up.
constexpr unsigned kRetryCountMax = 64;
// With many requests in flight the thread wakes for an eighth of them at a time: fewer turns, and
// the devices' queues stay nearly full.
constexpr std::size_t kReapFraction = 8;
// Reads after a write that a lane's bounce buffers allow at once: small ones keep a drive busy,
// too.
constexpr std::uint64_t kReadBackCount = 16;

void report_on_stderr(const std::string& message) {
  std::fprintf(stderr, "memascend: %s\n", message.c_str());
}

}  // namespace

TransferQueue::TransferQueue(std::unique_ptr<Engine> engine, std::span<const Volume> volumes,
                             const Alignment& alignment, Options options, Finished finished)
    : engine_(std::move(engine)),
      volumes_(volumes),
      alignment_(alignment),
      options_(std::move(options)),
      finished_callback_(std::move(finished)),
      pace_(options_.weights.empty() ? std::vector<double>(volumes.size(), 1.0) : options_.weights,
            options_.pace) {
  const std::uint64_t block = alignment.offset_bytes;
  MA_EXPECT(options_.chunk_bytes > 0 && is_aligned(options_.chunk_bytes, block),
            "chunk_bytes must be a positive multiple of ", block, ", got ", options_.chunk_bytes);
  MA_EXPECT(options_.chunk_bytes <= std::uint64_t{1} << 30, "chunk_bytes must be at most 1 GiB");
  MA_EXPECT(is_aligned(options_.bounce.data(), alignment.memory_bytes),
            "the bounce buffers' address must be a multiple of ", alignment.memory_bytes);
  MA_EXPECT(engine_->queue_depth() >= volumes.size(),
            "queue_depth must be at least one for each of ", volumes.size(), " volumes, got ",
            engine_->queue_depth());
  lane_depth_ = engine_->queue_depth() / volumes.size();
  lanes_.resize(volumes.size());
  const std::uint64_t share_bytes = align_down(options_.bounce.size() / lanes_.size(), block);
  bounce_bytes_ = std::min(options_.chunk_bytes, share_bytes);
  if (options_.read_back && share_bytes > 0) {
    bounce_bytes_ =
        std::min(bounce_bytes_, std::max(block, align_down(share_bytes / kReadBackCount, block)));
  }
  MA_EXPECT(bounce_bytes_ > 0, "the bounce buffers need at least ", block, " bytes for each of ",
            lanes_.size(), " volumes, got ", options_.bounce.size());
  for (std::uint64_t end = bounce_bytes_; end <= options_.bounce.size(); end += bounce_bytes_) {
    Lane& lane = lanes_[(end / bounce_bytes_ - 1) % lanes_.size()];
    lane.free_bounces.push_back(options_.bounce.data() + (end - bounce_bytes_));
  }
  if (!options_.report) options_.report = report_on_stderr;
  chunks_.resize(engine_->queue_depth());
  for (std::size_t index = chunks_.size(); index > 0; --index) free_chunks_.push_back(index - 1);
  batch_.reserve(chunks_.size());
  completions_.resize(chunks_.size());
  for (const Volume& volume : volumes_) engine_->attach(volume);

  std::promise<void> started;
  std::future<void> ready = started.get_future();
  thread_ = start_thread("memascend-nvme", [this, &started] { run(&started); });
  try {
    ready.get();
  } catch (...) {
    thread_.join();
    throw;
  }
}

TransferQueue::~TransferQueue() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    engine_->wake();  // under the lock: once the thread has seen the flag the engine is gone
  }
  thread_.join();
}

void TransferQueue::submit(Transfer* transfer) {
  MA_INVARIANT(!transfer->pieces.empty());
  bool wake = false;
  {
    const std::lock_guard lock(mutex_);
    inbox_.push_back(transfer);
    wake = !std::exchange(wake_sent_, true);
  }
  if (wake) engine_->wake();
}

void TransferQueue::run(std::promise<void>* started) {
  try {
    engine_->start();
    engine_description_ = engine_->description();
  } catch (...) {
    started->set_exception(std::current_exception());
    return;
  }
  started->set_value();  // `started` is gone from here on
  try {
    while (turn()) {
    }
    engine_.reset();  // by its issuer, as it must be
  } catch (const std::exception& error) {
    // An engine throws only when it was used wrongly; requests may be in flight on the caller's
    // memory, so there is no way to go on.
    report_on_stderr(join("the ", engine_->name(), " engine broke: ", error.what()));
    MA_INVARIANT(false && "the I/O engine works");
  }
}

bool TransferQueue::turn() {
  if (!take_inbox()) return false;
  // A device's silence begins with its first request: this thread may have slept for longer than
  // the watchdog's patience.
  const auto now = std::chrono::steady_clock::now();
  for (Lane& lane : lanes_) {
    if (lane.in_flight_count == 0) lane.heard_at = now;
  }
  turn_began_ = now;
  resume_paused(now);
  fill_batch();
  if (!batch_.empty()) {
    counters_.requests += batch_.size();
    engine_->submit(batch_);
    batch_.clear();
  }
  // Pieces of a failed transfer may have been dropped without any request: report before sleeping.
  const std::size_t wanted = finished_.empty() ? wanted_count() : 0;
  const std::size_t count = engine_->reap(completions_, wanted, patience(now));
  for (std::size_t index = 0; index < count; ++index) complete(completions_[index]);
  watch();
  if (!finished_.empty()) {
    finished_callback_(finished_);
    finished_.clear();
  }
  return true;
}

// False when the thread is to end.
bool TransferQueue::take_inbox() {
  const std::lock_guard lock(mutex_);
  wake_sent_ = false;
  for (Transfer* transfer : inbox_) {
    transfer->pieces_left = transfer->pieces.size();
    for (const Piece& piece : transfer->pieces) {
      Lane& lane = lane_of(piece);
      (piece.bounced ? lane.bounced : lane.direct).push_back({transfer, &piece, piece.offset});
    }
  }
  inbox_.clear();
  return !stopping_;
}

TransferQueue::Lane& TransferQueue::lane_of(const Piece& piece) {
  return lanes_[static_cast<std::size_t>(piece.volume_index)];
}

// Completions to sleep for: few enough that any busy lane alone can give them, so that none waits
// for a slower one.
std::size_t TransferQueue::wanted_count() const {
  std::size_t wanted = chunks_.size();
  for (const Lane& lane : lanes_) {
    const std::size_t count = lane.in_flight_count - lane.paused_count;
    if (count > 0) wanted = std::min(wanted, count / kReapFraction);
  }
  return wanted == chunks_.size() ? 1 : std::max<std::size_t>(1, wanted);  // all: none is busy
}

void TransferQueue::fill_batch() {
  for (Lane& lane : lanes_) {
    // Bounced pieces first: there are few bounce buffers, so they never crowd out the direct ones.
    for (std::deque<Cursor>* cursors : {&lane.bounced, &lane.read_backs}) {
      while (!lane.free_bounces.empty() && open_chunk(&lane, cursors, bounce_bytes_)) {
      }
    }
    while (open_chunk(&lane, &lane.direct, options_.chunk_bytes)) {
    }
  }
}

// Turns the next part of the first piece into a request; false when there is no piece, or the lane
// is full.
bool TransferQueue::open_chunk(Lane* lane, std::deque<Cursor>* cursors, std::uint64_t nbytes_max) {
  while (!cursors->empty() && cursors->front().transfer->error) {
    Transfer* transfer = cursors->front().transfer;
    cursors->pop_front();
    --transfer->pieces_left;
    close_if_over(transfer);
  }
  if (cursors->empty() || lane->in_flight_count == lane_depth_) return false;
  MA_INVARIANT(!free_chunks_.empty());  // the lanes' depths together are no more than the engine's
  ++lane->in_flight_count;
  Cursor& cursor = cursors->front();
  const std::size_t index = free_chunks_.back();
  free_chunks_.pop_back();
  Chunk& chunk = chunks_[index];
  chunk = {};
  chunk.transfer = cursor.transfer;
  chunk.piece = cursor.piece;
  chunk.operation = cursor.transfer->reading_back ? Operation::kRead : cursor.transfer->operation;
  chunk.offset = cursor.next;
  chunk.nbytes = std::min(nbytes_max, cursor.piece->end - cursor.next);
  chunk.serial = ++serial_;
  if (cursors != &lane->direct) {
    begin_bounced(lane, &chunk);
  } else {
    chunk.data = cursor.piece->data + (chunk.offset - cursor.piece->wanted_offset);
  }
  ++cursor.transfer->chunks_left;
  cursor.next += chunk.nbytes;
  if (cursor.next == cursor.piece->end) {
    --cursor.transfer->pieces_left;
    cursors->pop_front();
  }
  if (chunk.operation == Operation::kWrite) note_write(chunk);
  push_request(chunk);
  return true;
}

void TransferQueue::begin_bounced(Lane* lane, Chunk* chunk) {
  chunk->bounce = lane->free_bounces.back();
  lane->free_bounces.pop_back();
  chunk->data = chunk->bounce;
  if (!chunk->transfer->reading_back) counters_.bytes_bounced += chunk->nbytes;
  if (chunk->operation == Operation::kRead) return;
  const Piece& piece = *chunk->piece;
  const Wanted wanted = wanted_part(piece, chunk->offset, chunk->nbytes);
  const std::uint64_t chunk_end = chunk->offset + chunk->nbytes;
  const bool keeps_tail = wanted.end < chunk_end && piece.keeps_tail;
  if (wanted.begin > chunk->offset || keeps_tail) {
    chunk->operation = Operation::kRead;  // the rest of the block first; end_phase() writes
    return;
  }
  std::memcpy(chunk->bounce, wanted.data, wanted.end - wanted.begin);
  std::memset(chunk->bounce + (wanted.end - chunk->offset), 0, chunk_end - wanted.end);
}

void TransferQueue::push_request(const Chunk& chunk) {
  batch_.push_back({chunk.operation, chunk.piece->volume_index, chunk.offset + chunk.done_bytes,
                    chunk.nbytes - chunk.done_bytes, chunk.data + chunk.done_bytes,
                    static_cast<std::uint64_t>(&chunk - chunks_.data())});
}

void TransferQueue::complete(const Completion& completion) {
  Chunk& chunk = chunks_[completion.tag];
  lane_of(*chunk.piece).heard = true;
  const std::uint64_t asked = chunk.nbytes - chunk.done_bytes;
  if (completion.result < 0) {
    const int code = static_cast<int>(-completion.result);
    if (code == EAGAIN || code == EINTR) return retry(&chunk, &counters_.retries, code);
    if (code == EIO && pause(&chunk)) return;
    return fail(&chunk, code);
  }
  if (completion.result == 0) return fail(&chunk, 0);
  const auto moved = static_cast<std::uint64_t>(completion.result);
  MA_INVARIANT(moved <= asked);
  pace_.note_moved(static_cast<std::size_t>(chunk.piece->volume_index), moved);
  if (moved == asked) return end_phase(&chunk);
  // Direct I/O goes on at a block's start; the bytes of a block begun are moved again.
  const std::uint64_t done_bytes = align_down(chunk.done_bytes + moved, alignment_.offset_bytes);
  if (done_bytes > chunk.done_bytes) chunk.retry_count = 0;
  chunk.done_bytes = done_bytes;
  retry(&chunk, &counters_.resubmitted, EIO);
}

// Asks again for what is left of a chunk, or fails with `code` after too many times.
void TransferQueue::retry(Chunk* chunk, std::atomic<std::uint64_t>* counter, int code) {
  if (++chunk->retry_count > kRetryCountMax) return fail(chunk, code);
  ++*counter;
  push_request(*chunk);
}

// All bytes of the request have moved.
void TransferQueue::end_phase(Chunk* chunk) {
  if (chunk->operation == Operation::kRead && !matches(chunk)) return;
  if (chunk->transfer->reading_back) return close(chunk);
  const Piece& piece = *chunk->piece;
  const bool reads = chunk->transfer->operation == Operation::kRead;
  const Wanted wanted = wanted_part(piece, chunk->offset, chunk->nbytes);
  const std::uint64_t wanted_bytes = wanted.end - wanted.begin;
  if (piece.bounced && reads) {
    std::memcpy(wanted.data, chunk->bounce + (wanted.begin - chunk->offset), wanted_bytes);
  } else if (piece.bounced && chunk->operation == Operation::kRead) {
    std::memcpy(chunk->bounce + (wanted.begin - chunk->offset), wanted.data, wanted_bytes);
    chunk->operation = Operation::kWrite;
    chunk->done_bytes = 0;
    note_write(*chunk);
    return push_request(*chunk);
  }
  const int code = drop_cache(*chunk);
  if (code != 0) return fail(chunk, code);
  (reads ? counters_.bytes_read : counters_.bytes_written) += wanted_bytes;
  close(chunk);
}

void TransferQueue::fail(Chunk* chunk, int code) {
  if (chunk->operation == Operation::kWrite) forget_write(*chunk);
  Transfer* transfer = chunk->transfer;
  if (!transfer->error) {
    transfer->error =
        ErrorPlace{transfer->key, volume_of(*chunk).directory(), chunk->offset + chunk->done_bytes,
                   chunk->nbytes - chunk->done_bytes, code};
  }
  close(chunk);
}

void TransferQueue::close(Chunk* chunk) {
  Transfer* transfer = chunk->transfer;
  Lane& lane = lane_of(*chunk->piece);
  if (chunk->bounce != nullptr) lane.free_bounces.push_back(chunk->bounce);
  --lane.in_flight_count;
  *chunk = {};
  free_chunks_.push_back(static_cast<std::size_t>(chunk - chunks_.data()));
  --transfer->chunks_left;
  close_if_over(transfer);
}

void TransferQueue::close_if_over(Transfer* transfer) {
  if (transfer->pieces_left > 0 || transfer->chunks_left > 0) return;
  if (!begin_read_back(transfer)) finished_.push_back(transfer);
}

}  // namespace memascend
