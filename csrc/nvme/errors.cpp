#include "nvme/errors.hpp"

#include <cerrno>
#include <cstring>

#include "base/check.hpp"

namespace memascend {

std::string describe(Operation operation, const ErrorPlace& place) {
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

}  // namespace memascend
