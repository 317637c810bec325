#include "tally.hpp"

#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "base/check.hpp"

// In every sanitizer's run-time library, and in no plain program.
extern "C" __attribute__((weak)) void __sanitizer_set_death_callback(void (*callback)());

namespace memascend::soak {
namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr const char* kSanitizer = "address";
#elif defined(__SANITIZE_THREAD__)
constexpr const char* kSanitizer = "thread";
#else
constexpr const char* kSanitizer = "plain";
#endif

char repeat[256] = "soak: before the first round\n";  // read in signal handlers

thread_local std::size_t current_worker = 0;
thread_local std::uint64_t current_operation = 0;
thread_local const char* current_name = "start";

void say_how_to_repeat() { (void)!::write(STDERR_FILENO, repeat, std::strlen(repeat)); }

void on_abort(int) {
  say_how_to_repeat();
  ::_exit(1);
}

}  // namespace

void begin_round(std::uint64_t seed, const std::string& engine) {
  std::snprintf(repeat, sizeof(repeat),
                "repeat: make soak SOAK_ARGS='--san %s --engine %s --seed %llu --rounds 1'\n",
                kSanitizer, engine.c_str(), static_cast<unsigned long long>(seed));
}

void begin_operation(std::size_t worker, std::uint64_t operation, const char* name) {
  current_worker = worker;
  current_operation = operation;
  current_name = name;
}

void fail(const std::string& what) {
  std::fflush(stdout);
  std::fprintf(stderr, "soak failed in thread %zu, operation %llu (%s): %s\n", current_worker,
               static_cast<unsigned long long>(current_operation), current_name, what.c_str());
  say_how_to_repeat();
  std::_Exit(1);
}

void install_reports() {
  if (__sanitizer_set_death_callback != nullptr) __sanitizer_set_death_callback(say_how_to_repeat);
  ::signal(SIGABRT, on_abort);
}

}  // namespace memascend::soak
