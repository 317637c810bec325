// The watchdog of a lane: retries after a pause, and reports of a silent device and of one far
// slower than the others. The rest of the class is in lane.cpp.
#include <algorithm>
#include <cerrno>
#include <cmath>
#include <utility>

#include "base/check.hpp"
#include "nvme/transfer/lane.hpp"

namespace memascend {
namespace {

using std::chrono::milliseconds;

// Added to each sleep, so that the thread wakes just after a deadline.
constexpr milliseconds kTick{1};
// Pauses after EAGAIN or ENOMEM double up to the maximum.
constexpr milliseconds kAgainPauseMin{1};
constexpr milliseconds kAgainPauseMax{100};
// A thread that waits for its device wakes so often per window of the pace, so that busy time is
// counted in the window it belongs to.
constexpr int kLooksPerWindow = 4;
constexpr double kMegabyte = 1e6;  // as drives are sold

double rounded_megabytes(double rate) { return std::round(rate / kMegabyte * 100) / 100; }

}  // namespace

// Pauses a chunk that got EAGAIN or ENOMEM, which ask for a later retry; false after too long a
// time.
bool Lane::pause_again(Chunk* chunk) {
  const auto now = Pace::Clock::now();
  if (chunk->again_since == Pace::Clock::time_point{}) chunk->again_since = now;
  const auto waited = std::chrono::duration_cast<milliseconds>(now - chunk->again_since);
  if (chunk->part->transfer->failed || waited >= options_.again_limit) return false;
  ++counters_.retries;
  pause(chunk, std::clamp(waited, kAgainPauseMin, kAgainPauseMax));
  return true;
}

// Pauses a chunk that got EIO; false after the allowed number of retries.
bool Lane::pause_eio(Chunk* chunk) {
  if (chunk->part->transfer->failed || chunk->eio_count == options_.eio_retries) return false;
  ++chunk->eio_count;
  ++counters_.eio_retries;
  pause(chunk, options_.eio_pause);
  return true;
}

void Lane::pause(Chunk* chunk, milliseconds time) {
  const auto index = static_cast<std::size_t>(chunk - chunks_.data());
  paused_.emplace(Pace::Clock::now() + time, index);
  chunk->paused = true;
}

void Lane::resume_paused(Pace::Clock::time_point now) {
  while (!paused_.empty() && paused_.begin()->first <= now) {
    Chunk& chunk = chunks_[paused_.begin()->second];
    paused_.erase(paused_.begin());
    chunk.paused = false;
    if (chunk.part->transfer->failed) {
      fail(&chunk, EIO);
    } else {
      push_request(chunk);
    }
  }
}

// Returns the maximum time that the thread may sleep.
milliseconds Lane::patience(Pace::Clock::time_point now) const {
  milliseconds result = options_.watchdog;
  if (shared_.volumes.size() > 1) {
    result = std::min(result, options_.pace.window / kLooksPerWindow);
  }
  if (!paused_.empty()) {
    result =
        std::min(result, std::chrono::duration_cast<milliseconds>(paused_.begin()->first - now));
  }
  return result + kTick;
}

// Reports once the oldest request of a silent device, and a device that is far slower than the
// others; the lane continues to wait.
void Lane::watch() {
  const auto now = Pace::Clock::now();
  const bool heard = std::exchange(heard_, false);
  const bool waits = chunks_.size() - free_chunks_.size() > paused_.size();
  if (heard || waits) {
    shared_.pace.note_busy(volume_index_, now - turn_began_);
    busy_nanoseconds_ += std::chrono::nanoseconds(now - turn_began_).count();
  }
  if (heard || !waits) {
    heard_at_ = now;
    if (silence_) {
      const std::lock_guard lock(mutex_);
      silence_.reset();
    }
  } else if (!silence_ && now - heard_at_ >= options_.watchdog) {
    ++counters_.stalls;
    const auto is_asked = [](const Chunk& chunk) { return chunk.part != nullptr && !chunk.paused; };
    const auto is_older = [&](const Chunk& one, const Chunk& other) {
      if (!is_asked(one) || !is_asked(other)) return is_asked(one);
      return one.serial < other.serial;
    };
    const Chunk& oldest = *std::min_element(chunks_.begin(), chunks_.end(), is_older);
    report_stall(oldest);
    const std::lock_guard lock(mutex_);
    silence_ = {
        oldest.operation,
        {oldest.part->transfer->key, volume_.directory(), oldest.offset, oldest.nbytes, ETIMEDOUT}};
  }
  for (const SlowVolume& slow : shared_.pace.look(now)) {
    ++counters_.slow_spells;
    if (slow.first_spell) report_slow(slow);
  }
}

void Lane::refuse_silence(const std::string& recovery) {
  const std::lock_guard lock(mutex_);
  if (!silence_) return;
  const auto& [operation, place] = *silence_;
  throw_store_error(describe(operation, place, recovery), place);
}

void Lane::report_stall(const Chunk& oldest) {
  options_.report(join("no answer from the device for ",
                       std::chrono::duration<double>(options_.watchdog).count(),
                       " s: ", oldest.operation == Operation::kRead ? "read" : "write", " of \"",
                       oldest.part->transfer->key, "\" (", oldest.nbytes, " bytes at offset ",
                       oldest.offset, " in ", volume_.directory(), "); still waiting"));
}

void Lane::report_slow(const SlowVolume& slow) {
  options_.report(join(
      shared_.volumes[slow.index].directory(),
      " is far slower than the other volumes: ", rounded_megabytes(slow.rate),
      " MB/s while it is busy, where its weight stands for ", rounded_megabytes(slow.expected_rate),
      " MB/s at their pace; the run goes on, as slowly as this one\nlikely cause: the drive is "
      "failing, too hot, full to its slow cells, or busy for another program; see dmesg and "
      "smartctl -a\nfix: a smaller weight for it in memascend.volumes, or another drive"));
}

}  // namespace memascend
