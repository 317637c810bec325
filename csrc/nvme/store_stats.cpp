// The statistics of a store, and calls beside its I/O.
#include "nvme/store.hpp"
#include "nvme/store_call.hpp"

namespace memascend {

bool Store::contains(const std::string& key) {
  LockedCall call(*this);
  call.expect_open();
  return entries_.contains(key);
}

std::vector<std::string> Store::keys() {
  LockedCall call(*this);
  call.expect_open();
  std::vector<std::string> names;
  for (const auto& [key, entry] : entries_) names.push_back(key);
  return names;
}

StoreStats Store::stats() {
  LockedCall call(*this);
  call.expect_open();
  const TransferCounters& counters = queue_->counters();
  MovedBytes all;
  for (std::size_t index = 0; index < space_.volumes().size(); ++index) {
    const MovedBytes moved = queue_->lane(index).moved();
    all.read += moved.read;
    all.written += moved.written;
  }
  return {{{"bytes_read", all.read},
           {"bytes_written", all.written},
           {"bytes_bounced", counters.bytes_bounced},
           {"requests", counters.requests},
           {"resubmitted", counters.resubmitted},
           {"retries", counters.retries},
           {"eio_retries", counters.eio_retries},
           {"stalls", counters.stalls},
           {"slow_spells", counters.slow_spells},
           {"bytes_verified", counters.bytes_verified},
           {"bytes_read_back", counters.bytes_read_back},
           {"mismatches", counters.mismatches},
           {"corruptions", counters.corruptions},
           {"checksum_bytes", checksums_ == nullptr ? 0 : checksums_->held_bytes()},
           {"reserved_bytes", space_.reserved_bytes()},
           {"used_bytes", space_.used_bytes()},
           {"key_count", entries_.size()},
           {"in_flight_count", job_count_}},
          std::chrono::duration<double>(wait_time_).count()};
}

std::vector<VolumeStats> Store::volume_stats() {
  const LockedCall call(*this);
  call.expect_open();
  std::vector<VolumeStats> result;
  for (std::size_t index = 0; index < space_.volumes().size(); ++index) {
    const Volume& volume = space_.volumes()[index];
    result.push_back({volume.directory(), space_.weights()[index], space_.used_bytes(index),
                      volume.copies_on_write(), queue_->lane(index).traffic()});
  }
  return result;
}

std::uint64_t Store::available_bytes() {
  LockedCall call(*this);
  call.expect_open();
  SpaceCall space(*this, call);
  return space.available_bytes();
}

void Store::provide_checksums(std::uint64_t nbytes) {
  LockedCall call(*this);
  call.expect_open();
  if (checksums_ == nullptr) return;
  SpaceCall space(*this, call);
  space.provide_checksums(nbytes);
}

void Store::set_recovery(const std::string& recovery) {
  const LockedCall call(*this);
  recovery_ = recovery;
}

}  // namespace memascend
