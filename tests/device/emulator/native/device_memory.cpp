// The device's memory: cached by stream, and poisoned in stream order when it is freed.
#include <sys/mman.h>

#include <chrono>
#include <fstream>
#include <thread>

#include "sim.hpp"

namespace sim {

constexpr std::size_t kGranuleBytes = 512;
constexpr int kAnyStream = -1;
constexpr std::size_t kSegmentBytes = std::size_t{64} << 20;

std::int64_t allocated_bytes = 0, peak_bytes = 0;
std::int64_t reserved_bytes = 0;  // handed out at some time: the resident part of its mappings
std::int64_t recorded_bytes = 0, held_peak_bytes = 0;
std::int64_t limit_bytes = 0;                                     // 0: none
std::map<const char*, Block*> blocks;                             // by start; never deleted
std::map<int, std::multimap<std::size_t, Block*>> free_blocks;    // by stream, size
std::vector<std::pair<Block*, std::vector<MarkerPtr>>> recorded;  // freed, in use by other streams
char* segment = nullptr;
std::size_t segment_left = 0;

// -- the host's part of the process's resident memory ---------------------------------------------

bool host_peak_is_wanted = false;
std::int64_t host_peak_bytes = 0;

/// The most that was resident since the last call, the device's memory included.
std::int64_t take_resident_peak() {
  std::ifstream status("/proc/self/status");
  std::int64_t kib = 0;
  for (std::string word; status >> word && word != "VmHWM:";) {
  }
  status >> kib;
  std::ofstream("/proc/self/clear_refs") << 5;
  return kib << 10;
}

/// To be called before device memory becomes resident. It is never given back, so that since the
/// last call there was always as much of it as there is now.
void note_host_peak_locked() {
  host_peak_bytes = std::max(host_peak_bytes, take_resident_peak() - reserved_bytes);
}

std::int64_t take_host_peak() {
  const std::lock_guard lock(state_mutex);
  note_host_peak_locked();
  host_peak_is_wanted = true;
  return std::exchange(host_peak_bytes, 0);
}

// -- blocks ---------------------------------------------------------------------------------------

void put_free_locked(Block* block) {
  Stream& own = stream_of(block->stream);
  tick_locked(own);
  const char* end = block->data + block->size;
  check_locked(block->log, own, block->data, end, true, "the free of it", "device");
  if (poisons_and_sums) {
    own.push(Kind::plain, [block] { std::memset(block->data, kPoison, block->size); });
  }
  free_blocks[block->stream].emplace(block->size, block);
}

void free_device(void* context) {
  if (context == nullptr) return;
  auto* block = static_cast<Block*>(context);
  std::vector<MarkerPtr> markers;
  for (const int stream : block->uses) markers.push_back(record_marker(stream_of(stream)));
  const std::lock_guard lock(state_mutex);
  allocated_bytes -= static_cast<std::int64_t>(block->asked_bytes);
  block->uses.clear();
  if (markers.empty()) {
    put_free_locked(block);
  } else {
    recorded_bytes += static_cast<std::int64_t>(block->asked_bytes);
    recorded.emplace_back(block, std::move(markers));
  }
}

/// Frees what other streams have passed since it was freed.
void free_passed_locked() {
  std::erase_if(recorded, [](auto& entry) {
    for (auto& marker : entry.second) {
      if (!marker->query()) return false;
    }
    for (auto& marker : entry.second) merge(host_clock, marker->clock);
    recorded_bytes -= static_cast<std::int64_t>(entry.first->asked_bytes);
    put_free_locked(entry.first);
    return true;
  });
}

bool fits_locked(std::size_t size) {
  return limit_bytes == 0 ||
         allocated_bytes + recorded_bytes + static_cast<std::int64_t>(size) <= limit_bytes;
}

/// As CUDA's caching allocator before it gives up: waits for what other streams still use.
void wait_for_room(std::size_t size) {
  while (true) {
    {
      const std::lock_guard lock(state_mutex);
      free_passed_locked();
      if (fits_locked(size)) return;
      TORCH_CHECK_WITH(OutOfMemoryError, !recorded.empty(), "sim: out of device memory: ", size,
                       " bytes more than ", allocated_bytes, " of ", limit_bytes);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

Block* carve_locked(std::size_t size) {
  if (segment_left < size) {
    segment_left = std::max(size, kSegmentBytes);
    void* got =
        mmap(nullptr, segment_left, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(got != MAP_FAILED, "sim: out of device memory");
    segment = static_cast<char*>(got);
  }
  if (host_peak_is_wanted) note_host_peak_locked();
  auto* block = new Block{segment, size, size, static_cast<int>(current_id), {}, {}};
  blocks[segment] = block;
  segment += size;
  segment_left -= size;
  reserved_bytes += static_cast<std::int64_t>(size);
  std::memset(block->data, kPoison, size);
  if (host_peak_is_wanted) take_resident_peak();
  return block;
}

Block* take_free_locked(int stream, std::size_t size) {
  auto& pool = free_blocks[stream];
  const auto found = pool.lower_bound(size);
  if (found == pool.end() || found->first > size + size / 4 + 8 * kGranuleBytes) return nullptr;
  Block* block = found->second;
  pool.erase(found);
  return block;
}

Block* allocate_block(std::size_t nbytes) {
  use_runtime("an allocation");
  has_context = true;
  const std::size_t size = (nbytes + kGranuleBytes - 1) / kGranuleBytes * kGranuleBytes;
  wait_for_room(size);
  const std::lock_guard lock(state_mutex);
  free_passed_locked();
  Block* block = take_free_locked(static_cast<int>(current_id), size);
  if (block == nullptr) block = take_free_locked(kAnyStream, size);
  if (block == nullptr) block = carve_locked(size);
  block->stream = static_cast<int>(current_id);
  block->asked_bytes = size;
  allocated_bytes += static_cast<std::int64_t>(size);
  peak_bytes = std::max(peak_bytes, allocated_bytes);
  held_peak_bytes = std::max(held_peak_bytes, allocated_bytes + recorded_bytes);
  return block;
}

Block* block_of_locked(const void* address) {
  const auto after = blocks.upper_bound(static_cast<const char*>(address));
  if (after == blocks.begin()) return nullptr;
  Block* block = std::prev(after)->second;
  return static_cast<const char*>(address) < block->data + block->size ? block : nullptr;
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(std::size_t nbytes) override {
    const c10::Device device = own();
    if (nbytes == 0) return {nullptr, nullptr, &free_device, device};
    Block* block = allocate_block(nbytes);
    return {block->data, block, &free_device, device};
  }
  void copy_data(void* target, const void* source, std::size_t count) const override {
    current().push(Kind::kernel, [=] { std::memcpy(target, source, count); });
  }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    auto* block = static_cast<Block*>(pointer.get_context());
    if (block == nullptr) return;
    const std::lock_guard lock(state_mutex);
    if (stream.id() != block->stream) block->uses.insert(static_cast<int>(stream.id()));
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
};

c10::DeviceAllocator& device_memory() {
  static DeviceMemory memory;
  return memory;
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  device_memory().recordStream(self.storage().data_ptr(), stream);
}

void share_free_blocks() {
  const std::lock_guard lock(state_mutex);
  for (auto& [stream, pool] : free_blocks) {
    if (stream != kAnyStream) free_blocks[kAnyStream].merge(pool);
  }
}

void reset_peak() {
  const std::lock_guard lock(state_mutex);
  peak_bytes = allocated_bytes;
  held_peak_bytes = allocated_bytes + recorded_bytes;
}

void set_limit(std::int64_t nbytes) {
  const std::lock_guard lock(state_mutex);
  limit_bytes = nbytes;
}

std::map<std::string, std::int64_t> memory_stats() {
  const std::lock_guard lock(state_mutex);
  return {{"allocated", allocated_bytes},
          {"peak", peak_bytes},
          {"held_peak", held_peak_bytes},
          {"reserved", reserved_bytes}};
}

}  // namespace sim

REGISTER_ALLOCATOR(sim::kSim, &sim::device_memory())
