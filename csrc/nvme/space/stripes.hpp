// Stripes: deals the bytes of one key over several volumes. Pure arithmetic.
//
// Stripes are small on purpose: most transfers are parts of keys (tiles, chunks), and each should
// keep all volumes busy. Knows weights and byte counts; never knows files, offsets or keys.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace memascend {

/// The space for a key on a volume.
struct VolumeRoom {
  double weight;             // its share among the volumes; positive
  std::uint64_t room_bytes;  // maximum; a multiple of the volumes' alignment
  double lead_bytes;         // bytes that it already holds beyond its share; negative: below it
};

/// Consecutive bytes of a key on one volume.
struct StripeRun {
  std::size_t volume_index;
  std::uint64_t nbytes;
};

/// Deals `nbytes` in stripes of `stripe_bytes`, in the order of the key: each to the volume with
/// space for it that is furthest behind its weight. If no volume has space for a whole stripe, the
/// rest is spread over the remaining space. Neighbouring stripes of one volume form one run.
/// Empty if all volumes together lack the space. Pre: `stripe_bytes` is positive.
std::vector<StripeRun> deal(std::uint64_t nbytes, std::uint64_t stripe_bytes,
                            std::span<const VolumeRoom> rooms);

}  // namespace memascend
