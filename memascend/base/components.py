"""Names of the components by which host memory is planned, allocated and reported.

The plan and the allocator use the same names, so that the ledger can compare them.
"""

from __future__ import annotations

#: For unaligned heads and tails of transfers.
BOUNCE_BUFFERS = "bounce buffers"
#: For gradients, large parameters and files of checkpoints on their way to or from a drive.
STAGING_SLOTS = "staging slots"
#: For saved activations on their way to or from a drive.
ACTIVATION_SLOTS = "activation slots"
#: Master weights, states, gradient and 16-bit result of the tiles in flight.
OPTIMIZER_TILES = "optimizer tiles"
#: For 16-bit gradients, widened to fp32.
OPTIMIZER_SCRATCH = "optimizer scratch"
#: Parameters within a budget (streaming.parameters).
PARAMETER_SLOTS = "parameter slots"
#: Keys of the store that stay in host memory instead of on the drive.
RESIDENT_CACHE = "resident cache"
#: Checksums of the data on the drives (verify).
CHECKSUMS = "checksums"

#: Device memory of gradients that wait for the drive.
WAITING_GRADIENTS = "waiting gradients"

# Memory that DeepSpeed itself allocates, through memascend's allocator.
PARAMETERS_IN_CPU = "parameters in cpu"
SMALL_PARAMETERS = "small parameters"
GRADIENTS = "gradients"
OPTIMIZER_BUFFERS = "optimizer buffers"
PARAMETER_BUFFERS = "parameter buffers"
