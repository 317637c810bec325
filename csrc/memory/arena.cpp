#include "memory/arena.hpp"

#include <sys/resource.h>

#include <algorithm>
#include <iterator>

#include "base/align.hpp"
#include "base/check.hpp"
#include "system/cuda_driver.hpp"
#include "system/memory.hpp"

namespace memascend {
namespace {

// Addresses cost nothing, and the allocator may scatter live blocks over a range several times
// their size: so many that addresses never run out before memory does.
constexpr std::uint64_t kRangePerPhysical = 8;
constexpr std::uint64_t kRangeBytesDefault = std::uint64_t{1} << 40;
constexpr std::uint64_t kRangeBytesMin = std::uint64_t{64} << 20;

constexpr char kNotRegistered[] =
    "host memory is not registered with the device, copies to and from it block: ";

std::uint64_t choose_range_bytes(std::uint64_t asked) {
  std::uint64_t wanted = asked;
  if (wanted == 0) wanted = physical_memory_bytes() * kRangePerPhysical;
  if (wanted == 0) wanted = kRangeBytesDefault;
  rlimit limit{};
  if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    wanted = std::min<std::uint64_t>(wanted, limit.rlim_cur / 2);  // leave room for others
  }
  return wanted;
}

}  // namespace

Arena::Arena(const ArenaOptions& options)
    : options_(options), range_(choose_range_bytes(options.range_bytes), kRangeBytesMin) {
  if (!options.register_device) return;
  registrar_ = options.registrar;
  if (registrar_ != nullptr) return;
  std::string reason;
  registrar_ = CudaDriver::open(options.cuda_library, reason);
  if (registrar_ == nullptr) notes_.add(join(kNotRegistered, reason));
}

Arena::~Arena() {
  if (!range_.owner().is_current()) return;
  for (const auto& [offset, piece] : pieces_) {
    if (piece.registered) registrar_->unregister_memory(memory(offset, piece.nbytes));
  }
}

void Arena::commit(std::uint64_t offset, std::uint64_t nbytes) {
  MA_INVARIANT(offset + nbytes <= range_.nbytes());
  const std::span<std::byte> added = memory(offset, nbytes);
  if (back_pages(added, options_.pages, notes_) == Backing::kHugetlb) hugetlb_[offset] = nbytes;
  reserved_bytes_ += nbytes;
  Notes refused;
  if (options_.pages.lock) lock_pages(added, refused);
  if (registers()) {
    pieces_.emplace(offset, CommittedPiece{nbytes, false});
    register_missing(offset);
    if (pieces_.at(offset).registered) return;  // pinned by the driver, even if mlock failed
  }
  for (const std::string& note : refused.list()) notes_.add(note);
}

bool Arena::decommit(std::uint64_t offset, std::uint64_t nbytes, Pieces pieces) {
  if (is_hugetlb(offset, nbytes)) return false;
  if (!registers()) {
    if (!discard_pages(memory(offset, nbytes), notes_)) return false;
    reserved_bytes_ -= nbytes;
    return true;
  }
  const auto found = std::prev(pieces_.upper_bound(offset));
  const std::uint64_t begin = found->first;
  const std::uint64_t end = begin + found->second.nbytes;
  if (pieces == Pieces::kWhole && (begin != offset || end != offset + nbytes)) return false;
  if (!unregister_piece(begin, found->second)) return false;
  if (!discard_pages(memory(offset, nbytes), notes_)) {
    register_piece(begin, found->second);
    return false;
  }
  reserved_bytes_ -= nbytes;
  pieces_.erase(found);
  add_piece(begin, offset);
  add_piece(offset + nbytes, end);
  return true;
}

void Arena::add_piece(std::uint64_t offset, std::uint64_t end) {
  if (offset == end) return;
  register_piece(offset,
                 pieces_.emplace(offset, CommittedPiece{end - offset, false}).first->second);
}

bool Arena::is_boundary(std::uint64_t offset) const {
  const auto next = pieces_.lower_bound(offset);
  if (next != pieces_.end() && next->first == offset) return true;
  if (next == pieces_.begin()) return false;
  const auto& [start, piece] = *std::prev(next);
  return start + piece.nbytes == offset;
}

/// Best effort: a refused piece serves as ordinary memory.
bool Arena::register_piece(std::uint64_t offset, CommittedPiece& piece) {
  const std::string failure = registrar_->register_memory(memory(offset, piece.nbytes));
  if (!failure.empty()) {
    notes_.add(join(kNotRegistered, failure));
    return false;
  }
  piece.registered = true;
  registered_bytes_ += piece.nbytes;
  return true;
}

/// Registers a new piece, and on success the older pieces that were refused: the device may have
/// been initialised since, or memory to register may have become available.
void Arena::register_missing(std::uint64_t newest) {
  if (!register_piece(newest, pieces_.at(newest)) || registered_bytes_ == reserved_bytes_) return;
  for (auto& [offset, piece] : pieces_) {
    if (!piece.registered && !register_piece(offset, piece)) return;
  }
}

/// False if the device would still know memory that is given back.
bool Arena::unregister_piece(std::uint64_t offset, CommittedPiece& piece) {
  if (!piece.registered) return true;
  const std::string failure = registrar_->try_unregister_memory(memory(offset, piece.nbytes));
  if (!failure.empty()) {
    notes_.add(join("free host memory stays, it could not be given back: ", failure));
    return false;
  }
  piece.registered = false;
  registered_bytes_ -= piece.nbytes;
  return true;
}

void Arena::drop_surplus(std::uint64_t offset, std::uint64_t nbytes) {
  if (!is_hugetlb(offset, nbytes)) discard_pages(memory(offset, nbytes), notes_);
}

ArenaReport Arena::report() {
  const PageUsage usage = measure_pages(memory(0, range_.nbytes()), notes_);
  ArenaReport report;
  report.reserved_bytes = reserved_bytes_;
  report.resident_bytes = usage.resident_bytes;
  report.huge_page_bytes = usage.huge_page_bytes;
  report.locked_bytes = usage.locked_bytes;
  report.registered_bytes = registered_bytes_;
  report.wants_registration = wants_registration();
  if (reserved_bytes_ > 0) report.numa_node = node_of_page(base());
  report.notes = notes_.list();
  return report;
}

bool Arena::is_hugetlb(std::uint64_t offset, std::uint64_t nbytes) const {
  auto next = hugetlb_.lower_bound(offset + nbytes);
  if (next == hugetlb_.begin()) return false;
  --next;
  return next->first + next->second > offset;
}

}  // namespace memascend
