// Weights of 24 bits, an element at a time: only checkpoints and accessors cut and join them.
#include "kernels/remainders.hpp"

#include <bit>

#include "kernels/adam_block.hpp"
#include "kernels/adam_weight.hpp"
#include "kernels/random_words.hpp"

namespace memascend::remainders {

using adam::One;

void join(const std::uint16_t* rounded, const std::int8_t* remainders, float* weights,
          std::size_t numel) {
  for (std::size_t i = 0; i < numel; ++i) {
    const auto remainder = static_cast<std::uint32_t>(std::int32_t{remainders[i]});
    weights[i] = std::bit_cast<float>((std::uint32_t{rounded[i]} << 16) + (remainder << 8));
  }
}

void cut(const float* weights, std::uint16_t* rounded, std::int8_t* remainders, std::size_t numel,
         std::optional<kernels::Rounding> rounding) {
  adam::Block block{};
  block.weight = reinterpret_cast<std::byte*>(remainders);
  block.output = reinterpret_cast<std::byte*>(rounded);
  for (std::size_t i = 0; i < numel; ++i) {
    constexpr std::uint32_t kHalf = 0x80;
    const std::uint32_t random = rounding ? kernels::random_words<One>(*rounding, i) >> 24 : kHalf;
    adam::store_weight<One, adam::Remainder, false>(block, i, weights[i], random);
  }
}

}  // namespace memascend::remainders
