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

/// What of a transfer lies on one volume. Its lane's alone, from submit() until it is over.
struct Part {
  Transfer* transfer;
  std::span<const Piece> pieces;
  std::size_t pieces_left;      // not yet wholly issued
  std::size_t chunks_left = 0;  // issued, not yet completed
  bool reading_back = false;    // written, and now compared
};

/// One read or write. The submitter fills the first block and keeps the object and the memory until
/// the queue reports it finished; `error` is then its outcome. The rest is the queue's.
struct Transfer {
  Operation operation = Operation::kRead;
  std::string key;
  std::vector<Piece> pieces;  // the queue sorts them by volume

  std::optional<ErrorPlace> error;  // the first one

  std::vector<Part> parts;
  std::atomic<std::size_t> parts_left = 0;  // not yet over
  std::atomic<bool> failed = false;         // in one part: no lane begins more of it
  std::atomic<bool> needed = false;         // somebody waits for it
};

/// Writes a line on stderr.
void report_on_stderr(const std::string& message);

struct TransferOptions {
  std::uint64_t chunk_bytes = std::uint64_t{2} << 20;  // of one request; a multiple of the block
  std::span<std::byte> bounce;                         // a block per volume or more; aligned
  std::chrono::milliseconds watchdog{60'000};     // silence of the device before it is reported
  unsigned eio_retries = 2;                       // of one request; an EIO may be of a moment
  std::chrono::milliseconds eio_pause{100};       // before each of them
  std::chrono::milliseconds again_limit{30'000};  // of EAGAIN or ENOMEM, asked again
  std::vector<std::vector<int>> cpus = {};        // near each volume, of its threads; or empty
  std::vector<double> weights;                    // what is expected of each volume; empty: alike
  Pace::Options pace;
  std::function<void(const std::string&)> report = report_on_stderr;
  Checksums* checksums = nullptr;  // of all that is moved; the blocks are then its grains
  bool read_back = false;          // compare writes with them, too
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
  std::atomic<std::uint64_t> mismatches = 0;       // of requests; each is read once more
  std::atomic<std::uint64_t> corruptions = 0;      // of them, still wrong the second time
};

}  // namespace memascend
