// Transfers: the plain values between the store and the lanes of its volumes.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "nvme/engine/errors.hpp"
#include "nvme/space/checksums.hpp"
#include "nvme/transfer/pace.hpp"
#include "nvme/transfer/pieces.hpp"

namespace memascend {

struct Transfer;

/// The part of a transfer on one volume. Belongs to its lane from submit() until it has ended.
struct Part {
  Transfer* transfer;
  std::span<const Piece> pieces;
  std::size_t pieces_left;      // not yet issued as a whole
  std::size_t chunks_left = 0;  // issued, not yet completed
  bool reading_back = false;    // written, and now verified
};

/// One read or write. The submitter fills the first block and keeps the object and the memory until
/// the queue reports it finished; `error` then has the outcome. The rest belongs to the queue.
struct Transfer {
  Operation operation = Operation::kRead;
  std::string key;
  std::vector<Piece> pieces;  // the queue sorts them by volume

  std::optional<ErrorPlace> error;  // the first one

  std::vector<Part> parts;
  std::atomic<std::size_t> parts_left = 0;  // not yet ended
  std::atomic<bool> failed = false;         // in one part: no lane issues more of it
  std::atomic<bool> needed = false;         // a caller waits for it
};

/// Writes a line on stderr.
void report_on_stderr(const std::string& message);

struct TransferOptions {
  std::uint64_t chunk_bytes = std::uint64_t{2} << 20;  // of one request; a multiple of the block
  std::span<std::byte> bounce;                         // a block per volume or more; aligned
  std::chrono::milliseconds watchdog{60'000};          // silence of the device before a report
  unsigned eio_retries = 2;                            // per request; an EIO may be transient
  std::chrono::milliseconds eio_pause{100};            // before each EIO retry
  std::chrono::milliseconds again_limit{30'000};  // maximum time of retries after EAGAIN or ENOMEM
  std::vector<std::vector<int>> cpus = {};        // CPUs near each volume; or empty
  std::vector<double> weights;                    // expected speed of each volume; empty: alike
  Pace::Options pace;
  std::function<void(const std::string&)> report = report_on_stderr;
  Checksums* checksums = nullptr;  // of all data moved; a block is then a grain
  bool read_back = false;          // verify writes, too
};

/// Sums over all lanes.
struct TransferCounters {
  std::atomic<std::uint64_t> bytes_bounced = 0;
  std::atomic<std::uint64_t> requests = 0;
  std::atomic<std::uint64_t> resubmitted = 0;      // after a short transfer
  std::atomic<std::uint64_t> retries = 0;          // after EAGAIN, ENOMEM, EINTR
  std::atomic<std::uint64_t> eio_retries = 0;      // after EIO
  std::atomic<std::uint64_t> stalls = 0;           // reports of the watchdog
  std::atomic<std::uint64_t> slow_spells = 0;      // a volume became far slower than the others
  std::atomic<std::uint64_t> bytes_verified = 0;   // compared with a checksum, read back or not
  std::atomic<std::uint64_t> bytes_read_back = 0;  // after a write
  std::atomic<std::uint64_t> mismatches = 0;       // mismatches; each is read once more
  std::atomic<std::uint64_t> corruptions = 0;      // of them, wrong again the second time
};

}  // namespace memascend
