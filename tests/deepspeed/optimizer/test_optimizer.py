"""Which kind of optimizer a config makes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("deepspeed")

from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from memascend.deepspeed.optimizer.checkpoints import CheckpointedOptimizer
from memascend.deepspeed.optimizer.gradients import FlatGradients, StreamedGradients
from memascend.deepspeed.optimizer.optimizer import ZeroOptimizer
from memascend.deepspeed.optimizer.steps import Steps, WholeSteps
from memascend.deepspeed.optimizer.tiled_steps import TiledSteps
from memascend.deepspeed.seams import fingerprints

ON_DRIVE = SimpleNamespace(device="nvme")


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("optimizer", [True, False])
def test_the_streams_of_the_block_decide(gradients: bool, optimizer: bool) -> None:
    streaming = {"gradients": {"enabled": gradients}, "optimizer": {"enabled": optimizer}}
    made: Any = ZeroOptimizer.__new__(
        ZeroOptimizer,
        *("module", None, "names", "timers", {"memascend": {"streaming": streaming}}),
        offload_optimizer_config=ON_DRIVE,
        offload_ratio=1.0,
    )
    assert isinstance(made, ZeroOptimizer)
    assert isinstance(made, StreamedGradients if gradients else FlatGradients)
    assert isinstance(made, TiledSteps if optimizer else WholeSteps)
    assert type(made).__name__ == "ZeroOptimizer"


def test_an_optimizer_in_memory_takes_deepspeeds_own_ways() -> None:
    made: Any = ZeroOptimizer.__new__(ZeroOptimizer, "m", None, "n", "t", {"memascend": {}})
    assert isinstance(made, FlatGradients)
    assert isinstance(made, WholeSteps)


@pytest.mark.parametrize(
    "kind", [CheckpointedOptimizer, FlatGradients, StreamedGradients, Steps, WholeSteps, TiledSteps]
)
def test_every_upstream_method_that_a_base_class_overrides_is_watched(kind: type) -> None:
    upstream = vars(DeepSpeedZeroOptimizer_Stage3)
    overridden = {name for name, value in vars(kind).items() if callable(value)} & set(upstream)
    home = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"
    assert {f"{home}.{name}" for name in overridden} <= set(fingerprints.KNOWN)
