// A hook in the way of this program's system calls, for calls that fail as those of a kernel
// without memory or under a filter do. It defines syscall(), through which the engines make theirs,
// so one file of a program may include it.
#pragma once

#include <dlfcn.h>

#include <array>
#include <cerrno>
#include <cstdarg>
#include <functional>
#include <optional>

namespace memascend {

using CallArguments = std::array<long, 6>;

/// Given the call's number and arguments: what it is to return, or -errno; nothing: the kernel's
/// own. Set while no other thread makes calls.
inline std::function<std::optional<long>(long, const CallArguments&)> call_hook;

inline long call_kernel(long number, const CallArguments& a) {
  static const auto real = reinterpret_cast<long (*)(long, ...)>(::dlsym(RTLD_NEXT, "syscall"));
  return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

}  // namespace memascend

// Takes as many arguments as a call can have, passed or not, as the C library's own does.
extern "C" __attribute__((no_sanitize_address)) long syscall(long number, ...) noexcept {
  memascend::CallArguments arguments;
  va_list rest;
  va_start(rest, number);
  for (long& argument : arguments) argument = va_arg(rest, long);
  va_end(rest);
  std::optional<long> result;
  if (memascend::call_hook) result = memascend::call_hook(number, arguments);
  if (!result) return memascend::call_kernel(number, arguments);
  if (*result >= 0) return *result;
  errno = static_cast<int>(-*result);
  return -1;
}
