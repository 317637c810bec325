// The Adam step in plain C++: the reference for tests of the vector kernels, and the kernel of CPUs
// that have neither AVX2 nor AVX-512.
#include "kernels/adam_loops.hpp"

namespace memascend::adam {

Kernels scalar_kernels(const Formats& formats) { return Loops<One>::choose(formats); }

}  // namespace memascend::adam
