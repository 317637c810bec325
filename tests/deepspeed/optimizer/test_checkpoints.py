"""What the ZeRO-3 optimizer does differently while DeepSpeed saves or loads it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from memascend.checkpoint.source import CheckpointSource, LoadedTensor
from memascend.deepspeed.optimizer import checkpoints
from memascend.deepspeed.optimizer.checkpoints import CheckpointedOptimizer
from memascend.errors import StoreError

ZERO_STATES = {"loss_scaler": "theirs", "dynamic_loss_scale": True, "overflow": False}
FP32 = torch.float32
MASTER = LoadedTensor(0, None, FP32, SimpleNamespace())  # type: ignore[arg-type]
MOMENT = LoadedTensor(0, "exp_avg", FP32, SimpleNamespace())  # type: ignore[arg-type]
SOURCE = CheckpointSource(
    zero_states=ZERO_STATES,
    optimizer_states={"state": {}},
    tensors=[MASTER, MOMENT],
    model_states=Path("/here/model_states.pt"),
)


@pytest.fixture
def optimizer() -> Any:
    """Our part of an optimizer, without a model; `calls` are its own and upstream's."""
    made: Any = CheckpointedOptimizer.__new__(CheckpointedOptimizer)
    made.calls = []
    made.loss_scaler = "ours"
    made.reset_swap_buffers = lambda: made.calls.append("parameters")
    return made


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """States and tensors of what is restored."""
    found: list[Any] = []
    monkeypatch.setattr(checkpoints, "restore", lambda _, states, ts: found.append((states, ts)))
    for name in ("_restore_from_bit16_weights", "_rigid_load_state_dict"):
        monkeypatch.setattr(
            DeepSpeedZeroOptimizer_Stage3,
            name,
            lambda self, *arguments, name=name: self.calls.append((name, *arguments)),
        )
    return found


# -- the time of a save or load ------------------------------------------------------------------


def test_only_inside_it_is_checkpointing_and_knows_where_the_module_is(optimizer: Any) -> None:
    assert (optimizer.is_checkpointing, optimizer.model_states) == (False, None)
    with optimizer.checkpointing(SOURCE):
        assert (optimizer.is_checkpointing, optimizer.model_states) == (True, SOURCE.model_states)
    assert (optimizer.is_checkpointing, optimizer.model_states) == (False, None)
    with optimizer.checkpointing():
        assert (optimizer.is_checkpointing, optimizer.model_states) == (True, None)


def test_an_error_ends_it_too(optimizer: Any, restored: list[Any]) -> None:
    with pytest.raises(StoreError), optimizer.checkpointing(SOURCE):
        raise StoreError(5, "the drive failed")
    assert not optimizer.is_checkpointing
    optimizer.restore_checkpoint()
    assert restored == []


# -- loading -------------------------------------------------------------------------------------


def test_a_checkpoint_is_restored_once_and_then_the_parameters(
    optimizer: Any, restored: list[Any]
) -> None:
    with optimizer.checkpointing(SOURCE):
        optimizer.restore_checkpoint()
        optimizer.restore_checkpoint()
    assert restored == [({"state": {}}, [MASTER, MOMENT])]
    assert optimizer.calls == ["parameters"]
    assert optimizer.loss_scaler == "theirs"
    assert (optimizer.dynamic_loss_scale, optimizer.overflow) == (True, False)


def test_the_weights_alone_come_without_states_and_without_the_loss_scale(
    optimizer: Any, restored: list[Any]
) -> None:
    with optimizer.checkpointing(SOURCE, with_states=False):
        optimizer.restore_checkpoint()
    assert restored == [({}, [MASTER])]
    assert optimizer.loss_scaler == "ours"


def test_a_restore_that_fails_is_not_tried_again_by_deepspeeds_next_call(
    optimizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise StoreError(5, "the drive failed")

    monkeypatch.setattr(checkpoints, "restore", fail)
    with optimizer.checkpointing(SOURCE):
        with pytest.raises(StoreError):
            optimizer.restore_checkpoint()
        optimizer.restore_checkpoint()
    assert optimizer.calls == []


def test_where_upstream_loads_16_bit_weights_it_takes_the_exact_ones(
    optimizer: Any, restored: list[Any]
) -> None:
    optimizer._restore_from_bit16_weights()
    assert (optimizer.calls, restored) == ([("_restore_from_bit16_weights",)], [])
    optimizer.calls.clear()
    with optimizer.checkpointing(SOURCE, with_states=False):
        optimizer._restore_from_bit16_weights()
    assert (optimizer.calls, restored) == (["parameters"], [({}, [MASTER])])


# -- parameters on a drive, the optimizer in memory ----------------------------------------------


def in_memory(optimizer: Any, *, flats: list[Any], swap_optimizer: bool = False) -> dict[str, Any]:
    """Two sub-groups of an optimizer in memory, and what a checkpoint has of them."""
    optimizer.swap_optimizer = swap_optimizer
    optimizer.fp16_partitioned_groups_flat = flats
    optimizer.fp32_partitioned_groups_flat = [torch.zeros(3), torch.zeros(2)]
    note = optimizer.calls.append
    optimizer._set_fp32_optimizer_param_groups = lambda: note("groups")
    optimizer._clear_fp32_optimizer_param_groups = lambda: note("no groups")
    optimizer._reassign_or_swap_out_partitioned_parameters = note
    optimizer.optimizer = SimpleNamespace(load_state_dict=note)
    return ZERO_STATES | {
        "optimizer_state_dict": "base states",
        "fp32_flat_groups": [torch.ones(3), torch.full((2,), 2.0)],
    }


@pytest.mark.parametrize(
    ("flats", "swap_optimizer"), [([torch.ones(1)] * 2, False), ([None, None], True)]
)
def test_upstream_loads_what_it_can(optimizer: Any, flats: list[Any], swap_optimizer: bool) -> None:
    states = in_memory(optimizer, flats=flats, swap_optimizer=swap_optimizer)
    optimizer._rigid_load_state_dict(states, False)
    assert optimizer.calls == [("_rigid_load_state_dict", states, False)]


@pytest.mark.parametrize("flats", [[None, None], [torch.ones(1), None]])
@pytest.mark.parametrize("with_states", [True, False])
def test_parameters_on_a_drive_get_the_values_of_their_master_weights(
    optimizer: Any, flats: list[Any], with_states: bool
) -> None:
    states = in_memory(optimizer, flats=flats)
    optimizer._rigid_load_state_dict(states, with_states)
    base = ["groups", "base states", "no groups"] if with_states else []
    assert optimizer.calls == [*base, 0, 1]
    weights = [flat.tolist() for flat in optimizer.fp32_partitioned_groups_flat]
    assert weights == [[1.0] * 3, [2.0] * 2]
    assert optimizer.loss_scaler == "theirs"


def test_a_checkpoint_of_fewer_sub_groups_is_refused(optimizer: Any) -> None:
    states = in_memory(optimizer, flats=[None, None])
    del states["fp32_flat_groups"][1]
    with pytest.raises(ValueError, match="shorter"):
        optimizer._rigid_load_state_dict(states, False)
