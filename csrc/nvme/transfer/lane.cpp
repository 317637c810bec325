#include "nvme/transfer/lane.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/align.hpp"
#include "base/check.hpp"
#include "system/thread.hpp"

namespace memascend {
namespace {

// Maximum of consecutive EINTRs or transfers of less than a block before a chunk fails.
constexpr unsigned kRetryCountMax = 64;
// A bounced request may shrink to the bounce memory divided by this, and no further: enough
// requests to keep a drive busy, none that are tiny.
constexpr std::uint64_t kBounceFraction = 16;
// Chunks of earlier classes issued before one of a waiting later class, so that no class starves.
constexpr unsigned kPassedOverMax = 8;

}  // namespace

Lane::Lane(std::unique_ptr<Engine> engine, std::size_t volume_index, std::span<std::byte> bounce,
           Shared* shared)
    : engine_(std::move(engine)),
      volume_index_(volume_index),
      volume_(shared->volumes[volume_index]),
      shared_(*shared),
      options_(shared->options),
      counters_(shared->counters),
      bounce_(bounce),
      free_bounce_(bounce.size()),
      write_limit_(engine_->queue_depth() * options_.chunk_bytes) {
  free_bounce_.mark(0, bounce.size(), true);
  chunks_.resize(engine_->queue_depth());
  for (std::size_t index = chunks_.size(); index > 0; --index) free_chunks_.push_back(index - 1);
  batch_.reserve(chunks_.size());
  completions_.resize(chunks_.size());

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

Lane::~Lane() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    engine_->wake();  // under the lock: once the thread has seen the flag, the engine may be gone
  }
  thread_.join();
}

void Lane::submit(Part* part) {
  bool wake = false;
  {
    const std::lock_guard lock(mutex_);
    inbox_.push_back(part);
    any_waiting_ = true;
    wake = !std::exchange(wake_sent_, true);
  }
  if (wake) engine_->wake();
}

void Lane::hurry() {
  if (!any_waiting_) return;
  bool wake = false;
  {
    const std::lock_guard lock(mutex_);
    hurried_ = true;
    wake = !std::exchange(wake_sent_, true);
  }
  if (wake) engine_->wake();
}

void Lane::run(std::promise<void>* started) {
  if (volume_index_ < options_.cpus.size()) stay_on(options_.cpus[volume_index_]);
  try {
    engine_->start();
    engine_description_ = engine_->description();
  } catch (...) {
    started->set_exception(std::current_exception());
    return;
  }
  started->set_value();  // `started` may not be used from here on
  try {
    while (turn()) {
    }
    engine_.reset();  // on the thread that issues on it, as it requires
  } catch (const std::exception& error) {
    // An engine throws only when it is misused, never for an errno. Requests may be in flight on
    // the caller's memory, so the process cannot continue.
    options_.report(join("the ", engine_->name(), " engine broke: ", error.what()));
    MA_INVARIANT(false && "the I/O engine works");
  }
}

bool Lane::turn() {
  if (!take_inbox()) return false;
  turn_began_ = Pace::Clock::now();
  // A device's silence is counted from its first request: this thread may have slept for longer
  // than the watchdog's time.
  if (free_chunks_.size() == chunks_.size()) heard_at_ = turn_began_;
  resume_paused(turn_began_);
  fill_batch();
  if (!batch_.empty()) {
    counters_.requests += batch_.size();
    const auto now = Pace::Clock::now();
    for (const Request& request : batch_) chunks_[request.tag].issued_at = now;
    engine_->submit(batch_);
    batch_.clear();
  }
  // Pieces of a failed transfer may have been dropped without a request: report before sleeping.
  const auto time = finished_.empty() ? patience(turn_began_) : std::chrono::milliseconds::zero();
  const std::size_t count = engine_->reap(completions_, time);
  reaped_at_ = Pace::Clock::now();
  for (std::size_t index = 0; index < count; ++index) complete(completions_[index]);
  watch();
  if (!finished_.empty()) {
    shared_.finished(finished_);
    finished_.clear();
  }
  return true;
}

// False when the thread has to end.
bool Lane::take_inbox() {
  const std::lock_guard lock(mutex_);
  wake_sent_ = false;
  for (Part* part : inbox_) enqueue(part);
  inbox_.clear();
  if (std::exchange(hurried_, false)) promote();
  return !stopping_;
}

void Lane::enqueue(Part* part) {
  const Transfer& transfer = *part->transfer;
  const Class wait_class = transfer.needed                          ? kNeeded
                           : transfer.operation == Operation::kRead ? kReads
                                                                    : kWrites;
  Waiting& waiting = waiting_[wait_class];
  for (const Piece& piece : part->pieces) {
    (piece.bounced ? waiting.bounced : waiting.direct).push_back({part, &piece, piece.offset});
  }
}

// Moves the pieces of needed transfers to the first class, in their order.
void Lane::promote() {
  const auto move_needed = [](std::deque<Cursor>* from, std::deque<Cursor>* to) {
    const auto rest = std::stable_partition(from->begin(), from->end(), [](const Cursor& cursor) {
      return !cursor.part->transfer->needed;
    });
    to->insert(to->end(), rest, from->end());
    from->erase(rest, from->end());
  };
  for (const Class other : {kReads, kWrites}) {
    move_needed(&waiting_[other].direct, &waiting_[kNeeded].direct);
    move_needed(&waiting_[other].bounced, &waiting_[kNeeded].bounced);
  }
}

