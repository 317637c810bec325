"""What the ZeRO-3 optimizer does differently while DeepSpeed saves or loads it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")


from memascend.checkpoint.files import TensorReader
from memascend.checkpoint.source import CheckpointSource, LoadedTensor
from memascend.deepspeed.optimizer import checkpoint
from memascend.deepspeed.optimizer.checkpoint import CheckpointHooks, Loads
from memascend.deepspeed.optimizer.upstream import LOADED, Upstream
from memascend.errors import ConfigError, StoreError
from tests.support.runtimes import stand_in

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


class Optimizer:
    """An optimizer without a model; `calls` are those of its steps and of DeepSpeed's functions."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        note = self.calls.append
        self.stage3 = SimpleNamespace(
            loss_scaler="ours",
            _partition_all_parameters=lambda: note("partition"),
            reset_swap_buffers=lambda: note("parameters"),
        )
        self.steps = SimpleNamespace(finish=lambda: note("finish"), drop_ahead=note, is_tiled=False)
        steps: Any = self.steps
        runtime = stand_in(staging=None)
        attachment: Any = SimpleNamespace(runtime=runtime)
        self.hooks = CheckpointHooks(Upstream(self.stage3), lambda: attachment, steps)

    def stock(self, *arguments: Any) -> None:
        self.calls.append(("stock", *arguments))


@pytest.fixture
def optimizer() -> Optimizer:
    return Optimizer()


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """States and tensors of what is restored."""
    found: list[Any] = []
    monkeypatch.setattr(
        checkpoint, "restore", lambda _, __, slots, states, ts, powers: found.append((states, ts))
    )
    return found


# -- the time of a save or load ------------------------------------------------------------------


def test_only_inside_it_is_checkpointing_and_knows_where_the_module_is(
    optimizer: Optimizer,
) -> None:
    assert (optimizer.hooks.is_active, optimizer.hooks.model_states) == (False, None)
    with optimizer.hooks.active(SOURCE):
        assert (optimizer.hooks.is_active, optimizer.hooks.model_states) == (
            True,
            SOURCE.model_states,
        )
    assert (optimizer.hooks.is_active, optimizer.hooks.model_states) == (False, None)
    with optimizer.hooks.active():
        assert (optimizer.hooks.is_active, optimizer.hooks.model_states) == (True, None)


def test_an_error_ends_it_too(optimizer: Optimizer, restored: list[Any]) -> None:
    with pytest.raises(StoreError), optimizer.hooks.active(SOURCE):
        raise StoreError(5, "the drive failed")
    assert not optimizer.hooks.is_active
    optimizer.hooks.restore()
    assert restored == []


# -- loading -------------------------------------------------------------------------------------


def test_a_checkpoint_is_restored_once_and_then_the_parameters(
    optimizer: Optimizer, restored: list[Any]
) -> None:
    with optimizer.hooks.active(SOURCE):
        optimizer.hooks.restore()
        optimizer.hooks.restore()
    assert restored == [({"state": {}}, [MASTER, MOMENT])]
    assert optimizer.calls == ["partition", "parameters"]
    assert optimizer.stage3.loss_scaler == "theirs"
    assert (optimizer.stage3.dynamic_loss_scale, optimizer.stage3.overflow) == (True, False)


