// A stand-in for libcuda, built and loaded by the tests of registration: keeps the live
// registrations, and fails where it is told to.
#include <cstddef>
#include <map>

namespace {
std::map<char*, std::size_t> live;
int register_count = 0;
int fail_register_at = 0;
bool fails_unregister = false;
int unregister_count = 0;
int fail_unregister_at = 0;
int depth = 0;
bool has_context = true;
std::size_t refused_from = 0;
bool is_busy = false;
int unregistered_busy_count = 0;
}  // namespace

extern "C" {
int cuMemHostRegister_v2(void* address, std::size_t nbytes, unsigned) {
  if (depth == 0) return 201;
  if (++register_count == fail_register_at) return 2;
  if (refused_from != 0 && nbytes >= refused_from) return 2;
  char* start = static_cast<char*>(address);
  for (const auto& [other, size] : live) {
    if (start < other + size && other < start + nbytes) return 712;
  }
  live[start] = nbytes;
  return 0;
}
int cuMemHostUnregister(void* address) {
  if (is_busy) ++unregistered_busy_count;
  if (fails_unregister || ++unregister_count == fail_unregister_at) return 700;
  return live.erase(static_cast<char*>(address)) == 1 ? 0 : 713;
}
int cuCtxGetCurrent(void** context) {
  *context = has_context ? &live : nullptr;
  return 0;
}
int cuCtxPushCurrent_v2(void*) { return ++depth, 0; }
int cuCtxPopCurrent_v2(void**) { return --depth, 0; }
int cuCtxSynchronize() {
  is_busy = false;
  return depth == 0 ? 201 : 0;
}
int cuGetErrorString(int code, const char** words) {
  *words = code == 2 ? "out of memory" : code == 700 ? "illegal address" : "?";
  return 0;
}

/// `fail_at` counts registrations from 1; 0 for none.
void fake_reset(int fail_at, int context) {
  live.clear();
  register_count = unregister_count = fail_unregister_at = 0;
  fails_unregister = false;
  refused_from = 0;
  is_busy = false;
  unregistered_busy_count = 0;
  fail_register_at = fail_at;
  has_context = context != 0;
}
void fake_give_context() { has_context = true; }
/// Single registrations of at least so many bytes fail; 0 for none.
void fake_refuse_from(std::size_t nbytes) { refused_from = nbytes; }
void fake_refuse_unregister(int refuses) { fails_unregister = refuses != 0; }
/// The next but `count` fails, once.
void fake_refuse_unregister_after(int count) { fail_unregister_at = unregister_count + count + 1; }
/// A copy is in flight until somebody waits for the device.
void fake_begin_copy() { is_busy = true; }
/// Registrations that ended while a copy was in flight.
int fake_unregistered_busy_count() { return unregistered_busy_count; }
int fake_depth() { return depth; }
int fake_live() { return static_cast<int>(live.size()); }
/// Where registration `index` begins and how large it is, lowest address first.
void fake_registration(int index, std::size_t* address, std::size_t* nbytes) {
  auto found = live.begin();
  for (; index > 0; --index) ++found;
  *address = reinterpret_cast<std::size_t>(found->first);
  *nbytes = found->second;
}
}