void Lane::fill_batch() {
  while (!free_chunks_.empty() && open_next()) {
  }
  const std::lock_guard lock(mutex_);
  any_waiting_ =
      !inbox_.empty() || std::any_of(waiting_.begin(), waiting_.end(),
                                     [](const Waiting& waiting) { return !waiting.empty(); });
}

// Turns the next part of a piece into a request, in the order of the classes; false if no piece
// waits, or all wait for bounce memory or for other writes to complete.
bool Lane::open_next() {
  std::array<std::size_t, kClassCount> order{kNeeded, kReads, kWrites};
  std::stable_partition(order.begin(), order.end(), [this](std::size_t index) {
    return waiting_[index].passed_over_count >= kPassedOverMax;
  });
  for (const std::size_t index : order) {
    Waiting& waiting = waiting_[index];
    // In turns: small bounced pieces would take every request while bounce memory lasts.
    std::deque<Cursor>* first = waiting.direct_next ? &waiting.direct : &waiting.bounced;
    std::deque<Cursor>* second = waiting.direct_next ? &waiting.bounced : &waiting.direct;
    if (!open_chunk(first) && !open_chunk(second)) continue;
    waiting.direct_next = !waiting.direct_next;
    waiting.passed_over_count = 0;
    for (std::size_t later = index + 1; later < kClassCount; ++later) {
      if (!waiting_[later].empty()) ++waiting_[later].passed_over_count;
    }
    return true;
  }
  return false;
}

// False if no piece waits here, or the first waits for bounce memory or for other writes.
bool Lane::open_chunk(std::deque<Cursor>* cursors) {
  while (!cursors->empty() && cursors->front().part->transfer->failed) {
    Part* part = cursors->front().part;
    cursors->pop_front();
    --part->pieces_left;
    close_if_over(part);
  }
  if (cursors->empty()) return false;
  Cursor& cursor = cursors->front();
  Part* part = cursor.part;
  Chunk opened;
  opened.part = part;
  opened.piece = cursor.piece;
  opened.operation = part->reading_back ? Operation::kRead : part->transfer->operation;
  opened.offset = cursor.next;
  opened.nbytes = std::min(options_.chunk_bytes, cursor.piece->end - cursor.next);
  if (!limit_write(&opened)) return false;
  if (cursor.piece->bounced || part->reading_back) {
    if (!take_bounce(&opened)) return false;
    begin_bounced(&opened);
  } else {
    opened.data = cursor.piece->data + (opened.offset - cursor.piece->wanted_offset);
  }
  Chunk& chunk = chunks_[free_chunks_.back()];
  free_chunks_.pop_back();
  chunk = opened;
  if (chunk.limited) write_limit_.begin(chunk.nbytes);
  chunk.serial = ++serial_;
  ++part->chunks_left;
  cursor.next += chunk.nbytes;
  if (cursor.next == cursor.piece->end) {
    --part->pieces_left;
    cursors->pop_front();
  }
  if (chunk.operation == Operation::kWrite) note_write(chunk);
  push_request(chunk);
  return true;
}

// False while the device has enough writes and a caller waits for reads.
bool Lane::limit_write(Chunk* chunk) {
  const Transfer& transfer = *chunk->part->transfer;
  const bool needed = transfer.needed;
  const bool writes = transfer.operation == Operation::kWrite;
  if (needed && !writes) write_limit_.note_needed_read();
  chunk->limited = writes && !needed;
  return !chunk->limited || write_limit_.allows(chunk->nbytes);
}

// Takes bounce memory for the chunk, which may shrink to fit; false while too little is free.
bool Lane::take_bounce(Chunk* chunk) {
  const std::uint64_t block = shared_.alignment.offset_bytes;
  const std::uint64_t least = std::max(block, align_down(bounce_.size() / kBounceFraction, block));
  std::optional<FreeRun> run = free_bounce_.best_backed(chunk->nbytes);
  if (!run) run = free_bounce_.largest_backed();
  if (!run || run->nbytes < std::min(least, chunk->nbytes)) return false;
  chunk->nbytes = std::min(chunk->nbytes, run->nbytes);
  chunk->bounce = bounce_.data() + run->offset;
  free_bounce_.take(run->offset, chunk->nbytes);
  return true;
}

void Lane::begin_bounced(Chunk* chunk) {
  chunk->data = chunk->bounce;
  if (!chunk->part->reading_back) counters_.bytes_bounced += chunk->nbytes;
  if (chunk->operation == Operation::kRead) return;
  const Piece& piece = *chunk->piece;
  const Wanted wanted = wanted_part(piece, chunk->offset, chunk->nbytes);
  const std::uint64_t chunk_end = chunk->offset + chunk->nbytes;
  const bool keeps_tail = wanted.end < chunk_end && piece.keeps_tail;
  if (wanted.begin > chunk->offset || keeps_tail) {
    chunk->operation = Operation::kRead;  // read the rest of the block first; end_phase() writes
    return;
  }
  std::memcpy(chunk->bounce, wanted.data, wanted.end - wanted.begin);
  std::memset(chunk->bounce + (wanted.end - chunk->offset), 0, chunk_end - wanted.end);
}

