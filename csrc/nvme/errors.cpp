#include "nvme/errors.hpp"

#include <cerrno>
#include <cstring>
#include <sstream>

#include "base/check.hpp"

namespace memascend {
namespace {

std::string describe_corruption(Operation operation, const ErrorPlace& place,
                                const std::string& recovery) {
  std::ostringstream sums;
  sums << std::hex << "crc32c " << place.corruption->found << " instead of "
       << place.corruption->expected;
  return join("corrupted data in \"", place.key, "\" in ", place.volume, ": the ", place.nbytes,
              " bytes at offset ", place.offset, " are not those that were written (", sums.str(),
              ", in two reads", operation == Operation::kWrite ? " that belong to a write" : "",
              "); nothing was made of them\nlikely cause: the drive, its cable or controller, or "
              "faulty host memory; or another program wrote to the volume\nfix: look at the drive "
              "(smartctl -a, dmesg) and test the memory; ",
              recovery);
}

}  // namespace

std::string describe(Operation operation, const ErrorPlace& place, const std::string& recovery) {
  if (place.corruption) return describe_corruption(operation, place, recovery);
  const char* verb = operation == Operation::kRead ? "read" : "write";
  const char* cause = "the device or its file system failed; see dmesg";
  if (place.code == 0) cause = "the file is shorter than it was made: something truncated it";
  if (place.code == ENOSPC) cause = "the file system is full though the space was reserved";
  if (place.code == EFAULT) cause = "the memory of the transfer was unmapped before it ended";
  return join(
      "cannot ", verb, " \"", place.key, "\" in ", place.volume, ": ",
      place.code == 0 ? "the device ended early" : std::strerror(place.code),
      " (errno=", place.code, ", offset=", place.offset, ", nbytes=", place.nbytes,
      ")\nlikely cause: ", cause,
      "\nfix: check the device, or name another directory; the key's contents are lost if it "
      "was a write");
}

void throw_store_error(const std::string& message, const ErrorPlace& place) {
  if (place.corruption) throw CorruptionError(message, place);
  throw StoreError(message, place);
}

}  // namespace memascend
