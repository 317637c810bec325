// What finds mistakes of order, beside other numbers.
#include "sim.hpp"

namespace sim {

namespace {

/// Whether they have a byte in common; an empty range has none, wherever it is.
bool meets(const char* begin, const char* end, const Access& old) {
  return begin != end && old.begin != old.end && old.begin < end && begin < old.end;
}

}  // namespace

std::string told(const Access& access) {
  return std::string(access.is_write ? "write by " : "read by ") + access.what + " on stream " +
         std::to_string(access.stream);
}

void check_locked(AccessLog& log, const Stream& on, const char* begin, const char* end,
                  bool is_write, const std::string& what, const char* place) {
  const Access access{begin, end, on.id, on.clock[on.id], is_write, what};
  const auto is_before = [&](const Access& old) { return old.clock <= on.clock[old.stream]; };
  std::erase_if(log, [](const Access& old) { return old.clock <= host_clock[old.stream]; });
  for (const Access& old : log) {
    if (!(old.is_write || is_write) || !meets(begin, end, old) || is_before(old)) continue;
    find_locked(std::string("unordered use of ") + place + " memory: " + told(old) + ", then " +
                told(access));
  }
  // Whoever comes after this access comes after these, too.
  std::erase_if(log, [&](const Access& old) {
    const bool is_covered = begin <= old.begin && old.end <= end && is_before(old);
    return is_covered && (is_write || (!old.is_write && old.stream == on.id));
  });
  log.push_back(access);
}

void use_on_host(std::uintptr_t address, std::size_t nbytes, bool is_write,
                 const std::string& what) {
  const auto* begin = reinterpret_cast<const char*>(address);
  const std::lock_guard lock(state_mutex);
  for (const Access& old : host_log) {
    const bool is_pending = old.clock > host_clock[old.stream];
    if (is_pending && (old.is_write || is_write) && meets(begin, begin + nbytes, old))
      find_locked("host memory used by " + what + " before " + told(old) + " has passed");
  }
}

bool overlaps_pending_locked(const char* begin, const char* end, bool only_writes) {
  return std::any_of(host_log.begin(), host_log.end(), [&](const Access& old) {
    const bool is_pending = old.clock > host_clock[old.stream];
    return is_pending && (old.is_write || !only_writes) && meets(begin, end, old);
  });
}

std::uint64_t checksum(const void* data, std::size_t nbytes) {
  constexpr std::uint64_t kPrime = 1099511628211ull;  // FNV's
  const auto* bytes = static_cast<const unsigned char*>(data);
  std::uint64_t sum = 1469598103934665603ull;
  for (; nbytes >= sizeof(sum); nbytes -= sizeof(sum), bytes += sizeof(sum)) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes, sizeof(word));
    sum = (sum ^ word) * kPrime;
    sum ^= sum >> 29;
  }
  for (; nbytes > 0; --nbytes) sum = (sum ^ *bytes++) * kPrime;
  return sum;
}

}  // namespace sim