void Lane::push_request(const Chunk& chunk) {
  batch_.push_back({chunk.operation, chunk.offset + chunk.done_bytes,
                    chunk.nbytes - chunk.done_bytes, chunk.data + chunk.done_bytes,
                    static_cast<std::uint64_t>(&chunk - chunks_.data())});
}

void Lane::complete(const Completion& completion) {
  Chunk& chunk = chunks_[completion.tag];
  heard_ = true;
  const std::uint64_t asked = chunk.nbytes - chunk.done_bytes;
  if (completion.result < 0) {
    const int code = static_cast<int>(-completion.result);
    if (code == EINTR) return retry(&chunk, &counters_.retries, code);
    if ((code == EAGAIN || code == ENOMEM) && pause_again(&chunk)) return;
    if (code == EIO && pause_eio(&chunk)) return;
    return fail(&chunk, code);
  }
  if (completion.result == 0) return fail(&chunk, 0);
  const auto moved = static_cast<std::uint64_t>(completion.result);
  MA_INVARIANT(moved <= asked);
  chunk.again_since = {};
  note_moved(chunk, moved);
  if (moved == asked) return end_phase(&chunk);
  // Direct I/O continues at the start of a block; a partly moved block is moved again.
  const std::uint64_t done_bytes =
      align_down(chunk.done_bytes + moved, shared_.alignment.offset_bytes);
  if (done_bytes > chunk.done_bytes) chunk.retry_count = 0;
  chunk.done_bytes = done_bytes;
  retry(&chunk, &counters_.resubmitted, EIO);
}

void Lane::note_moved(const Chunk& chunk, std::uint64_t nbytes) {
  shared_.pace.note_moved(volume_index_, nbytes);
  if (chunk.part->reading_back) return;
  const bool reads = chunk.operation == Operation::kRead;
  const Transfer& transfer = *chunk.part->transfer;
  const bool needed = transfer.needed;
  if (needed && transfer.operation == Operation::kRead) write_limit_.note_needed_read();
  (reads ? bytes_read_ : bytes_written_) += nbytes;
  latencies_[reads ? (needed ? kReadNeeded : kReadAhead) : (needed ? kWriteNeeded : kWriteBehind)]
      .add(reaped_at_ - chunk.issued_at);
}

LaneTraffic Lane::traffic() const {
  const std::array<Latencies, kKindCount>& all = latencies_;
  return {moved(), static_cast<double>(busy_nanoseconds_) * 1e-9,
          Latencies::summarize({&all[kReadNeeded], &all[kReadAhead]}),
          Latencies::summarize({&all[kWriteNeeded], &all[kWriteBehind]}),
          Latencies::summarize({&all[kReadNeeded], &all[kWriteNeeded]})};
}

// Issues the rest of a chunk again; fails with `code` after too many times.
void Lane::retry(Chunk* chunk, std::atomic<std::uint64_t>* counter, int code) {
  if (++chunk->retry_count > kRetryCountMax) return fail(chunk, code);
  ++*counter;
  push_request(*chunk);
}

// All bytes of the request have moved.
void Lane::end_phase(Chunk* chunk) {
  if (chunk->operation == Operation::kRead && !matches(chunk)) return;
  if (chunk->part->reading_back) return close(chunk);
  const Piece& piece = *chunk->piece;
  const bool reads = chunk->part->transfer->operation == Operation::kRead;
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
  close(chunk);
}

void Lane::fail(Chunk* chunk, int code) {
  fail(chunk, {chunk->part->transfer->key, volume_.directory(), chunk->offset + chunk->done_bytes,
               chunk->nbytes - chunk->done_bytes, code});
}

void Lane::fail(Chunk* chunk, ErrorPlace error) {
  if (chunk->operation == Operation::kWrite) forget_write(*chunk);
  Transfer& transfer = *chunk->part->transfer;
  if (!transfer.failed.exchange(true)) transfer.error = std::move(error);
  close(chunk);
}

void Lane::close(Chunk* chunk) {
  Part* part = chunk->part;
  if (chunk->bounce != nullptr) {
    free_bounce_.give(static_cast<std::uint64_t>(chunk->bounce - bounce_.data()), chunk->nbytes);
  }
  if (chunk->limited) write_limit_.end(chunk->nbytes);
  *chunk = {};
  free_chunks_.push_back(static_cast<std::size_t>(chunk - chunks_.data()));
  --part->chunks_left;
  close_if_over(part);
}

void Lane::close_if_over(Part* part) {
  if (part->pieces_left > 0 || part->chunks_left > 0) return;
  if (begin_read_back(part)) return;
  Transfer* transfer = part->transfer;
  if (transfer->parts_left.fetch_sub(1) > 1) return;  // another lane has not finished its part
  finished_.push_back(transfer);
}

}  // namespace memascend
