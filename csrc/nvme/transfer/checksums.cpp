// The checksum part of Lane. Every method runs on the lane's thread, and does nothing without
// checksums.
#include <cerrno>
#include <utility>

#include "nvme/transfer/lane.hpp"

namespace memascend {

// Called before the request is issued: from then on the device has to return these bytes.
void Lane::note_write(const Chunk& chunk) {
  if (options_.checksums == nullptr) return;
  options_.checksums->note(chunk.piece->volume_index, chunk.offset, {chunk.data, chunk.nbytes});
}

// After a failed write it is unknown which of its bytes the device has taken.
void Lane::forget_write(const Chunk& chunk) {
  if (options_.checksums == nullptr) return;
  options_.checksums->forget(chunk.piece->volume_index, chunk.offset, chunk.nbytes);
}

// Compares a finished read with its checksums. On a mismatch the request is issued once more, since
// a bit can also flip on the way to memory; after a second mismatch the chunk fails.
bool Lane::matches(Chunk* chunk) {
  if (options_.checksums == nullptr) return true;
  std::uint64_t checked_bytes = 0;
  const std::optional<Mismatch> mismatch = options_.checksums->check(
      chunk->piece->volume_index, chunk->offset, {chunk->data, chunk->nbytes}, &checked_bytes);
  counters_.bytes_verified += checked_bytes;
  // The bytes read are already on the volume, so drop_cache() has no write that could fail.
  if (mismatch || chunk->part->reading_back) (void)drop_cache(*chunk);
  if (!mismatch) {
    if (chunk->part->reading_back) counters_.bytes_read_back += chunk->nbytes;
    return true;
  }
  if (!std::exchange(chunk->read_again, true)) {
    ++counters_.mismatches;
    chunk->done_bytes = 0;
    push_request(*chunk);
    return false;
  }
  ++counters_.corruptions;
  fail(chunk, {chunk->part->transfer->key, volume_.directory(), mismatch->offset,
               Checksums::kGrainBytes, EBADMSG, Corruption{mismatch->expected, mismatch->found}});
  return false;
}

// Starts to read back a written part; false if there is nothing (more) to do for it.
bool Lane::begin_read_back(Part* part) {
  if (!options_.read_back || part->transfer->failed) return false;
  if (part->transfer->operation == Operation::kRead) return false;
  if (std::exchange(part->reading_back, true)) return false;
  part->pieces_left = part->pieces.size();
  any_waiting_ = true;  // before reading `needed`, so that no hurry() is lost
  Waiting& waiting = waiting_[part->transfer->needed ? kNeeded : kWrites];
  for (const Piece& piece : part->pieces) waiting.bounced.push_back({part, &piece, piece.offset});
  return true;
}

// Drops the chunk's pages from the page cache. Returns the errno of a failed write-back, else 0.
int Lane::drop_cache(const Chunk& chunk) const {
  return volume_.direct() ? 0 : volume_.drop_cache(chunk.offset, chunk.nbytes);
}

}  // namespace memascend
