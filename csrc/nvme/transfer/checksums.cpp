// The part of TransferQueue that knows of checksums; every method runs on the queue's thread, and
// does nothing in a queue without them.
#include <cerrno>
#include <utility>

#include "nvme/transfer/transfer.hpp"

namespace memascend {

// As the request leaves: from here on this is what the device has to give back.
void TransferQueue::note_write(const Chunk& chunk) {
  if (options_.checksums == nullptr) return;
  options_.checksums->note(chunk.piece->volume_index, chunk.offset, {chunk.data, chunk.nbytes});
}

// After a write that failed nobody knows which of its bytes the device has taken.
void TransferQueue::forget_write(const Chunk& chunk) {
  if (options_.checksums == nullptr) return;
  options_.checksums->forget(chunk.piece->volume_index, chunk.offset, chunk.nbytes);
}

// Compares what has arrived with its checksums. If not, the request is issued once more, since a
// bit can also flip on its way here; the second time the chunk has failed.
bool TransferQueue::matches(Chunk* chunk) {
  if (options_.checksums == nullptr) return true;
  std::uint64_t checked_bytes = 0;
  const std::optional<Mismatch> mismatch = options_.checksums->check(
      chunk->piece->volume_index, chunk->offset, {chunk->data, chunk->nbytes}, &checked_bytes);
  counters_.bytes_verified += checked_bytes;
  // What is read is on the volume already: there is nothing that dropping it could fail to write.
  if (mismatch || chunk->transfer->reading_back) (void)drop_cache(*chunk);
  if (!mismatch) {
    if (chunk->transfer->reading_back) counters_.bytes_read_back += chunk->nbytes;
    return true;
  }
  if (!std::exchange(chunk->read_again, true)) {
    ++counters_.mismatches;
    chunk->done_bytes = 0;
    push_request(*chunk);
    return false;
  }
  ++counters_.corruptions;
  Transfer* transfer = chunk->transfer;
  if (!transfer->error) {
    transfer->error = ErrorPlace{transfer->key,    volume_of(*chunk).directory(),
                                 mismatch->offset, Checksums::kGrainBytes,
                                 EBADMSG,          Corruption{mismatch->expected, mismatch->found}};
  }
  close(chunk);
  return false;
}

// False when there is nothing (more) to do for a transfer that is over.
bool TransferQueue::begin_read_back(Transfer* transfer) {
  if (!options_.read_back || transfer->error || transfer->operation == Operation::kRead)
    return false;
  if (std::exchange(transfer->reading_back, true)) return false;
  transfer->pieces_left = transfer->pieces.size();
  for (const Piece& piece : transfer->pieces) {
    lane_of(piece).read_backs.push_back({transfer, &piece, piece.offset});
  }
  return true;
}

// The errno of what the page cache could not write; 0 when all is well, or nothing is cached.
int TransferQueue::drop_cache(const Chunk& chunk) const {
  const Volume& volume = volume_of(chunk);
  return volume.direct() ? 0 : volume.drop_cache(chunk.offset, chunk.nbytes);
}

const Volume& TransferQueue::volume_of(const Chunk& chunk) const {
  return volumes_[static_cast<std::size_t>(chunk.piece->volume_index)];
}

}  // namespace memascend
