// The three checks of this code base, and no others.
//
//   MA_EXPECT     the caller's mistake   -> std::invalid_argument (ValueError in Python)
//   MA_SYSCALL    the system's error     -> SystemCallError with errno (OSError in Python)
//   MA_INVARIANT  our own mistake        -> message on stderr, then abort
//
// Every macro takes the parts of a message, which are formatted only on failure. MA_INVARIANT_SLOW
// is compiled in debug builds only (NDEBUG not defined).
#pragma once

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

namespace memascend {

/// An operating-system call failed. `code()` is the errno value it left.
class SystemCallError : public std::runtime_error {
 public:
  SystemCallError(int code, const std::string& what_failed)
      : std::runtime_error(what_failed + ": " + std::strerror(code)), code_(code) {}
  int code() const noexcept { return code_; }

 private:
  int code_;
};

/// Joins the parts of a message with no separator.
template <typename... Parts>
std::string join(Parts&&... parts) {
  std::ostringstream out;
  (out << ... << std::forward<Parts>(parts));
  return out.str();
}

[[noreturn]] inline void fail_invariant(const char* condition, const char* file, int line) {
  std::fprintf(stderr, "memascend: broken invariant %s at %s:%d\n", condition, file, line);
  std::abort();
}

}  // namespace memascend

#define MA_EXPECT(condition, ...)                                  \
  do {                                                             \
    if (!(condition)) {                                            \
      throw std::invalid_argument(::memascend::join(__VA_ARGS__)); \
    }                                                              \
  } while (false)

/// Evaluates to the call's non-negative result as long; throws SystemCallError on -1.
#define MA_SYSCALL(call, ...)                                                       \
  ([&]() -> long {                                                                  \
    const auto ma_result = (call);                                                  \
    if (ma_result < 0) {                                                            \
      const int ma_errno = errno;                                                   \
      throw ::memascend::SystemCallError(ma_errno, ::memascend::join(__VA_ARGS__)); \
    }                                                                               \
    return static_cast<long>(ma_result);                                            \
  }())

#define MA_INVARIANT(condition)                                    \
  do {                                                             \
    if (!(condition)) {                                            \
      ::memascend::fail_invariant(#condition, __FILE__, __LINE__); \
    }                                                              \
  } while (false)

#ifdef NDEBUG
#define MA_INVARIANT_SLOW(condition) \
  do {                               \
  } while (false)
#else
#define MA_INVARIANT_SLOW(condition) MA_INVARIANT(condition)
#endif
