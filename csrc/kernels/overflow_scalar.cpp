// The overflow check in plain C++: the reference the vector kernels are tested against, and the
// kernel of CPUs that have neither AVX2 nor AVX-512.
#include "kernels/overflow_block.hpp"

namespace memascend::overflow {
namespace {

template <typename F>
bool find(const std::byte* source, std::size_t numel) {
  return finish_find<F>(false, source, 0, numel);
}

template <typename F>
double sum(const std::byte* source, std::size_t numel) {
  std::array<double, kLanes> lanes{};
  return finish_sum<F>(lanes, source, 0, numel);
}

}  // namespace

Kernels scalar_kernels(Format format) {
  switch (format) {
    case Format::kFloat16:
      return {find<Float16>, sum<Float16>};
    case Format::kBfloat16:
      return {find<Bfloat16>, sum<Bfloat16>};
    case Format::kFloat32:
      break;
  }
  return {find<Float32>, sum<Float32>};
}

}  // namespace memascend::overflow
