"""Whole sub-groups in DeepSpeed's own swapper, and what both ways of stepping share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from deepspeed.runtime.swap_tensor.optimizer_utils import OptimizerStateSwapInfo
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stock

from memascend.checkpoint.source import LoadedTensor
from memascend.deepspeed.optimizer import steps
from memascend.deepspeed.optimizer.steps import WholeSteps
from memascend.errors import StoreError, TornStepError
from memascend.streaming.optimizer.sub_groups import StepIntegrity
from tests.support.streaming_hosts import memory_store, staging_slots

FP32 = torch.float32
NUMEL = 1000
ALIGNED_NUMEL = 1024  # what DeepSpeed makes of it


class Attachment:
    """A store, staging slots, and what was served for which component."""

    def __init__(self, folder: Path | None = None) -> None:
        store = memory_store()
        slots = staging_slots(store)
        lock = threading.RLock()
        self.runtime = SimpleNamespace(store=store, io=store, staging=slots, lock=lock)
        self.served: list[str | None] = []
        self._folder = folder

    @contextmanager
    def host_buffers(self, component: str | None) -> Iterator[None]:
        self.served.append(component)
        yield
        self.served.append("end")

    serving_aio = host_buffers

    def staging_folder(self, nvme_path: str) -> str:
        assert self._folder is not None
        self._folder.mkdir()
        return str(self._folder)


def flat(name: str, numel: int = 0) -> Any:
    parameter: Any = torch.nn.Parameter(torch.zeros(numel))
    parameter.ds_id = name
    return parameter


class Optimizer(WholeSteps):
    """One sub-group in DeepSpeed's swapper with two moments, and one too small for a drive."""

    swap_optimizer = offload_optimizer = True

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.device = self.timers = None
        self.master_weights_and_grads_dtype = FP32
        self.integrity = StepIntegrity()
        self.attachment = Attachment()
        self.fp32_partitioned_groups_flat = [flat("0_4"), flat("5_5", 3)]
        self.fp16_partitioned_groups_flat_numel = [NUMEL, 3]
        swapped = self.fp32_partitioned_groups_flat[0]
        self.swap_info = OptimizerStateSwapInfo(swapped, NUMEL, "/swap", None)
        self.optimizer_swapper = SimpleNamespace(
            swap_params_info={"0_4": self.swap_info},
            dtype=FP32,
            swap_buffer_manager=SimpleNamespace(all_buffers=["buffer"]),
            note_gradient_factor=lambda parameter, factor: self.calls.append((parameter, factor)),
            _io_aligned_numel=lambda numel: ALIGNED_NUMEL,
        )
        self.optimizer: Any = SimpleNamespace(
            state={parameter: {} for parameter in self.fp32_partitioned_groups_flat}
        )
        self.loss_scaler, self.custom_loss_scaler = SimpleNamespace(cur_scale=4.0), False
        self.clip_grad = 0.0

    def add_moments(self) -> None:
        states = [torch.zeros(0), torch.zeros(0)]
        for name, state in zip(("exp_avg", "exp_avg_sq"), states, strict=True):
            state.ds_id = f"{name}-0_4"  # type: ignore[attr-defined]
        self.swap_info.add_state_tensors(states)

    def write(self, key: str, numel: int = ALIGNED_NUMEL) -> None:
        self.attachment.runtime.store.write(key=key, source=torch.ones(numel)).wait()

    def _swappable_optimizer_subgroup(self, sub_group_id: int) -> bool:
        return sub_group_id == 0

    def get_param_id(self, param: Any) -> int:
        return 0

    def _constant_buffered_norm2(self, value: torch.Tensor) -> torch.Tensor:
        return value.double().norm()


@pytest.fixture
def optimizer() -> Optimizer:
    return Optimizer()


def upstream(monkeypatch: pytest.MonkeyPatch, name: str, result: Any = None) -> None:
    """Has upstream's method note its arguments."""

    def noted(self: Any, *arguments: Any) -> Any:
        self.calls.append((name, *arguments))
        return result

    monkeypatch.setattr(Stock, name, noted)


# -- a step --------------------------------------------------------------------------------------


