"""Numbers of an Adam step, for tests of its kernels."""

from __future__ import annotations

#: Weights move and decay, moments are those of usual betas.
USUAL = {
    "factor": 1 / 3,
    "beta1": 0.9,
    "beta2": 0.999,
    "take1": 0.1,
    "take2": 0.001,
    "root_scale": 1.7,
    "epsilon": 1e-8,
    "step_size": -1e-2,
    "weight_decay": -1e-3,
}
