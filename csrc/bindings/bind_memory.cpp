// Python surface of csrc/memory/.
#include "bindings/bindings.hpp"

namespace memascend {

void bind_memory(pybind11::module_&) {}

}  // namespace memascend
