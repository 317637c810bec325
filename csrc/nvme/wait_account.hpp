// Selects the waits for drives that count: those of threads that delay training.
#pragma once

namespace memascend {

/// Set for good on a thread that works in the background of training.
inline thread_local bool waits_behind = false;

}  // namespace memascend
