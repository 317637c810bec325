"""Names of the components by which host memory is planned, taken and reported, each once.

The plan and the allocator use the same names, so that the ledger can put them side by side.
"""

from __future__ import annotations

#: Through which unaligned heads and tails of transfers pass.
BOUNCE_BUFFERS = "bounce buffers"
#: Through which gradients, large parameters and files of checkpoints pass.
STAGING_SLOTS = "staging slots"
#: Through which what forward saves for backward passes (activations).
ACTIVATION_SLOTS = "activation slots"
#: Master weights, states, gradient and 16-bit result of the tiles in flight.
OPTIMIZER_TILES = "optimizer tiles"
#: What 16-bit gradients are widened into.
OPTIMIZER_SCRATCH = "optimizer scratch"
#: Parameters within a budget (streaming.parameters).
PARAMETER_SLOTS = "parameter slots"
#: What stays in host memory instead of on the drive.
RESIDENT_CACHE = "resident cache"
#: Of what lies on the drives (verify).
CHECKSUMS = "checksums"

# What DeepSpeed itself allocates while memascend serves its host memory.
PARAMETERS_IN_CPU = "parameters in cpu"
SMALL_PARAMETERS = "small parameters"
GRADIENTS = "gradients"
OPTIMIZER_BUFFERS = "optimizer buffers"
PARAMETER_BUFFERS = "parameter buffers"
