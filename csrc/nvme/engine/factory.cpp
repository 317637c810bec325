#include "nvme/engine/factory.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "base/align.hpp"
#include "base/check.hpp"
#include "nvme/engine/aio.hpp"
#include "nvme/engine/errors.hpp"
#include "nvme/engine/memory.hpp"
#include "nvme/engine/threads.hpp"
#include "nvme/engine/uring.hpp"

namespace memascend {
namespace {

constexpr std::uint64_t kProbeBytesMin = 8192;
constexpr std::chrono::seconds kProbePatience{10};  // per reap(); the probe has no time limit

std::unique_ptr<Engine> construct(const std::string& name, const EngineOptions& options,
                                  const Volume& volume) {
  if (name == "uring") return std::make_unique<UringEngine>(options, volume);
  if (name == "libaio") return std::make_unique<AioEngine>(options, volume);
  return std::make_unique<ThreadsEngine>(options, volume);
}

// Runs one request to its end on an idle engine; throws SystemCallError unless all bytes moved.
void run_one(Engine& engine, const Request& request, const char* what) {
  engine.submit({&request, 1});
  Completion completion{};
  while (engine.reap({&completion, 1}, kProbePatience) == 0) {
  }
  if (completion.result == static_cast<std::int64_t>(request.nbytes)) return;
  throw SystemCallError(completion.result < 0 ? static_cast<int>(-completion.result) : EIO, what);
}

// Writes, reads back and compares with a temporary engine: an engine is bound to the thread that
// started it, and the caller's thread is not the future issuer.
void probe(const std::string& name, const EngineOptions& options, const VolumeOptions& place) {
  const Volume volume = open_volume(place);
  const auto [block_bytes, memory_bytes] = volume.alignment();
  const std::uint64_t nbytes = std::max({kProbeBytesMin, block_bytes, memory_bytes});
  const std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(nbytes, 2 * nbytes),
                                                           &std::free);
  if (memory == nullptr) throw std::bad_alloc();
  auto* source = static_cast<std::byte*>(memory.get());
  std::byte* target = source + nbytes;
  std::memset(source, 0x5a, nbytes);
  std::memset(target, 0, nbytes);
  const std::unique_ptr<Engine> engine = construct(name, options, volume);
  engine->start();
  const std::uint64_t offset = volume.start_bytes();
  run_one(*engine, {Operation::kWrite, offset, nbytes, source, 1}, "write a probe block");
  run_one(*engine, {Operation::kRead, offset, nbytes, target, 2}, "read a probe block");
  if (std::memcmp(source, target, nbytes) != 0) {
    throw SystemCallError(EIO, "read a probe block: it is not what was written");
  }
}

const char* cause_and_fix(const std::string& name, int code) {
  if (name == "uring" && (code == EPERM || code == EACCES)) {
    return "likely cause: a container's seccomp profile or kernel.io_uring_disabled blocks "
           "io_uring\n"
           "fix: --security-opt seccomp=unconfined or sysctl kernel.io_uring_disabled=0, or engine "
           "\"threads\" (or \"auto\")";
  }
  if (name == "uring" && code == ENOSYS) {
    return "likely cause: no io_uring here (gVisor, or Linux before 5.11)\n"
           "fix: engine \"threads\" (or \"auto\")";
  }
  if (name == "uring" && code == ENOMEM) {
    return "likely cause: RLIMIT_MEMLOCK is used up by other rings (Linux before 5.12)\n"
           "fix: ulimit -l unlimited, or a smaller queue_depth, or engine \"threads\"";
  }
  if (name == "libaio" && code == EAGAIN) {
    return "likely cause: fs.aio-max-nr is used up by others\n"
           "fix: sysctl fs.aio-max-nr=1048576, or a smaller queue_depth, or engine \"threads\"";
  }
  if (name == "libaio" && (code == EPERM || code == ENOSYS || code == EINVAL)) {
    return "likely cause: a seccomp profile, or Linux before 4.18\n"
           "fix: engine \"threads\" (or \"auto\")";
  }
  return "likely cause: the directory's file system refuses this way of I/O\n"
         "fix: another directory on a local disk, or another engine";
}

// Returns in one phrase why an engine was skipped; the full advice is for engines asked for by
// name.
std::string short_cause(const std::string& name, const SystemCallError& error) {
  std::string text = error.what();
  if (name == "uring" && error.code() == EPERM) {
    text += " (seccomp or kernel.io_uring_disabled)";
  }
  return text;
}

}  // namespace

EngineChoice make_engine(const std::string& name, const EngineOptions& options,
                         const VolumeOptions& place, const Volume& volume) {
  MA_EXPECT(options.queue_depth > 0, "queue_depth must be positive, got ", options.queue_depth);
  MA_EXPECT(options.queue_depth <= kQueueDepthMax, "queue_depth must be at most ", kQueueDepthMax,
            ", got ", options.queue_depth);
  if (name == "memory") {
    MA_EXPECT(options.faults != nullptr, "engine \"memory\" is for tests and needs faults");
    return {std::make_unique<MemoryEngine>(options, volume), "asked for"};
  }
  if (name == "uring" || name == "libaio" || name == "threads") {
    try {
      probe(name, options, place);
      return {construct(name, options, volume), "asked for"};
    } catch (const SystemCallError& error) {
      throw EngineUnavailableError(join("engine \"", name, "\" cannot run in ", place.path,
                                        " (queue_depth=", options.queue_depth, "): ", error.what(),
                                        "\n", cause_and_fix(name, error.code())),
                                   error.code());
    }
  }
  MA_EXPECT(name == "auto", "engine must be auto, uring, libaio, threads or memory, got \"", name,
            "\"");
  std::string passed_over;
  int code = 0;
  for (const std::string candidate : {"uring", "libaio", "threads"}) {
    if (candidate == "libaio" && !volume.direct()) continue;  // libaio would block in submit()
    try {
      probe(candidate, options, place);
      return {construct(candidate, options, volume),
              passed_over.empty() ? "first choice" : passed_over};
    } catch (const SystemCallError& error) {
      passed_over += join(passed_over.empty() ? "" : "; ", short_cause(candidate, error));
      code = error.code();
    }
  }
  throw EngineUnavailableError(join("no engine can run in ", place.path, ": ", passed_over, "\n",
                                    cause_and_fix("threads", code)),
                               code);
}

}  // namespace memascend
