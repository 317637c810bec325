// The overflow check in plain C++: the reference for tests of the vector kernels, and the kernel of
// CPUs that have neither AVX2 nor AVX-512.
#include "kernels/overflow_block.hpp"

namespace memascend::overflow {
namespace {

struct ScalarKernels {
  template <typename F>
  static bool find(const std::byte* source, std::size_t numel) {
    return finish_find<F>(false, source, 0, numel);
  }

  template <typename F>
  static double sum(const std::byte* source, std::size_t numel) {
    std::array<double, kLanes> lanes{};
    return finish_sum<F>(lanes, source, 0, numel);
  }
};

}  // namespace

Kernels scalar_kernels(Format format) { return choose_kernels<ScalarKernels>(format); }

}  // namespace memascend::overflow