def test_a_whole_step_leaves_values_that_belong_together(
    optimizer: Optimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream(monkeypatch, "_optimizer_step")

    def step(self: Any, closure: Any) -> None:
        for sub_group in range(2):
            self._optimizer_step(sub_group)
            assert self.integrity.is_torn

    monkeypatch.setattr(Stock, "step", step)
    optimizer.step()
    optimizer.step()
    assert optimizer.calls == [("_optimizer_step", index) for index in (0, 1, 0, 1)]
    optimizer.settle()


def test_after_half_a_step_neither_step_nor_save_nor_load_goes_on(
    optimizer: Optimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any, closure: Any) -> None:
        self.integrity.note_change()
        raise StoreError(5, "the drive failed")

    monkeypatch.setattr(Stock, "step", fail)
    with pytest.raises(StoreError):
        optimizer.step()
    for refused in (optimizer.step, optimizer.settle):
        with pytest.raises(TornStepError, match="load a checkpoint"):
            refused()
    with pytest.raises(TornStepError, match=r"streaming\.optimizer .*restart the program"):
        optimizer.begin_load()


def test_a_load_under_way_is_half_a_step_too(optimizer: Optimizer) -> None:
    optimizer.begin_load()
    with pytest.raises(TornStepError):
        optimizer.settle()


@pytest.mark.parametrize(
    ("clip_grad", "norm", "factor"),
    [(0.0, 1e9, 0.25), (1.0, 2.0, 0.25), (1.0, 40.0, 0.025), (5.0, 40.0, 0.125)],
)
def test_the_factor_is_what_upstream_multiplies_by(
    optimizer: Optimizer, clip_grad: float, norm: float, factor: float
) -> None:
    optimizer.clip_grad = clip_grad
    gradient = torch.full((3,), 0.7)
    parameter = SimpleNamespace(grad=gradient.clone())
    optimizer.fp32_partitioned_groups_flat[0] = parameter
    optimizer.unscale_and_clip_grads(0, torch.tensor(norm))
    ((noted_for, noted),) = optimizer.calls
    assert noted_for is parameter
    assert float(noted) == pytest.approx(factor, rel=1e-5)
    assert torch.equal(parameter.grad, gradient * noted)


def test_a_gradient_in_memory_needs_no_factor_noted(
    optimizer: Optimizer,
) -> None:
    optimizer.fp32_partitioned_groups_flat[1].grad = torch.ones(3)
    optimizer.unscale_and_clip_grads(1, torch.tensor(1.0))
    assert optimizer.calls == []


# -- single values -------------------------------------------------------------------------------


def param(*, requires_grad: bool = True) -> Any:
    return SimpleNamespace(
        requires_grad=requires_grad, partition_numel=lambda: 6, ds_shape=torch.Size((3, 4))
    )


@pytest.mark.parametrize("group_index", [0, 1])
def test_a_part_that_is_set_is_stored_where_its_sub_group_is_on_the_drive(
    optimizer: Optimizer, monkeypatch: pytest.MonkeyPatch, group_index: int
) -> None:
    part = torch.zeros(6)
    upstream(monkeypatch, "_get_fp32_grad_state_partition", (part, group_index))
    upstream(monkeypatch, "_get_fp32_opt_state_partition", (part, group_index))
    monkeypatch.setattr(
        Stock, "_writeback_swap_state", lambda self, group, **what: self.calls.append((group, what))
    )
    upstream(monkeypatch, "_optimizer_states_and_gradient_swap_out")
    optimizer.norm_for_param_grads = {}
    gradient, wanted = torch.full((3, 2), 2.0), param()
    optimizer.set_local_grad_for_param(gradient, wanted)
    assert part.tolist() == [2.0] * 6
    assert optimizer.norm_for_param_grads[0].item() == pytest.approx(24.0**0.5)
    optimizer.set_local_hp_param(torch.full((6,), 3.0), wanted, "exp_avg")
    assert part.tolist() == [3.0] * 6
    stored = [
        (0, {"write_opt_state": False, "write_gradients": True}),
        ("_optimizer_states_and_gradient_swap_out", 0),
    ]
    assert optimizer.calls == [
        ("_get_fp32_grad_state_partition", wanted, False),
        *(stored[:1] if group_index == 0 else []),
        ("_get_fp32_opt_state_partition", wanted, False, "exp_avg"),
        *(stored[1:] if group_index == 0 else []),
    ]


@pytest.mark.parametrize("name", ["set_local_grad_for_param", "set_local_hp_param"])
def test_a_value_of_another_length_is_refused_and_a_frozen_parameter_passed_by(
    optimizer: Optimizer, name: str
) -> None:
    set_local = getattr(optimizer, name)
    with pytest.raises(ValueError, match=r"shape \(3, 4\).* 6 elements .* 12.*safe_set_full_"):
        set_local(torch.zeros(12), param())
    set_local(torch.zeros(12), param(requires_grad=False))


@pytest.mark.parametrize(
    ("group_index", "is_released", "is_copy"),
    [(0, True, True), (0, False, False), (1, True, False)],
)
@pytest.mark.parametrize("kind", ["grad", "opt"])
def test_a_part_of_a_buffer_that_is_free_again_is_copied(
    optimizer: Optimizer,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    group_index: int,
    is_released: bool,
    is_copy: bool,
) -> None:
    part = torch.arange(4.0)
    name = f"_get_fp32_{kind}_state_partition"
    upstream(monkeypatch, name, (part, group_index))
    found, index = getattr(optimizer, name)("param", is_released)
    assert (found.tolist(), index) == (part.tolist(), group_index)
    assert (found is not part) == is_copy


# -- construction and the end --------------------------------------------------------------------


@pytest.mark.parametrize(("pipeline", "count"), [(False, 4), (True, 12)])
def test_deepspeeds_swapper_gets_the_buffers_it_needs_and_its_folder_goes(
    optimizer: Optimizer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    pipeline: bool,
    count: int,
) -> None:
    made: dict[str, Any] = {}
    for name in ("SequentialSwapper", "PipelinedSwapper"):
        monkeypatch.setattr(steps, name, lambda name=name, **given: made.update(given, kind=name))
    attachment = optimizer.attachment = Attachment(tmp_path / "files")
    optimizer.optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    config = DeepSpeedZeroOffloadOptimizerConfig(
        device="nvme", nvme_path="/drive", buffer_count=2, pipeline_read=pipeline
    )
    optimizer._configure_tensor_swapping(config, {"block_size": 1})
    assert made["kind"] == ("PipelinedSwapper" if pipeline else "SequentialSwapper")
    assert made["swap_config"].buffer_count == count
    assert made["swap_config"].pipeline == pipeline
    assert (made["base_folder"], made["largest_numel"]) == (str(tmp_path / "files"), NUMEL)
    assert attachment.served == ["optimizer buffers", "end"]
    assert list(tmp_path.iterdir()) == []
    assert config.buffer_count == 2


def test_more_buffers_than_needed_stay_and_without_our_store_the_folder_does(
    optimizer: Optimizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: dict[str, Any] = {}
    monkeypatch.setattr(steps, "SequentialSwapper", lambda **given: made.update(given))
    optimizer.attachment = Attachment(tmp_path / "files")
    optimizer.attachment.runtime.store = None
    optimizer.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    config = DeepSpeedZeroOffloadOptimizerConfig(device="nvme", nvme_path="/d", buffer_count=9)
    optimizer._configure_tensor_swapping(config, {})
    assert made["swap_config"] is config
    assert (tmp_path / "files").is_dir()


@pytest.mark.parametrize(("swap_optimizer", "component"), [(True, None), (False, "gradients")])
def test_only_gradients_that_stay_in_memory_are_in_the_arena(
    optimizer: Optimizer,
    monkeypatch: pytest.MonkeyPatch,
    swap_optimizer: bool,
    component: str | None,
) -> None:
    upstream(monkeypatch, "_create_fp32_partitions")
    upstream(monkeypatch, "initialize_optimizer_states")
    optimizer.swap_optimizer = swap_optimizer
    optimizer._create_fp32_partitions()
    assert optimizer.attachment.served == [None, "end"]
    optimizer.initialize_optimizer_states()
    assert optimizer.attachment.served[2:] == [component, "end"]
    assert len(optimizer.calls) == 2


def test_at_the_end_buffers_and_the_drives_space_go_back(optimizer: Optimizer) -> None:
    optimizer.add_moments()
    (gradient,) = optimizer.swap_info.get_or_create_gradient_paths([0], [NUMEL])
    keys = [*optimizer.swap_info.get_swap_paths(), gradient]
    assert len(keys) == 4
    for key in keys:
        optimizer.write(key)
    optimizer._discard(optimizer.optimizer_swapper)
    assert optimizer.optimizer_swapper.swap_buffer_manager.all_buffers == []
    store = optimizer.attachment.runtime.store
    assert not any(store.discard(key=key) for key in keys)  # nothing is left of any


def test_without_our_store_stock_keeps_its_files(optimizer: Optimizer) -> None:
    optimizer.attachment.runtime.store = None
    optimizer._discard(optimizer.optimizer_swapper)
    assert optimizer.optimizer_swapper.swap_buffer_manager.all_buffers == ["buffer"]


# -- checkpoints ---------------------------------------------------------------------------------


def test_what_is_stored_has_the_names_of_its_states(optimizer: Optimizer) -> None:
    optimizer.add_moments()
    assert list(optimizer.stored("0_4")) == [
        (None, FP32, "/swap/0_4.tensor.swp"),
        ("exp_avg", FP32, "/swap/exp_avg-0_4.tensor.swp"),
        ("exp_avg_sq", FP32, "/swap/exp_avg_sq-0_4.tensor.swp"),
    ]
    assert list(optimizer.stored("5_5")) == []  # in memory


def test_forgotten_states_leave_the_store_and_weights_stay(optimizer: Optimizer) -> None:
    optimizer.add_moments()
    weights, *moments = optimizer.swap_info.get_swap_paths()
    for key in (weights, *moments):
        optimizer.write(key)
    optimizer.forget_states()
    assert [state for state, *_ in optimizer.stored("0_4")] == [None]
    assert not optimizer.swap_info.has_state_tensors
    store = optimizer.attachment.runtime.store
    assert [store.discard(key=key) for key in (weights, *moments)] == [True, False, False]


class Reader:
    """Bytes of ascending numbers."""

    def __init__(self, numel: int) -> None:
        self.values = torch.arange(float(numel))

    def fill(self, offset: int, target: torch.Tensor) -> None:
        content = torch.cat([self.values, torch.zeros(ALIGNED_NUMEL)]).view(torch.uint8)
        target.copy_(content.narrow(0, offset, target.numel()))


@pytest.mark.parametrize("state", [None, "exp_avg"])
def test_a_tensor_is_loaded_to_where_deepspeeds_swapper_reads_it(
    optimizer: Optimizer, state: str | None
) -> None:
    reader = Reader(NUMEL)
    optimizer.load_tensor(LoadedTensor(0, state, FP32, reader))
    optimizer.attachment.runtime.staging.wait_writes()
    (key,) = [key for name, _, key in optimizer.stored("0_4") if name == state]
    found = torch.empty(ALIGNED_NUMEL)  # swappers read so much
    optimizer.attachment.runtime.store.read(key=key, target=found).wait()
    assert torch.equal(found[:NUMEL], reader.values)
    states = optimizer.optimizer.state[optimizer.fp32_partitioned_groups_flat[0]]
    assert {name: value.numel() for name, value in states.items()} == ({state: 0} if state else {})


def test_a_sub_group_in_memory_takes_tensors_there(optimizer: Optimizer) -> None:
    parameter = optimizer.fp32_partitioned_groups_flat[1]
    optimizer.load_tensor(LoadedTensor(1, None, FP32, Reader(3)))
    optimizer.load_tensor(LoadedTensor(1, "exp_avg", torch.bfloat16, Reader(3)))
    assert parameter.tolist() == [0.0, 1.0, 2.0]
    state = optimizer.optimizer.state[parameter]["exp_avg"]
    assert (state.dtype, state.numel()) == (torch.bfloat16, 3)
