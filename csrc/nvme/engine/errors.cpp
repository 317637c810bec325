#include "nvme/engine/errors.hpp"

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

struct Cause {
  int code;
  const char* cause;
  const char* fix;
};

constexpr Cause kCauses[] = {
    {0, "the file is shorter than it was made: something truncated it",
     "find out what works in the volume's directory, or name another one"},
    {EIO, "the drive failed or was pulled out, or its file system has shut down; dmesg shows which",
     "check the drive (dmesg, smartctl -a), or name another one"},
    {ENODEV, "the drive is gone: unplugged, detached, or reset by its controller",
     "bring it back (dmesg, lsblk), or name another one"},
    {ENXIO, "the drive is gone: unplugged, detached, or reset by its controller",
     "bring it back (dmesg, lsblk), or name another one"},
    {EROFS, "the file system is read-only; Linux makes it so after an error of the drive",
     "check the drive (dmesg, fsck) and mount it read-write again, or name another one"},
    {ENOSPC, "the file system is full though the space was reserved",
     "free space there: a pool, a thin volume or a snapshot below it is full"},
    {EFBIG, "the process may not write files of that size any more (RLIMIT_FSIZE)",
     "ulimit -f unlimited"},
    {EDQUOT, "the user's quota is used up", "have it raised, or name another drive"},
    {ESTALE, "a network file system lost its server", "name a directory on a local drive"},
    {ETIMEDOUT, "the drive, or the network below it, did not answer in time",
     "check it (dmesg, smartctl -a), or name another one"},
    {ENOMEM, "the kernel is short of memory, or the memory limit of the container is reached",
     "give the container more memory, or the machine fewer other programs"},
    {EAGAIN, "the kernel took no request for too long, for want of memory or of room in its queue",
     "look at the machine's free memory and at dmesg"},
    {EBADR, "the kernel was short of memory and dropped the answers to requests of io_uring",
     "give the container more memory, or choose engine \"threads\""},
    {EFAULT, "the memory of the transfer was unmapped before it ended", "report this as a bug"},
};

}  // namespace

std::string describe_cause(int code) {
  Cause found{code, "the device or its file system failed", "see dmesg, or name another drive"};
  for (const Cause& known : kCauses) {
    if (known.code == code) found = known;
  }
  return join("\nlikely cause: ", found.cause, "\nfix: ", found.fix);
}

std::string describe(Operation operation, const ErrorPlace& place, const std::string& recovery) {
  if (place.corruption) return describe_corruption(operation, place, recovery);
  const bool reads = operation == Operation::kRead;
  return join("cannot ", reads ? "read" : "write", " \"", place.key, "\" in ", place.volume, ": ",
              place.code == 0 ? "the device ended early" : std::strerror(place.code),
              " (errno=", place.code, ", offset=", place.offset, ", nbytes=", place.nbytes, ")",
              reads ? "" : "; what the key held is lost", describe_cause(place.code), "; ",
              recovery);
}

void throw_store_error(const std::string& message, const ErrorPlace& place) {
  if (place.corruption) throw CorruptionError(message, place);
  throw StoreError(message, place);
}

}  // namespace memascend
