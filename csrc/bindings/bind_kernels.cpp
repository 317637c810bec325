// Python surface of csrc/kernels/.
#include "bindings/bindings.hpp"

namespace memascend {

void bind_kernels(pybind11::module_&) {}

}  // namespace memascend