def test_no_parameter_is_staged_when_its_key_is_written(
    optimizer: Optimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    before: list[Any] = []
    monkeypatch.setattr(checkpoint, "restore", lambda *_: before.extend(optimizer.calls))
    with optimizer.hooks.active(SOURCE):
        optimizer.hooks.restore()
    assert before == ["partition"]


def test_the_weights_alone_come_without_states_and_without_the_loss_scale(
    optimizer: Optimizer, restored: list[Any]
) -> None:
    with optimizer.hooks.active(SOURCE, loads=Loads.WEIGHTS):
        optimizer.hooks.restore()
    assert restored == [({}, [MASTER])]
    assert optimizer.stage3.loss_scaler == "ours"


def test_weights_of_the_module_are_those_of_the_parameters_dtype(
    optimizer: Optimizer, restored: list[Any]
) -> None:
    """As CPU offload has them without optimizer states."""
    optimizer.stage3.fp16_partitioned_groups_flat = [torch.empty(0, dtype=torch.bfloat16)]
    values = torch.tensor([1.0, 1.001, 3e38])
    tensor = LoadedTensor(0, None, FP32, TensorReader(lambda: values))
    source = CheckpointSource(ZERO_STATES, {"state": {}}, [tensor, MOMENT])
    with optimizer.hooks.active(source, loads=Loads.ROUNDED_WEIGHTS):
        optimizer.hooks.restore()
    [(states, [weights])] = restored
    found = torch.empty(3)
    weights.reader.fill(0, found.view(torch.uint8))
    assert (states, weights.dtype) == ({}, FP32)
    assert torch.equal(found, values.bfloat16().float())
    assert optimizer.stage3.loss_scaler == "ours"


def test_a_restore_that_fails_is_not_tried_again_by_deepspeeds_next_call(
    optimizer: Optimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise StoreError(5, "the drive failed")

    monkeypatch.setattr(checkpoint, "restore", fail)
    with optimizer.hooks.active(SOURCE):
        with pytest.raises(StoreError):
            optimizer.hooks.restore()
        optimizer.hooks.restore()
    assert optimizer.calls == ["partition"]


def test_where_upstream_loads_16_bit_weights_it_takes_the_exact_ones(
    optimizer: Optimizer, restored: list[Any]
) -> None:
    in_memory(optimizer, flats=[torch.ones(3), torch.ones(2)])
    optimizer.hooks.load_weights(optimizer.stock)
    assert (optimizer.calls, restored) == (["finish", LOADED, ("stock",)], [])
    optimizer.calls.clear()
    with optimizer.hooks.active(SOURCE, loads=Loads.WEIGHTS):
        optimizer.hooks.load_weights(optimizer.stock)
    assert (optimizer.calls, restored) == (["partition", "parameters"], [({}, [MASTER])])


# -- parameters on a drive, the optimizer in memory ----------------------------------------------


def in_memory(
    optimizer: Optimizer, *, flats: list[Any], swap_optimizer: bool = False
) -> dict[str, Any]:
    """Two sub-groups of an optimizer in memory, and what a checkpoint has of them."""
    note = optimizer.calls.append
    vars(optimizer.stage3).update(
        swap_optimizer=swap_optimizer,
        fp16_partitioned_groups_flat=flats,
        fp32_partitioned_groups_flat=[torch.zeros(3), torch.zeros(2)],
        _set_fp32_optimizer_param_groups=lambda: note("groups"),
        _clear_fp32_optimizer_param_groups=lambda: note("no groups"),
        _reassign_or_swap_out_partitioned_parameters=note,
        optimizer=SimpleNamespace(load_state_dict=note),
    )
    return ZERO_STATES | {
        "optimizer_state_dict": "base states",
        "fp32_flat_groups": [torch.ones(3), torch.full((2,), 2.0)],
    }


@pytest.mark.parametrize(
    ("flats", "swap_optimizer"), [([torch.ones(1)] * 2, False), ([None, None], True)]
)
def test_upstream_loads_what_it_can(
    optimizer: Optimizer, flats: list[Any], swap_optimizer: bool
) -> None:
    states = in_memory(optimizer, flats=flats, swap_optimizer=swap_optimizer)
    optimizer.hooks.load_states(states, False, optimizer.stock)
    assert optimizer.calls == ["finish", LOADED, ("stock", states, False)]


@pytest.mark.parametrize("flats", [[None, None], [torch.ones(1), None]])
@pytest.mark.parametrize("with_states", [True, False])
def test_parameters_on_a_drive_get_the_values_of_their_master_weights(
    optimizer: Optimizer, flats: list[Any], with_states: bool
) -> None:
    states = in_memory(optimizer, flats=flats)
    optimizer.hooks.load_states(states, with_states, optimizer.stock)
    base = ["groups", "base states", "no groups"] if with_states else []
    assert optimizer.calls == ["finish", LOADED, *base, 0, 1]
    weights = [flat.tolist() for flat in optimizer.stage3.fp32_partitioned_groups_flat]
    assert weights == [[1.0] * 3, [2.0] * 2]
    assert optimizer.stage3.loss_scaler == "theirs"


def test_states_in_tiles_are_loaded_by_the_engine_alone(optimizer: Optimizer) -> None:
    """DeepSpeed would fail in the middle, and the values would be torn."""
    states = in_memory(optimizer, flats=[None, None], swap_optimizer=True)
    optimizer.steps.is_tiled = True
    with pytest.raises(ConfigError, match=r"load_state_dict\(\) of the optimizer cannot be comb"):
        optimizer.hooks.load_states(states, True, optimizer.stock)
    assert optimizer.calls == []
    assert optimizer.stage3.loss_scaler == "ours"


@pytest.mark.parametrize(("flat", "swap_optimizer"), [(None, False), (torch.ones(1), True)])
def test_masters_of_16_bit_weights_on_a_drive_are_refused_by_name(
    optimizer: Optimizer, flat: torch.Tensor | None, swap_optimizer: bool
) -> None:
    in_memory(optimizer, flats=[torch.ones(1), flat], swap_optimizer=swap_optimizer)
    with pytest.raises(ConfigError, match=r"refresh_fp32_params\(\) of the optimizer cannot be"):
        optimizer.hooks.load_weights(optimizer.stock)
    assert optimizer.calls == []


def test_a_checkpoint_of_fewer_sub_groups_is_refused(optimizer: Optimizer) -> None:
    states = in_memory(optimizer, flats=[None, None])
    del states["fp32_flat_groups"][1]
    with pytest.raises(ValueError, match="shorter"):
        optimizer.hooks.load_states(states, False, optimizer.stock)
