#include "nvme/transfer/queue.hpp"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "base/align.hpp"
#include "base/check.hpp"

namespace memascend {
namespace {

std::vector<double> weights_of(const TransferOptions& options, std::size_t volume_count) {
  return options.weights.empty() ? std::vector<double>(volume_count, 1.0) : options.weights;
}

}  // namespace

void report_on_stderr(const std::string& message) {
  std::fprintf(stderr, "memascend: %s\n", message.c_str());
}

TransferQueue::TransferQueue(std::vector<std::unique_ptr<Engine>> engines,
                             std::span<const Volume> volumes, const Alignment& alignment,
                             const TransferOptions& options, Lane::Finished finished)
    : shared_{options,
              alignment,
              volumes,
              std::move(finished),
              Pace(weights_of(options, volumes.size()), options.pace),
              {}} {
  MA_INVARIANT(engines.size() == volumes.size());
  const TransferOptions& known = shared_.options;
  const std::uint64_t block = alignment.offset_bytes;
  MA_EXPECT(known.chunk_bytes > 0 && is_aligned(known.chunk_bytes, block),
            "chunk_bytes must be a positive multiple of ", block, ", got ", known.chunk_bytes);
  MA_EXPECT(known.chunk_bytes <= std::uint64_t{1} << 30, "chunk_bytes must be at most 1 GiB");
  MA_EXPECT(is_aligned(known.bounce.data(), alignment.memory_bytes),
            "the bounce buffers' address must be a multiple of ", alignment.memory_bytes);
  const std::uint64_t share_bytes = align_down(known.bounce.size() / volumes.size(), block);
  MA_EXPECT(share_bytes > 0, "the bounce buffers need at least ", block, " bytes for each of ",
            volumes.size(), " volumes, got ", known.bounce.size());
  for (std::size_t index = 0; index < volumes.size(); ++index) {
    lanes_.push_back(std::make_unique<Lane>(std::move(engines[index]), index,
                                            known.bounce.subspan(index * share_bytes, share_bytes),
                                            &shared_));
  }
}

void TransferQueue::submit(Transfer* transfer) {
  std::vector<Piece>& pieces = transfer->pieces;
  MA_INVARIANT(!pieces.empty());
  std::stable_sort(pieces.begin(), pieces.end(), [](const Piece& one, const Piece& other) {
    return one.volume_index < other.volume_index;
  });
  for (auto first = pieces.begin(); first != pieces.end();) {
    const auto last = std::find_if(first, pieces.end(), [&](const Piece& piece) {
      return piece.volume_index != first->volume_index;
    });
    transfer->parts.push_back({transfer, {first, last}, static_cast<std::size_t>(last - first)});
    first = last;
  }
  transfer->parts_left = transfer->parts.size();
  // The transfer may have ended, and be destroyed, once its last part is submitted.
  Part* part = transfer->parts.data();
  for (std::size_t left = transfer->parts.size(); left > 0; --left, ++part) {
    lanes_[static_cast<std::size_t>(part->pieces.front().volume_index)]->submit(part);
  }
}

void TransferQueue::hurry(Transfer* transfer) {
  if (transfer->needed.exchange(true)) return;
  for (const Part& part : transfer->parts) {
    lanes_[static_cast<std::size_t>(part.pieces.front().volume_index)]->hurry();
  }
}

void TransferQueue::refuse_silence(const std::string& recovery) {
  for (const auto& lane : lanes_) lane->refuse_silence(recovery);
}

std::string TransferQueue::engine_description() const {
  std::string result;
  for (std::size_t index = 0; index < lanes_.size(); ++index) {
    const std::string& own = lanes_[index]->engine_description();
    if (result.find(own) == std::string::npos) result += join(result.empty() ? "" : "; ", own);
  }
  return result;
}

}  // namespace memascend
