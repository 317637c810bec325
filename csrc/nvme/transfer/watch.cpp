// The transfer queue's patience with devices: what is asked again after a pause, which device is
// silent, and which is far slower than the others. The rest of the class is in transfer.cpp.
#include <cmath>
#include <utility>

#include "base/check.hpp"
#include "nvme/transfer/transfer.hpp"

namespace memascend {
namespace {

// The device's silence is looked at a moment after it has become too long.
constexpr std::chrono::milliseconds kTick{1};
constexpr double kMegabyte = 1e6;  // as drives are sold

double rounded_megabytes(double rate) { return std::round(rate / kMegabyte * 100) / 100; }

}  // namespace

// Leaves a chunk that got EIO for a moment; false when it was asked for often enough.
bool TransferQueue::pause(Chunk* chunk) {
  if (chunk->transfer->error) return false;  // the transfer has failed already
  if (chunk->eio_count == options_.eio_retries) return false;
  ++chunk->eio_count;
  ++counters_.eio_retries;
  ++lane_of(*chunk->piece).paused_count;
  const auto index = static_cast<std::size_t>(chunk - chunks_.data());
  paused_.push_back({Pace::Clock::now() + options_.eio_pause, index});
  return true;
}

void TransferQueue::resume_paused(Pace::Clock::time_point now) {
  while (!paused_.empty() && paused_.front().until <= now) {
    Chunk& chunk = chunks_[paused_.front().chunk_index];
    paused_.pop_front();
    --lane_of(*chunk.piece).paused_count;
    if (chunk.transfer->error) {
      fail(&chunk, EIO);
    } else {
      push_request(chunk);
    }
  }
}

// How long the thread may sleep.
std::chrono::milliseconds TransferQueue::patience(Pace::Clock::time_point now) const {
  if (paused_.empty()) return options_.watchdog + kTick;
  const auto pause =
      std::chrono::duration_cast<std::chrono::milliseconds>(paused_.front().until - now);
  return std::min(options_.watchdog, pause) + kTick;
}

// Says once which request a device does not answer, and which device is far slower than the others;
// goes on waiting.
void TransferQueue::watch() {
  const auto now = Pace::Clock::now();
  for (std::size_t index = 0; index < lanes_.size(); ++index) {
    Lane& lane = lanes_[index];
    const bool heard = std::exchange(lane.heard, false);
    const bool waits = lane.in_flight_count > lane.paused_count;
    if (heard || waits) pace_.note_busy(index, now - turn_began_);
    if (heard || !waits) {
      lane.heard_at = now;
      lane.stall_reported = false;
    } else if (!lane.stall_reported && now - lane.heard_at >= options_.watchdog) {
      lane.stall_reported = true;
      ++counters_.stalls;
      report_stall(static_cast<int>(index));
    }
  }
  for (const SlowVolume& slow : pace_.look(now)) {
    ++counters_.slow_spells;
    if (!std::exchange(lanes_[slow.index].slow_reported, true)) report_slow(slow);
  }
}

void TransferQueue::report_stall(int volume_index) {
  const Chunk* oldest = nullptr;
  for (const Chunk& chunk : chunks_) {
    if (chunk.transfer == nullptr || chunk.piece->volume_index != volume_index) continue;
    if (oldest == nullptr || chunk.serial < oldest->serial) oldest = &chunk;
  }
  options_.report(join(
      "no answer from the device for ", std::chrono::duration<double>(options_.watchdog).count(),
      " s: ", oldest->operation == Operation::kRead ? "read" : "write", " of \"",
      oldest->transfer->key, "\" (", oldest->nbytes, " bytes at offset ", oldest->offset, " in ",
      volumes_[static_cast<std::size_t>(volume_index)].directory(), "); still waiting"));
}

void TransferQueue::report_slow(const SlowVolume& slow) {
  options_.report(join(
      volumes_[slow.index].directory(),
      " is far slower than the other volumes: ", rounded_megabytes(slow.rate),
      " MB/s while it is busy, where its weight stands for ", rounded_megabytes(slow.expected_rate),
      " MB/s at their pace; the run goes on, as slowly as this one\nlikely cause: the drive is "
      "failing, too hot, full to its slow cells, or busy for another program; see dmesg and "
      "smartctl -a\nfix: a smaller weight for it in memascend.volumes, or another drive"));
}

}  // namespace memascend
