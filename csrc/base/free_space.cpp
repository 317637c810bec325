#include "base/free_space.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/check.hpp"

namespace memascend {

FreeSpace::FreeSpace(std::uint64_t range_bytes) : range_bytes_(range_bytes) {
  insert(0, range_bytes, false);
}

std::optional<FreeRun> FreeSpace::best_backed(std::uint64_t nbytes) const {
  const auto found = backed_by_size_.lower_bound({nbytes, 0});
  if (found == backed_by_size_.end()) return std::nullopt;
  return FreeRun{found->second, found->first};
}

std::optional<FreeRun> FreeSpace::largest_backed() const {
  if (backed_by_size_.empty()) return std::nullopt;
  const auto [nbytes, offset] = *backed_by_size_.rbegin();
  return FreeRun{offset, nbytes};
}

std::optional<FreeRun> FreeSpace::best_any(std::uint64_t nbytes) const {
  std::optional<FreeRun> best;
  for (auto piece = pieces_.begin(); piece != pieces_.end();) {
    FreeRun run{piece->first, 0};
    for (; piece != pieces_.end() && piece->first == run.offset + run.nbytes; ++piece) {
      run.nbytes += piece->second.nbytes;
    }
    if (run.nbytes >= nbytes && (!best || run.nbytes < best->nbytes)) best = run;
  }
  return best;
}

std::optional<FreeRun> FreeSpace::best_untouched(std::uint64_t nbytes) const {
  std::optional<FreeRun> best;
  for (const auto& [offset, piece] : pieces_) {
    if (piece.backed || piece.nbytes < nbytes) continue;
    if (!best || piece.nbytes < best->nbytes) best = FreeRun{offset, piece.nbytes};
  }
  return best;
}

void FreeSpace::take(std::uint64_t offset, std::uint64_t nbytes) {
  const std::uint64_t end = offset + nbytes;
  auto piece = pieces_.upper_bound(offset);
  MA_INVARIANT(piece != pieces_.begin());
  --piece;
  std::uint64_t taken_bytes = 0;
  while (piece != pieces_.end() && piece->first < end) {
    const auto [start, body] = *piece;
    const std::uint64_t stop = start + body.nbytes;
    auto next = std::next(piece);
    erase(piece);
    // The remainders on either side cannot merge: their inner neighbour is gone.
    if (start < offset) insert(start, offset - start, body.backed);
    if (stop > end) insert(end, stop - end, body.backed);
    taken_bytes += std::min(stop, end) - std::max(start, offset);
    piece = next;
  }
  MA_INVARIANT(taken_bytes == nbytes);
}

void FreeSpace::give(std::uint64_t offset, std::uint64_t nbytes) {
  MA_INVARIANT(is_taken(offset, nbytes));
  insert(offset, nbytes, true);
}

void FreeSpace::mark(std::uint64_t offset, std::uint64_t nbytes, bool backed) {
  take(offset, nbytes);
  insert(offset, nbytes, backed);
}

void FreeSpace::remove_boundary(std::uint64_t offset) {
  if (boundaries_.erase(offset) == 0) return;
  const auto right = pieces_.find(offset);
  if (right == pieces_.end()) return;
  const FreePiece body = right->second;
  erase(right);
  insert(offset, body.nbytes, body.backed);
}

std::vector<FreeRun> FreeSpace::pieces(std::uint64_t begin, std::uint64_t end, bool backed) const {
  std::vector<FreeRun> found;
  auto piece = pieces_.upper_bound(begin);
  if (piece != pieces_.begin()) --piece;
  for (; piece != pieces_.end() && piece->first < end; ++piece) {
    const std::uint64_t start = std::max(piece->first, begin);
    const std::uint64_t stop = std::min(piece->first + piece->second.nbytes, end);
    if (piece->second.backed == backed && start < stop) found.push_back({start, stop - start});
  }
  return found;
}

std::uint64_t FreeSpace::backed_bytes_before(std::uint64_t end) const {
  const auto next = pieces_.lower_bound(end);
  if (next == pieces_.begin()) return 0;
  const auto& [offset, piece] = *std::prev(next);
  return piece.backed && offset + piece.nbytes == end ? piece.nbytes : 0;
}

std::uint64_t FreeSpace::free_bytes() const {
  std::uint64_t free_bytes = 0;
  for (const auto& [offset, piece] : pieces_) free_bytes += piece.nbytes;
  return free_bytes;
}

bool FreeSpace::is_valid() const {
  std::uint64_t backed_bytes = 0;
  std::size_t backed_count = 0;
  for (auto piece = pieces_.begin(); piece != pieces_.end(); ++piece) {
    const auto& [offset, body] = *piece;
    if (body.nbytes == 0) return false;
    if (offset + body.nbytes > range_bytes_) return false;
    const auto boundary = boundaries_.upper_bound(offset);
    if (boundary != boundaries_.end() && *boundary < offset + body.nbytes) return false;
    if (body.backed) {
      if (!backed_by_size_.contains({body.nbytes, offset})) return false;
      backed_bytes += body.nbytes;
      ++backed_count;
    }
    const auto next = std::next(piece);
    if (next == pieces_.end()) continue;
    if (offset + body.nbytes > next->first) return false;
    if (merges(piece, next)) return false;
  }
  if (backed_count != backed_by_size_.size()) return false;
  return backed_bytes == backed_bytes_;
}

bool FreeSpace::is_taken(std::uint64_t offset, std::uint64_t nbytes) const {
  if (offset + nbytes > range_bytes_) return false;
  return pieces(offset, offset + nbytes, true).empty() &&
         pieces(offset, offset + nbytes, false).empty();
}

void FreeSpace::insert(std::uint64_t offset, std::uint64_t nbytes, bool backed) {
  auto piece = pieces_.emplace(offset, FreePiece{nbytes, backed}).first;
  if (const auto next = std::next(piece); next != pieces_.end() && merges(piece, next)) {
    piece->second.nbytes += next->second.nbytes;
    erase(next);
  }
  if (piece != pieces_.begin() && merges(std::prev(piece), piece)) {
    const auto left = std::prev(piece);
    const std::uint64_t merged_bytes = left->second.nbytes + piece->second.nbytes;
    pieces_.erase(piece);  // not in the index yet
    if (backed) {
      backed_by_size_.erase({left->second.nbytes, left->first});
      backed_bytes_ -= left->second.nbytes;
    }
    left->second.nbytes = merged_bytes;
    piece = left;
  }
  if (backed) {
    backed_by_size_.insert({piece->second.nbytes, piece->first});
    backed_bytes_ += piece->second.nbytes;
  }
}

void FreeSpace::erase(Pieces::iterator piece) {
  if (piece->second.backed) {
    backed_by_size_.erase({piece->second.nbytes, piece->first});
    backed_bytes_ -= piece->second.nbytes;
  }
  pieces_.erase(piece);
}

bool FreeSpace::merges(Pieces::const_iterator left, Pieces::const_iterator right) const {
  return left->first + left->second.nbytes == right->first &&
         left->second.backed == right->second.backed && !boundaries_.contains(right->first);
}

TakenRun::TakenRun(std::shared_ptr<FreeSpace> space, std::uint64_t offset, std::uint64_t nbytes)
    : space_(std::move(space)), offset_(offset), nbytes_(nbytes) {
  space_->take(offset, nbytes);
}

void TakenRun::release() {
  if (const auto space = std::exchange(space_, nullptr)) space->give(offset_, nbytes_);
}

}  // namespace memascend
