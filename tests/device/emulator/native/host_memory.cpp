// Page-locked host memory: torch's own, and what is registered; the latter through libcuda, too.
#include <ATen/core/CachingHostAllocator.h>
#include <sys/mman.h>

#include "sim.hpp"

namespace sim {

constexpr std::size_t kPageBytes = 4096;
constexpr int kAlreadyRegistered = 712, kNotRegistered = 713;  // CUDA's

std::map<const char*, std::size_t> pinned;  // by start

bool is_pinned_locked(const void* address, std::size_t nbytes) {
  const char* begin = static_cast<const char*>(address);
  const char* end = begin + nbytes;
  do {  // ranges that touch serve as one
    const auto after = pinned.upper_bound(begin);
    if (after == pinned.begin()) return false;
    const auto& [start, size] = *std::prev(after);
    if (begin >= start + size) return false;
    begin = start + size;
  } while (begin < end);
  return true;
}

bool spans_registrations_locked(const char* begin, std::size_t nbytes) {
  const auto& [start, size] = *std::prev(pinned.upper_bound(begin));
  return begin + nbytes > start + size;
}

int register_host(void* address, std::size_t nbytes) {
  const std::lock_guard lock(state_mutex);
  const char* begin = static_cast<const char*>(address);
  const auto after = pinned.lower_bound(begin + nbytes);
  if (after != pinned.begin()) {
    const auto& [start, size] = *std::prev(after);
    if (begin < start + size) return kAlreadyRegistered;
  }
  pinned[begin] = nbytes;
  return 0;
}

int unregister_host(void* address) {
  const std::lock_guard lock(state_mutex);
  const auto found = pinned.find(static_cast<const char*>(address));
  if (found == pinned.end()) return kNotRegistered;
  if (overlaps_pending_locked(found->first, found->first + found->second, false)) {
    find_locked("host memory unregistered while copies of it are pending");
  }
  pinned.erase(found);
  return 0;
}

// -- torch's ------------------------------------------------------------------------------------

struct HostBlock {
  char* data;
  std::size_t size;
  std::set<int> uses;
};
std::map<const char*, HostBlock*> host_blocks;  // by start; never deleted
std::multimap<std::size_t, HostBlock*> host_free;
std::vector<std::pair<HostBlock*, std::vector<MarkerPtr>>> host_in_use;

void free_pinned(void* context) {
  if (context == nullptr) return;
  auto* block = static_cast<HostBlock*>(context);
  std::vector<MarkerPtr> markers;
  for (const int stream : block->uses) markers.push_back(record_marker(stream_of(stream)));
  const std::lock_guard lock(state_mutex);
  block->uses.clear();
  host_in_use.emplace_back(block, std::move(markers));
}

HostBlock* new_host_block_locked(std::size_t size) {
  void* got = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(got != MAP_FAILED, "sim: out of host memory");
  auto* block = new HostBlock{static_cast<char*>(got), size, {}};
  std::memset(block->data, kPoison, size);
  host_blocks[block->data] = block;
  pinned[block->data] = size;
  return block;
}

HostBlock* host_block_of_locked(const void* address) {
  const auto after = host_blocks.upper_bound(static_cast<const char*>(address));
  if (after == host_blocks.begin()) return nullptr;
  HostBlock* block = std::prev(after)->second;
  return static_cast<const char*>(address) < block->data + block->size ? block : nullptr;
}

void use_pinned_locked(const void* address, int stream) {
  if (HostBlock* block = host_block_of_locked(address)) block->uses.insert(stream);
}

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(std::size_t nbytes) override {
    const std::size_t size = std::bit_ceil(std::max(nbytes, kPageBytes));  // as torch's
    const std::lock_guard lock(state_mutex);
    std::erase_if(host_in_use, [](auto& entry) {
      for (auto& marker : entry.second) {
        if (!marker->query()) return false;
      }
      for (auto& marker : entry.second) merge(host_clock, marker->clock);
      if (poisons_and_sums) std::memset(entry.first->data, kPoison, entry.first->size);
      host_free.emplace(entry.first->size, entry.first);
      return true;
    });
    HostBlock* block = nullptr;
    if (const auto found = host_free.find(size); found != host_free.end()) {
      block = found->second;
      host_free.erase(found);
    } else {
      block = new_host_block_locked(size);
    }
    return {block->data, block, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  bool record_event(void* address, void*, c10::Stream stream) override {
    const std::lock_guard lock(state_mutex);
    use_pinned_locked(address, static_cast<int>(stream.id()));
    return host_block_of_locked(address) != nullptr;
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source, std::size_t count) const override {
    std::memcpy(target, source, count);
  }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

PinnedMemory& pinned_allocator() {
  static PinnedMemory memory;
  return memory;
}

at::Allocator* pinned_memory() { return &pinned_allocator(); }

}  // namespace sim

// -- what memascend asks libcuda.so.1, which is this library's SONAME -----------------------------

extern "C" {
int cuCtxGetCurrent(void** context) {
  *context = sim::has_context ? &sim::state_mutex : nullptr;
  return 0;
}
int cuCtxPushCurrent_v2(void*) { return 0; }
int cuCtxPopCurrent_v2(void** context) {
  *context = &sim::state_mutex;
  return 0;
}
int cuCtxSynchronize() {
  sim::synchronize_all("cuCtxSynchronize");
  return 0;
}
int cuGetErrorString(int code, const char** text) {
  *text = code == sim::kAlreadyRegistered ? "already registered" : "not registered";
  return 0;
}
int cuMemHostRegister_v2(void* address, std::size_t nbytes, unsigned) {
  return sim::register_host(address, nbytes);
}
int cuMemHostUnregister(void* address) { return sim::unregister_host(address); }
}
