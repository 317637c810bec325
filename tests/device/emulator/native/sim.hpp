// "sim": an emulated accelerator for PyTorch (PrivateUse1) in host memory.
//
// It keeps CUDA's rules of order, so that code which breaks them gives wrong numbers or is
// reported:
//  - a stream is a worker thread; copies and kernels run there later, in order, after random
//  delays;
//  - async copies read and write raw host memory at that later moment; pageable ones block as
//  CUDA's
//  - device memory comes from a stream-ordered caching allocator and is poisoned when it is freed;
//  - a thread has a current device, at first device 0, and the process one device to work on;
//  - a vector clock per stream finds uses of memory that no event orders, whatever the timing was;
//  - host memory changed under a pending copy is found by checksums.
//
// Names ending in _locked want `state_mutex` held. `site` must be called without it.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <torch/extension.h>

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "devices.hpp"

namespace sim {

constexpr int kStreamsMax = 32;
constexpr int kPoison = 0xff;  // a NaN in every floating-point format

using Clock = std::array<std::uint64_t, kStreamsMax>;  // by stream: what has happened before

inline std::mutex state_mutex;  // guards everything but the streams' queues
inline Clock host_clock{};      // what the host has waited for
void merge(Clock& into, const Clock& other);

// -- reports.cpp: what is told at the end of a run ----------------------------------------------

struct Wait {
  std::uint64_t count = 0;
  std::uint64_t nanoseconds = 0;
};
std::uint64_t now_ns();
/// Where in Python we are: the innermost frames outside of torch and of the emulator.
std::string site();
void note_wait(const std::string& why, const std::string& where, std::uint64_t nanoseconds);
void find_locked(const std::string& text);

// -- streams.cpp --------------------------------------------------------------------------------

/// One recording of an event.
struct Marker {
  void set();
  void wait();
  bool query();

  Clock clock{};
  std::uint64_t time = 0;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_done_ = false;
};
using MarkerPtr = std::shared_ptr<Marker>;

enum class Kind { plain, copy, kernel };

/// A stream: work runs in order, on a thread that never ends.
class Stream {
 public:
  explicit Stream(int id);
  void push(Kind kind, std::function<void()> run);
  void seed(std::uint64_t value);
  bool is_idle();

  const int id;
  Clock clock{};

 private:
  using Task = std::pair<Kind, std::function<void()>>;
  void work();
  Task next();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> queue_;
  bool is_busy_ = false;
  std::mt19937_64 random_;
};

/// Random delays of at most so many microseconds, before every second copy or kernel.
inline std::atomic<std::int64_t> copy_delay_us{0}, kernel_delay_us{0};
/// What is queued may hold its tensors; with this, no more memory is held than a GPU would hold.
inline std::atomic<bool> launches_block{false};
inline thread_local std::int64_t current_id = 0;

Stream& stream_of(std::int64_t id);
Stream& current();
std::vector<Stream*> all_streams();
std::int64_t new_stream();

/// Begins an operation: the stream's clock ticks and takes over what the host knows.
void tick_locked(Stream& on);
MarkerPtr record_marker(Stream& on);
/// The host now knows what had happened before the marker.
void learn(const MarkerPtr& marker);
void wait_without_gil(const MarkerPtr& marker);
/// Blocks the host, and notes what that costs under the caller's place.
void host_wait(const MarkerPtr& marker, const char* why);
void synchronize(Stream& on, const char* why);
void synchronize_all(const char* why);

// -- detectors.cpp ------------------------------------------------------------------------------

/// A use of memory by a stream.
struct Access {
  const char* begin;
  const char* end;
  int stream;
  std::uint64_t clock;
  bool is_write;
  std::string what;
};
using AccessLog = std::vector<Access>;

/// Reports earlier uses of the same bytes that nothing orders before this one, and remembers it.
void check_locked(AccessLog& log, const Stream& on, const char* begin, const char* end,
                  bool is_write, const std::string& what, const char* place);
inline AccessLog host_log;  // what asynchronous copies do with host memory
/// Poisons what is used again, sums what is copied, holds what is queued; clocks always tick.
inline std::atomic<bool> poisons_and_sums{true};
/// Reports copies that the host has not waited for, when it is about to use the same bytes.
void use_on_host(std::uintptr_t address, std::size_t nbytes, bool is_write,
                 const std::string& what);
bool overlaps_pending_locked(const char* begin, const char* end, bool only_writes);
std::uint64_t checksum(const void* data, std::size_t nbytes);

// -- device_memory.cpp --------------------------------------------------------------------------

struct Block {
  char* data;
  std::size_t size, asked_bytes;  // by whoever has it, who may be given a larger one
  int stream;
  std::set<int> uses;  // other streams, by record_stream
  AccessLog log;
};
Block* block_of_locked(const void* address);
c10::DeviceAllocator& device_memory();
void record_stream(at::Tensor& self, c10::Stream stream);
void reset_peak();
void set_limit(std::int64_t nbytes);
/// Has any stream use what is free; when the host has waited for all of them.
void share_free_blocks();
std::map<std::string, std::int64_t> memory_stats();
std::int64_t take_host_peak();  // since the last call: what was resident but for the device's

// -- host_memory.cpp ----------------------------------------------------------------------------

bool is_pinned_locked(const void* address, std::size_t nbytes);
/// A copy has to lie within one registration: CUDA refuses one that spans two.
bool spans_registrations_locked(const char* begin, std::size_t nbytes);
/// torch's page-locked memory is not reused while a stream that copied from it has work before.
void use_pinned_locked(const void* address, int stream);
at::Allocator* pinned_memory();
int register_host(void* address, std::size_t nbytes);
int unregister_host(void* address);

// -- copies.cpp, tensors.cpp --------------------------------------------------------------------

struct Use {
  const char* begin;
  const char* end;
  bool is_write;
};
bool is_sim(const at::Tensor& tensor);
Use use_of(const at::Tensor& tensor, bool is_write);
/// The same memory as a CPU tensor that owns nothing.
at::Tensor alias_of(const at::Tensor& tensor);
/// Runs something on the current stream, later.
void launch(const std::string& name, const std::vector<Use>& uses, std::function<void()> run);
/// A kernel that takes so long and does nothing.
void sleep_on_stream(double seconds);
void copy_between(const at::Tensor& target, const at::Tensor& source, bool non_blocking);
void resize_storage(c10::StorageImpl* storage, std::size_t nbytes);
/// Whether a blocking copy from page-locked memory keeps the host, as CUDA's does.
inline std::atomic<bool> pinned_copies_block{true};

}  // namespace sim
