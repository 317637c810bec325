// The fused Adam step: one pass over a tile that widens gradients, multiplies them, moves moments
// and weights, and rounds the new weights to the parameters' 16-bit format. No temporary, whatever
// the size; 28 bytes of memory traffic for an element with a 16-bit gradient and parameter, 20
// where the moments are bf16.
//
// The arithmetic is that of DeepSpeedCPUAdam (deepspeed/ops/csrc/adam and includes/cpu_adam.h of
// DeepSpeed 0.19.8), operation by operation, each rounded as there: fused where it is fused.
// Moments in bf16 are widened first and rounded last: the weight is stepped with what they were
// before.
//
// They are rounded stochastically: up with the probability of what lies below the last place, so
// that the mean is exact. To nearest, a second moment would stand still wherever a step changes it
// by less than half of its last place, 1/512 of it; Adam's usual change is 1/1000.
//
// Knows addresses, counts and number formats; must never know tensors, optimizers or steps. Every
// function here may be called from any thread; the caller keeps the memory alive and to itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "kernels/format.hpp"
#include "kernels/isa.hpp"
#include "kernels/threads.hpp"

namespace memascend::adam {

using kernels::Format;
using kernels::Isa;

/// Numbers of one step, the same for every element.
struct Coefficients {
  float factor = 1.0f;  // of gradients, first of all; the product is rounded
  float beta1 = 0.0f;
  float beta2 = 0.0f;
  float take1 = 0.0f;  // 1 - beta1
  float take2 = 0.0f;  // 1 - beta2
  float root_scale = 1.0f;
  float epsilon = 0.0f;
  float step_size = 0.0f;  // negative
  /// Adam: the gradient grows by so much of the weight. Zero is not the same as none: times an
  /// infinite weight it is NaN.
  std::optional<float> gradient_decay;
  /// AdamW: the weight grows by so much of itself; negative.
  std::optional<float> weight_decay;
};

/// The memory of one tile; no address needs any alignment, and no two parts may overlap.
struct Operands {
  const void* gradient = nullptr;
  Format gradient_format = Format::kFloat32;
  void* weight = nullptr;   // fp32
  void* exp_avg = nullptr;  // in moment_format, as the next
  void* exp_avg_sq = nullptr;
  Format moment_format = Format::kFloat32;  // or bf16
  void* output = nullptr;                   // new weights in output_format; unused without one
  std::optional<Format> output_format;
  std::size_t numel = 0;
};

struct Options {
  /// The last so many elements are computed as g++ compiles DeepSpeed's loop over what no vector
  /// holds: in the two moments it fuses the other one of the two products.
  std::size_t tail_numel = 0;
  /// 0: the CPUs this thread may run on. Never more than blocks of kBlockNumel.
  std::size_t threads = 0;
  /// Threads kept between calls; null: they are started for this call and joined.
  kernels::Helpers* helpers = nullptr;
  /// Of moments in bf16: another number for each step and sub-group gives other random bits.
  std::uint64_t rounding_key = 0;
  /// Of the same: the tile's first element, counted in its sub-group. An element's bits depend on
  /// the key and its own number alone, which repeat after 2^32 elements.
  std::uint64_t first_index = 0;
};

/// What threads take at once.
inline constexpr std::size_t kBlockNumel = std::size_t{1} << 15;

/// Steps every element once, in place. Equal bits for every thread count, instruction set and
/// alignment, but for the payload of NaNs; with moments in bf16 also however a sub-group is cut
/// into tiles, tails apart. Denormals are flushed if the calling thread flushes them.
///
/// `isa` must be one of kernels::available_isas(). Throws std::invalid_argument on a caller's
/// mistake; then nothing has changed.
void update(const Operands& operands, const Coefficients& coefficients, Isa isa,
            const Options& options);

}  // namespace memascend::adam
