// Stripes: how the bytes of one key are dealt over several volumes. Pure arithmetic.
//
// Fine-grained on purpose: most transfers are parts of keys (tiles, chunks), and each of them is to
// keep all volumes busy. Knows weights and byte counts; never knows files, offsets or keys.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace memascend {

/// The room for a key on a volume.
struct VolumeRoom {
  double weight;             // its share among the volumes; positive
  std::uint64_t room_bytes;  // at most this; a multiple of the volumes' alignment
  double lead_bytes;         // it holds so much more than its share already; negative: less
};

/// Consecutive bytes of a key on one volume.
struct StripeRun {
  std::size_t volume_index;
  std::uint64_t nbytes;
};

/// Deals `nbytes` in stripes of `stripe_bytes`, in the order of the key: each to the volume that is
/// furthest behind its weight among those with room for it. Where none has room for a whole stripe,
/// what is left is spread over the room there is. Neighbouring stripes of one volume are one run.
/// Empty when all volumes together lack the room. Pre: `stripe_bytes` is positive.
std::vector<StripeRun> deal(std::uint64_t nbytes, std::uint64_t stripe_bytes,
                            std::span<const VolumeRoom> rooms);

}  // namespace memascend
