// The one check of these test programs: prints what failed and ends with 1. And whether they run in
// an emulator of another machine (scripts/test_cpp.py --arch), which lacks some calls of the
// kernel.
#pragma once

#include <cstdio>
#include <cstdlib>

#define EXPECT(condition)                                                          \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                \
    }                                                                              \
  } while (false)

inline bool is_emulated() { return std::getenv("MEMASCEND_TEST_EMULATED") != nullptr; }
