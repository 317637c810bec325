// sources: csrc/kernels/isa.cpp
//
// Names of instruction sets: what is available has one, and nothing else is taken.
#include "kernels/isa.hpp"

#include <stdexcept>

#include "support/expect.hpp"

namespace {

using namespace memascend;
using kernels::Isa;

void test_the_scalar_set_is_first_and_auto_is_the_last() {
  const auto isas = kernels::available_isas();
  EXPECT(!isas.empty());
  EXPECT(isas.front() == Isa::kScalar);
  EXPECT(kernels::parse_isa("auto") == isas.back());
}

void test_what_is_available_is_known_by_its_name() {
  for (const Isa isa : kernels::available_isas()) {
    EXPECT(kernels::parse_isa(kernels::name(isa)) == isa);
  }
}

void test_what_is_not_available_is_refused() {
  const auto isas = kernels::available_isas();
  const auto is_refused = [](std::string_view text) {
    try {
      kernels::parse_isa(text);
    } catch (const std::invalid_argument&) {
      return true;
    }
    return false;
  };
  EXPECT(is_refused("mmx"));
  EXPECT(is_refused(""));
  EXPECT(is_refused("avx512") == (isas.back() != Isa::kAvx512));
}

}  // namespace

int main() {
  test_the_scalar_set_is_first_and_auto_is_the_last();
  test_what_is_available_is_known_by_its_name();
  test_what_is_not_available_is_refused();
  return 0;
}
