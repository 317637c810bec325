// A round: the stores, the pool and the allocator of one plan, used by its workers, and what has to
// be true when they are done.
#pragma once

#include "plan.hpp"
#include "tally.hpp"

namespace memascend::soak {

/// Throws EngineUnavailableError where the plan's engine cannot run.
void run_round(const Plan& plan, Tally& tally);

}  // namespace memascend::soak
