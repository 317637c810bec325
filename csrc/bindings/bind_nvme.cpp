// Python surface of csrc/nvme/.
#include "bindings/bindings.hpp"

namespace memascend {

void bind_nvme(pybind11::module_&) {}

}  // namespace memascend
