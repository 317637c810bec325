// Whose waits for drives are accounted for: those of threads that hold training up.
#pragma once

namespace memascend {

/// Set on a thread whose work goes on behind training. Of each thread, for good.
inline thread_local bool waits_behind = false;

}  // namespace memascend
