// Dispatch, partition and threads of the Adam step. The arithmetic is in adam_block.hpp, in the
// instructions of adam_<isa>.cpp.
#include "kernels/adam.hpp"

#include <algorithm>
#include <atomic>
#include <limits>

#include "base/check.hpp"
#include "kernels/adam_block.hpp"

namespace memascend::adam {
namespace {

Kernels kernels_of(Isa isa, const Operands& operands) {
  const Formats formats{.gradient = operands.gradient_format,
                        .moments = operands.moments,
                        .output = operands.output_format,
                        .weights = operands.weights};
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return avx512_kernels(formats);
  if (isa == Isa::kAvx2) return avx2_kernels(formats);
#endif
  MA_EXPECT(isa == Isa::kScalar, "no ", kernels::name(isa), " kernel in this build");
  return scalar_kernels(formats);
}

/// Bytes of an element's moments, and scales for codes::kScaleNumel elements.
struct Widths {
  std::size_t exp_avg;
  std::size_t exp_avg_sq;
  std::size_t scales;
};

Widths widths_of(Moments moments) {
  switch (moments) {
    case Moments::kBfloat16:
      return {2, 2, 0};
    case Moments::kCodes:
      return {1, 1, Codes::kScales};
    case Moments::kFirstInCodes:
      return {1, 2, FirstInCodes::kScales};
    case Moments::kFloat32:
      break;
  }
  return {4, 4, 0};
}

std::size_t weight_bytes(Weights weights) {
  switch (weights) {
    case Weights::kHalves:
      return 2;
    case Weights::kRemainders:
      return 1;
    case Weights::kWhole:
      break;
  }
  return 4;
}

static_assert(kBlockNumel % codes::kScaleNumel == 0);

/// One step of a tile; every thread runs `work`, the caller's included.
class Step {
 public:
  Step(const Operands& operands, const Coefficients& coefficients, Kernels kernels,
       const Options& options)
      : operands_(operands),
        coefficients_(coefficients),
        kernels_(kernels),
        options_(options),
        body_numel_(operands.numel - options.tail_numel) {}

  void work() {
    for (;;) {
      const std::size_t first = next_.fetch_add(kBlockNumel, std::memory_order_relaxed);
      if (first >= operands_.numel) return;
      const std::size_t limit = std::min(operands_.numel, first + kBlockNumel);
      const std::size_t split = std::clamp(body_numel_, first, limit);
      if (split > first) kernels_.body(block(first, split), coefficients_);
      if (limit > split) kernels_.tail(block(split, limit), coefficients_);
    }
  }

 private:
  Block block(std::size_t first, std::size_t limit) const {
    const auto at = [](void* start, std::size_t nbytes) {
      return static_cast<std::byte*>(start) + nbytes;
    };
    const std::size_t gradient_width = kernels::element_bytes(operands_.gradient_format);
    const Widths widths = widths_of(operands_.moments);
    std::byte* output = nullptr;
    if (operands_.output_format) {
      output = at(operands_.output, first * kernels::element_bytes(*operands_.output_format));
    }
    return {.gradient = static_cast<const std::byte*>(operands_.gradient) + first * gradient_width,
            .weight = at(operands_.weight, first * weight_bytes(operands_.weights)),
            .exp_avg = at(operands_.exp_avg, first * widths.exp_avg),
            .exp_avg_sq = at(operands_.exp_avg_sq, first * widths.exp_avg_sq),
            .scales = operands_.scales + first / codes::kScaleNumel * widths.scales,
            .output = output,
            .numel = limit - first,
            .rounding = {.key = options_.rounding.key,
                         .first_index = options_.rounding.first_index + first}};
  }

  const Operands& operands_;
  const Coefficients& coefficients_;
  Kernels kernels_;
  const Options& options_;
  std::size_t body_numel_;
  std::atomic<std::size_t> next_{0};
};

void check_codes(const Operands& operands, const Options& options) {
  MA_EXPECT(operands.scales != nullptr || operands.numel == 0,
            "moments in codes have scales; got address 0");
  MA_EXPECT(options.tail_numel == 0,
            "moments in codes have no tail, got tail_numel=", options.tail_numel,
            ": no other step has to be equalled");
  MA_EXPECT(options.rounding.first_index % codes::kScaleNumel == 0,
            "a tile of moments in codes begins at a multiple of ", codes::kScaleNumel,
            " elements, got first_index=", options.rounding.first_index);
}

void check(const Operands& operands, const Options& options) {
  const std::size_t numel = operands.numel;
  const bool has_all = operands.gradient != nullptr && operands.weight != nullptr &&
                       operands.exp_avg != nullptr && operands.exp_avg_sq != nullptr;
  MA_EXPECT(has_all || numel == 0, "cannot step ", numel, " elements at address 0");
  MA_EXPECT(!operands.output_format || operands.output != nullptr || numel == 0, "cannot write ",
            numel, " weights to address 0");
  MA_EXPECT(operands.output_format != Format::kFloat32,
            "the output of the step is 16 bits wide; the weights themselves are fp32");
  MA_EXPECT(operands.weights == Weights::kWhole || operands.output_format == Format::kBfloat16,
            "weights in halves or with a remainder have their other bits in an output in bfloat16");
  if (widths_of(operands.moments).scales != 0) check_codes(operands, options);
  // Each thread adds kBlockNumel once more after the last block.
  constexpr std::size_t kNumelMax = std::numeric_limits<std::size_t>::max() / 8;
  MA_EXPECT(numel <= kNumelMax, "cannot step ", numel,
            " elements: more bytes than an address space has");
  MA_EXPECT(options.tail_numel <= numel, "tail_numel must be at most numel=", numel, ", got ",
            options.tail_numel);
  MA_EXPECT(options.threads <= kernels::kThreadsMax, "threads must be 0 (automatic) to ",
            kernels::kThreadsMax, ", got ", options.threads);
}

}  // namespace

void update(const Operands& operands, const Coefficients& coefficients, Isa isa,
            const Options& options) {
  check(operands, options);
  Step step(operands, coefficients, kernels_of(isa, operands), options);
  const std::size_t blocks = (operands.numel + kBlockNumel - 1) / kBlockNumel;
  const std::size_t asked = options.threads != 0
                                ? options.threads
                                : std::min(kernels::usable_cpus(), kernels::kThreadsMax);
  kernels::run_on_threads(options.helpers, std::min(asked, blocks), [&step] { step.work(); });
}

}  // namespace memascend::adam
