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
                        .moment = operands.moment_format,
                        .output = operands.output_format,
                        .is_split = operands.is_split};
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return avx512_kernels(formats);
  if (isa == Isa::kAvx2) return avx2_kernels(formats);
#endif
  MA_EXPECT(isa == Isa::kScalar, "no ", kernels::name(isa), " kernel in this build");
  return scalar_kernels(formats);
}

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
    const std::size_t moment_offset = first * kernels::element_bytes(operands_.moment_format);
    const std::size_t weight_width = operands_.is_split ? sizeof(std::uint16_t) : sizeof(float);
    std::byte* output = nullptr;
    if (operands_.output_format) {
      output = at(operands_.output, first * kernels::element_bytes(*operands_.output_format));
    }
    return {.gradient = static_cast<const std::byte*>(operands_.gradient) + first * gradient_width,
            .weight = at(operands_.weight, first * weight_width),
            .exp_avg = at(operands_.exp_avg, moment_offset),
            .exp_avg_sq = at(operands_.exp_avg_sq, moment_offset),
            .output = output,
            .numel = limit - first,
            .key_low = static_cast<std::uint32_t>(options_.rounding_key),
            .key_high = static_cast<std::uint32_t>(options_.rounding_key >> 32),
            .first = static_cast<std::uint32_t>(options_.first_index + first)};
  }

  const Operands& operands_;
  const Coefficients& coefficients_;
  Kernels kernels_;
  const Options& options_;
  std::size_t body_numel_;
  std::atomic<std::size_t> next_{0};
};

void check(const Operands& operands, const Options& options) {
  const std::size_t numel = operands.numel;
  const bool has_all = operands.gradient != nullptr && operands.weight != nullptr &&
                       operands.exp_avg != nullptr && operands.exp_avg_sq != nullptr;
  MA_EXPECT(has_all || numel == 0, "cannot step ", numel, " elements at address 0");
  MA_EXPECT(!operands.output_format || operands.output != nullptr || numel == 0, "cannot write ",
            numel, " weights to address 0");
  MA_EXPECT(operands.output_format != Format::kFloat32,
            "the output of the step is 16 bits wide; the weights themselves are fp32");
  MA_EXPECT(!operands.is_split || operands.output_format == Format::kBfloat16,
            "a split weight has its upper half in an output in bfloat16");
  MA_EXPECT(operands.moment_format != Format::kFloat16,
            "moments are fp32 or bf16: second moments are beyond the range of fp16");
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
