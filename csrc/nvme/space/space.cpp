#include "nvme/space/space.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/align.hpp"
#include "base/check.hpp"

namespace memascend {
namespace {

constexpr std::uint64_t kExtentAlignmentMin = 4096;  // a file system block: extents share none
// A key of fewer whole stripes is not striped: its requests would be small and hardly overlap.
constexpr std::uint64_t kStripeCountMin = 2;

// Appends a part; lengthens the last extent if the part follows it on its volume.
void append(const Extent& part, std::vector<Extent>* extents) {
  if (!extents->empty()) {
    Extent& last = extents->back();
    if (last.volume_index == part.volume_index && last.offset + last.nbytes == part.offset) {
      last.nbytes += part.nbytes;
      return;
    }
  }
  extents->push_back(part);
}

// Assigns the volumes' shares to the runs, in the key's order. Pre: the sums agree on every volume.
std::vector<Extent> lay_out(const std::vector<StripeRun>& runs,
                            std::vector<std::vector<Extent>> shares) {
  std::vector<std::size_t> next(shares.size(), 0);
  std::vector<Extent> extents;
  for (const StripeRun& run : runs) {
    for (std::uint64_t left = run.nbytes; left > 0;) {
      Extent& source = shares[run.volume_index][next[run.volume_index]];
      const std::uint64_t part = std::min(left, source.nbytes);
      append({source.volume_index, source.offset, part}, &extents);
      source.offset += part;
      source.nbytes -= part;
      left -= part;
      if (source.nbytes == 0) ++next[run.volume_index];
    }
  }
  return extents;
}

// Asks a file system; converts a failure to a StoreError that names the volume and the cause.
template <typename Question>
auto asking(const Volume& volume, std::uint64_t offset, std::uint64_t nbytes, Question question) {
  try {
    return question();
  } catch (const VolumeFullError&) {
    throw;
  } catch (const SystemCallError& error) {
    throw StoreError(join("cannot ", error.what(), describe_cause(error.code())),
                     {"", volume.directory(), offset, nbytes, error.code()});
  }
}

struct Why {
  std::string cause;
  std::string remedy;
};
// Space was available by all counts, but the file system refused it.
constexpr Growth kRefused{0, Growth::Bound::kFileSystem, UINT64_MAX};

// Returns why a volume has no more space, and the remedy.
Why why_full(const Growth& growth) {
  switch (growth.bound) {
    case Growth::Bound::kLargestFile:
      return {join("a file of this file system has at most ", growth.bound_bytes,
                   " bytes, and a volume is one file"),
              "name a second directory on it, which becomes a second file"};
    case Growth::Bound::kProcess:
      return {join("RLIMIT_FSIZE lets this process write at most ", growth.bound_bytes,
                   " bytes into a file"),
              "ulimit -f unlimited"};
    case Growth::Bound::kCapacity:
      return {join("the volume's capacity of ", growth.bound_bytes, " bytes is used up"),
              "raise the volume's capacity, or name another drive"};
    case Growth::Bound::kFileSystem:
      break;
  }
  return {growth.bound_bytes == 0 ? "the file system is full"
                                  : "a quota, or a pool below the file system, is used up",
          "free space there, or name a directory on a larger disk"};
}

}  // namespace

Space::Space(std::vector<Volume> volumes, const SpaceOptions& options)
    : volumes_(std::move(volumes)), weights_(options.weights), checksums_(options.checksums) {
  MA_EXPECT(!volumes_.empty(), "a store needs at least one volume");
  if (weights_.empty()) weights_.assign(volumes_.size(), 1.0);
  MA_EXPECT(weights_.size() == volumes_.size(), "there are ", weights_.size(), " weights for ",
            volumes_.size(), " volumes");
  for (const double weight : weights_) {
    MA_EXPECT(weight > 0 && std::isfinite(weight), "a weight must be positive, got ", weight);
  }
  for (const Volume& volume : volumes_) {
    const Alignment alignment = volume.alignment();
    alignment_.offset_bytes = std::max(alignment_.offset_bytes, alignment.offset_bytes);
    alignment_.memory_bytes = std::max(alignment_.memory_bytes, alignment.memory_bytes);
  }
  if (checksums_ != nullptr) {
    alignment_.offset_bytes = std::max(alignment_.offset_bytes, Checksums::kGrainBytes);
  }
  // One alignment for all volumes, so that a transfer is cut alike on each of them.
  extent_alignment_ = std::max(kExtentAlignmentMin, alignment_.offset_bytes);
  free_.assign(volumes_.size(), FreeSpace(UINT64_MAX));
  hole_bytes_.assign(volumes_.size(), 0);
  use_ = std::make_unique<Use[]>(volumes_.size());
  MA_EXPECT(options.stripe_bytes > 0, "stripe_bytes must be positive");
  stripe_bytes_ = align_up(options.stripe_bytes, extent_alignment_);
  grow_bytes_ = align_up(options.grow_bytes, extent_alignment_);
}

std::vector<Extent> Space::take(const std::string& key, std::uint64_t nbytes) {
  try {
    std::vector<Extent> extents = take_anywhere(key, nbytes);
    note_use();
    return extents;
  } catch (...) {
    note_use();  // files may have grown
    throw;
  }
}

std::vector<Extent> Space::take_anywhere(const std::string& key, std::uint64_t nbytes) {
  const std::uint64_t rounded = align_up(nbytes, extent_alignment_);
  if (rounded < nbytes) throw full(key, nbytes, nbytes);  // the sum has wrapped
  std::vector<Extent> extents;
  if (volumes_.size() == 1) {
    extents = take_on(0, rounded);
  } else {
    if (rounded / stripe_bytes_ < kStripeCountMin) extents = take_whole(rounded);
    if (extents.empty()) extents = take_striped(rounded);
  }
  if (extents.empty()) throw full(key, nbytes, rounded);
  std::uint64_t key_offset = 0;
  for (Extent& extent : extents) {
    extent.key_offset = key_offset;
    key_offset += extent.nbytes;
  }
  if (checksums_ == nullptr) return extents;
  try {
    checksums_->take(extents);
  } catch (...) {
    give_back(extents);
    throw;
  }
  return extents;
}

// On the volume with the least bytes for its weight that has the space; or nothing.
std::vector<Extent> Space::take_whole(std::uint64_t nbytes) {
  std::vector<std::pair<double, std::size_t>> order;
  for (std::size_t index = 0; index < volumes_.size(); ++index) {
    order.emplace_back(static_cast<double>(taken_bytes(index) + nbytes) / weights_[index], index);
  }
  std::sort(order.begin(), order.end());
  for (const auto& [load, index] : order) {
    if (room_bytes(index) < nbytes) continue;
    std::vector<Extent> extents = take_on(index, nbytes);
    if (!extents.empty()) return extents;
  }
  return {};
}

std::vector<Extent> Space::take_striped(std::uint64_t nbytes) {
  std::vector<VolumeRoom> rooms = find_rooms();
  // A file system may give less than it promised: the key is then dealt again. From the second time
  // that a volume falls short, only the space it already has counts, so the loop ends.
  std::vector<bool> short_before(volumes_.size(), false);
  for (;;) {
    const std::vector<StripeRun> runs = deal(nbytes, stripe_bytes_, rooms);
    if (runs.empty()) return {};
    std::vector<std::uint64_t> shares(volumes_.size(), 0);
    for (const StripeRun& run : runs) shares[run.volume_index] += run.nbytes;
    std::size_t short_index = 0;
    std::vector<std::vector<Extent>> taken = take_shares(shares, &short_index);
    if (!taken.empty()) return lay_out(runs, std::move(taken));
    std::uint64_t room = free_[short_index].backed_bytes();
    if (!short_before[short_index]) room = std::max(room, room_bytes(short_index));
    rooms[short_index].room_bytes =
        align_down(std::min(room, shares[short_index] - 1), extent_alignment_);
    short_before[short_index] = true;
  }
}

// Returns the share of each volume, or nothing and the volume that lacks the space.
std::vector<std::vector<Extent>> Space::take_shares(const std::vector<std::uint64_t>& shares,
                                                    std::size_t* short_index) {
  std::vector<std::vector<Extent>> taken(volumes_.size());
  const auto give_all_back = [&] {
    for (const std::vector<Extent>& extents : taken) give_back(extents);
  };
  for (std::size_t index = 0; index < volumes_.size(); ++index) {
    if (shares[index] == 0) continue;
    try {
      taken[index] = take_on(index, shares[index]);
    } catch (...) {  // a drive that fails to grow its file
      give_all_back();
      throw;
    }
    if (!taken[index].empty()) continue;
    give_all_back();
    *short_index = index;
    return {};
  }
  return taken;
}

std::vector<Extent> Space::take_on(std::size_t index, std::uint64_t nbytes) {
  MA_INVARIANT(nbytes > 0 && is_aligned(nbytes, extent_alignment_));
  FreeSpace& free = free_[index];
  auto run = free.best_backed(nbytes);
  if (!run && refill(index, nbytes)) run = free.best_backed(nbytes);
  if (!run) {
    const std::uint64_t end = volumes_[index].capacity_bytes();
    if (grow(index, nbytes - free.backed_bytes_before(end))) run = free.best_backed(nbytes);
  }
  for (const FreeRun& hole : pieces(index, false)) {
    if (free.backed_bytes() >= nbytes) break;
    refill(index, {hole.offset, std::min(hole.nbytes, nbytes - free.backed_bytes())});
  }
  if (free.backed_bytes() < nbytes) grow(index, nbytes - free.backed_bytes());
  if (free.backed_bytes() < nbytes) return {};
  std::vector<Extent> taken;
  while (nbytes > 0) {
    if (!run) run = free.largest_backed();  // fragmented and full: use as few runs as possible
    const std::uint64_t part = std::min(run->nbytes, nbytes);
    free.take(run->offset, part);
    taken.push_back({static_cast<int>(index), run->offset, part});
    nbytes -= part;
    run.reset();
  }
  return taken;
}

// Returns each volume's space for a key, and its lead over its share so far. The lead is limited to
// a stripe: a key is read by itself, so it must not make up for a volume that was full.
std::vector<VolumeRoom> Space::find_rooms() const {
  double used_total = 0;
  double weight_total = 0;
  for (std::size_t index = 0; index < volumes_.size(); ++index) {
    used_total += static_cast<double>(taken_bytes(index));
    weight_total += weights_[index];
  }
  const auto stripe = static_cast<double>(stripe_bytes_);
  std::vector<VolumeRoom> result;
  for (std::size_t index = 0; index < volumes_.size(); ++index) {
    const double share = used_total * weights_[index] / weight_total;
    const double lead = static_cast<double>(taken_bytes(index)) - share;
    result.push_back({weights_[index], align_down(room_bytes(index), extent_alignment_),
                      std::clamp(lead, -stripe, stripe)});
  }
  return result;
}

StoreFullError Space::full(const std::string& key, std::uint64_t nbytes,
                           std::uint64_t rounded) const {
  const std::uint64_t available = available_bytes();
  const std::uint64_t missing = rounded - std::min(rounded, available);
  std::string names;
  std::string figures;
  std::string causes;
  std::string remedies;
  for (std::size_t index = 0; index < volumes_.size(); ++index) {
    const std::string& name = volumes_[index].directory();
    names += join(names.empty() ? "" : ", ", name);
    figures += join("\n  ", name, ": ", taken_bytes(index), " bytes used, ", room_bytes(index),
                    " bytes available");
    const Why why = why_full(missing > 0 ? growth(index) : kRefused);
    for (const auto& [part, all] : {std::pair(why.cause, &causes), {why.remedy, &remedies}}) {
      if (all->find(part) == std::string::npos) *all += join(all->empty() ? "" : "; or ", part);
    }
  }
  if (volumes_.size() == 1) figures.clear();
  if (missing > 0) {
    remedies += join("; this key alone needs ", missing,
                     " bytes more (`memascend plan` shows what a whole run needs)");
  }
  return StoreFullError(join("cannot reserve ", nbytes, " bytes for \"", key, "\" in ", names,
                             ": needed ", rounded, " bytes, available ", available, " bytes",
                             figures, "\nlikely cause: ", causes, "\nfix: ", remedies),
                        {key, names, 0, nbytes, ENOSPC});
}

void Space::discard(
    const std::function<void(const std::string&, std::uint64_t, std::uint64_t)>& look) {
  for (Volume& volume : volumes_) {
    volume.discard(
        [&](std::uint64_t done, std::uint64_t all) { look(volume.directory(), done, all); });
  }
}

void Space::give(const std::vector<Extent>& extents) {
  if (checksums_ != nullptr) checksums_->give(extents);
  give_back(extents);
  note_use();
}

void Space::give_back(const std::vector<Extent>& extents) {
  for (const Extent& extent : extents) {
    free_[static_cast<std::size_t>(extent.volume_index)].give(extent.offset, extent.nbytes);
  }
}

void Space::shrink() {
  for (std::size_t index = 0; index < volumes_.size(); ++index) {
    for (const FreeRun& run : pieces(index, true)) {
      if (!volumes_[index].release(run.offset, run.nbytes)) break;  // there are no holes
      free_[index].mark(run.offset, run.nbytes, false);
      hole_bytes_[index] += run.nbytes;
    }
  }
  note_use();
}

void Space::note_use() {
  for (std::size_t index = 0; index < volumes_.size(); ++index) {
    const Volume& volume = volumes_[index];
    use_[index].reserved_bytes =
        volume.capacity_bytes() - volume.start_bytes() - hole_bytes_[index];
    use_[index].used_bytes = taken_bytes(index);
  }
}

std::uint64_t Space::reserved_bytes() const {
  std::uint64_t total = 0;
  for (std::size_t index = 0; index < volumes_.size(); ++index) total += use_[index].reserved_bytes;
  return total;
}

std::uint64_t Space::used_bytes() const {
  std::uint64_t total = 0;
  for (std::size_t index = 0; index < volumes_.size(); ++index) total += use_[index].used_bytes;
  return total;
}

std::uint64_t Space::available_bytes() const {
  std::uint64_t total = 0;
  for (std::size_t index = 0; index < volumes_.size(); ++index) {
    total += free_[index].backed_bytes();
    // The growth of all volumes on one file system, counted at the first of them.
    std::uint64_t limits = 0;
    bool first = true;
    for (std::size_t other = 0; other < volumes_.size(); ++other) {
      if (other != index && !volumes_[other].shares_device(volumes_[index])) continue;
      if (other < index) first = false;
      limits += std::min(UINT64_MAX - limits, limited_room(other));
    }
    if (!first) continue;
    const std::uint64_t device_bytes =
        asking(volumes_[index], 0, 0, [&] { return volumes_[index].device_bytes_left(); });
    total += align_down(std::min(limits, device_bytes), extent_alignment_);
  }
  return total;
}

std::uint64_t Space::taken_bytes(std::size_t index) const {
  const Volume& volume = volumes_[index];
  return volume.capacity_bytes() - volume.start_bytes() - hole_bytes_[index] -
         free_[index].backed_bytes();
}

Growth Space::growth(std::size_t index) const {
  const Volume& volume = volumes_[index];
  return asking(volume, 0, 0, [&] { return volume.growth(); });
}

// Bytes by which a file may grow, holes included, without the free space of its file system.
std::uint64_t Space::limited_room(std::size_t index) const {
  const std::uint64_t growth_bytes = volumes_[index].limited_growth().nbytes;
  return growth_bytes + std::min(UINT64_MAX - growth_bytes, hole_bytes_[index]);
}

std::uint64_t Space::room_bytes(std::size_t index) const {
  const Volume& volume = volumes_[index];
  const std::uint64_t device_bytes =
      asking(volume, 0, 0, [&] { return volume.device_bytes_left(); });
  return free_[index].backed_bytes() + std::min(limited_room(index), device_bytes);
}

// The free runs of a file: those that are backed, or holes.
std::vector<FreeRun> Space::pieces(std::size_t index, bool backed) const {
  const Volume& volume = volumes_[index];
  return free_[index].pieces(volume.start_bytes(), volume.capacity_bytes(), backed);
}

// Backs the smallest hole that holds `nbytes`, or that part of it; false if there is none, or the
// space is not there any more.
bool Space::refill(std::size_t index, std::uint64_t nbytes) {
  std::optional<FreeRun> best;
  for (const FreeRun& hole : pieces(index, false)) {
    if (hole.nbytes >= nbytes && (!best || hole.nbytes < best->nbytes)) best = hole;
  }
  return best && refill(index, FreeRun{best->offset, nbytes});
}

bool Space::refill(std::size_t index, const FreeRun& hole) {
  Volume& volume = volumes_[index];
  try {
    asking(volume, hole.offset, hole.nbytes, [&] { volume.refill(hole.offset, hole.nbytes); });
  } catch (const VolumeFullError&) {
    return false;
  }
  free_[index].mark(hole.offset, hole.nbytes, true);
  hole_bytes_[index] -= hole.nbytes;
  return true;
}

// Grows the file by `nbytes` or more; false if the space is not there.
bool Space::grow(std::size_t index, std::uint64_t nbytes) {
  Volume& volume = volumes_[index];
  const std::uint64_t start = volume.capacity_bytes();
  // A whole step first, then only the bytes needed.
  for (const std::uint64_t growth : {std::max(nbytes, grow_bytes_), nbytes}) {
    if (growth > UINT64_MAX - start) continue;
    try {
      asking(volume, start, growth, [&] { volume.grow(start + growth); });
    } catch (const VolumeFullError&) {
      continue;
    }
    free_[index].mark(start, growth, true);
    return true;
  }
  return false;
}

}  // namespace memascend
