// The number formats that kernels read and write.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string_view>

#include "base/check.hpp"

namespace memascend::kernels {

enum class Format { kFloat32, kFloat16, kBfloat16 };

/// "float32", "float16" or "bfloat16". Throws std::invalid_argument for any other text.
inline Format parse_format(std::string_view text) {
  if (text == "float32") return Format::kFloat32;
  if (text == "float16") return Format::kFloat16;
  if (text == "bfloat16") return Format::kBfloat16;
  throw std::invalid_argument(
      join("no kernel for dtype \"", text, "\"; known: float32, float16, bfloat16"));
}

constexpr std::size_t element_bytes(Format format) { return format == Format::kFloat32 ? 4 : 2; }

}  // namespace memascend::kernels
