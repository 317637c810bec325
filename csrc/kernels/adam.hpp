// The fused Adam step: one pass over a tile that widens gradients, multiplies them, updates moments
// and weights, and rounds the new weights to the parameters' 16-bit format. No temporary of any
// size; 28 bytes of memory traffic per element with a 16-bit gradient and parameter, 20 with bf16
// moments.
//
// The arithmetic is that of DeepSpeedCPUAdam (deepspeed/ops/csrc/adam and includes/cpu_adam.h of
// DeepSpeed 0.19.8), operation by operation, each rounded as there, and fused where it is fused
// there. Moments in bf16 are widened first and rounded last: the weight is stepped with the
// unrounded ones.
//
// They are rounded stochastically: up with the probability given by the bits cut off, so that the
// mean is exact. With rounding to nearest, a second moment would not change in a step that changes
// it by less than half of its last place, 1/512 of it; Adam's usual change is 1/1000.
//
// Moments in codes (codes.hpp) take one byte each, and are rounded last, too. They have no loop
// over a remainder: no step of DeepSpeed's has to be equalled.
//
// A weight may be split: its low 16 bits lie where the whole ones would, and the output, the weight
// rounded to bf16, stands for the others (halves.hpp). The step gives the bits of the whole
// weight's in 26 bytes of memory traffic. With second moments in codes, which have no sign for the
// flag, a tie above an odd half moves by the last place of fp32. Weights of 24 bits have a
// remainder of 8 bits there instead (remainders.hpp).
//
// Knows addresses, counts and number formats; must never know tensors, optimizers or steps. Any
// thread may call every function here; the caller keeps the memory alive and lets no other thread
// use it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "kernels/format.hpp"
#include "kernels/isa.hpp"
#include "kernels/rounding.hpp"
#include "kernels/threads.hpp"

namespace memascend::adam {

using kernels::Format;
using kernels::Isa;

/// What lies where the weight is.
enum class Weights {
  kWhole,       // fp32
  kHalves,      // the low 16 bits; the output has the others (halves.hpp)
  kRemainders,  // 8 bits; the output has the others (remainders.hpp)
};

/// Formats of both moments.
enum class Moments {
  kFloat32,
  kBfloat16,
  kCodes,         // with two scales side by side: of first moments, of second ones (codes.hpp)
  kFirstInCodes,  // with one scale; second moments in bf16
};

/// Hyperparameters of one step, the same for every element.
struct Coefficients {
  float factor = 1.0f;  // of gradients, applied first; the product is rounded
  float beta1 = 0.0f;
  float beta2 = 0.0f;
  float take1 = 0.0f;  // 1 - beta1
  float take2 = 0.0f;  // 1 - beta2
  float root_scale = 1.0f;
  float epsilon = 0.0f;
  float step_size = 0.0f;  // negative
  /// Adam: this times the weight is added to the gradient. Zero is not the same as none: times an
  /// infinite weight it is NaN.
  std::optional<float> gradient_decay;
  /// AdamW: this times the weight is added to the weight; negative.
  std::optional<float> weight_decay;
};

/// The memory of one tile; no address needs any alignment, and no two parts may overlap.
struct Operands {
  const void* gradient = nullptr;
  Format gradient_format = Format::kFloat32;
  /// If it is not whole, the output, in bf16, is read as well. With halves the signs of exp_avg_sq
  /// are the flags of halves.hpp, except in codes.
  void* weight = nullptr;
  Weights weights = Weights::kWhole;
  void* exp_avg = nullptr;
  void* exp_avg_sq = nullptr;
  Moments moments = Moments::kFloat32;
  float* scales = nullptr;  // of codes; aligned, unlike the others
  void* output = nullptr;   // new weights in output_format; unused without one
  std::optional<Format> output_format;
  std::size_t numel = 0;
};

struct Options {
  /// So many elements at the end are computed as in DeepSpeed's loop over the remainder of the
  /// vectors, as g++ compiles it: in both moments it fuses the other one of the two products. 0
  /// with codes.
  std::size_t tail_numel = 0;
  /// 0: the CPUs this thread may run on. At most one per block of kBlockNumel.
  std::size_t threads = 0;
  /// Threads kept between calls; null: threads are started for this call and joined.
  kernels::Helpers* helpers = nullptr;
  /// For all but fp32 moments, and for remainders. With codes the tile's first element is the first
  /// of a scale.
  kernels::Rounding rounding;
};

/// Elements that a thread takes at once.
inline constexpr std::size_t kBlockNumel = std::size_t{1} << 15;

/// Steps every element once, in place. The bits do not depend on thread count, instruction set or
/// alignment, except for the payload of NaNs; without fp32 moments also not on the tiling of a
/// sub-group, tails apart. Denormals are flushed if the calling thread flushes them.
///
/// `isa` must be one of kernels::available_isas(). Throws std::invalid_argument on a caller's
/// mistake; then nothing has changed.
void update(const Operands& operands, const Coefficients& coefficients, Isa isa,
            const Options& options);

}  // namespace memascend::adam
