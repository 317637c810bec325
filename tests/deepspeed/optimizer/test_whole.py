"""Steps of whole sub-groups in DeepSpeed's own swapper."""

from __future__ import annotations

import functools
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
from memascend.deepspeed.optimizer import whole
from memascend.deepspeed.optimizer.upstream import Upstream
from memascend.deepspeed.optimizer.whole import WholeSteps
from memascend.errors import StoreError, TornStepError
from tests.support.runtimes import stand_in
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
        self.runtime = stand_in(lock, store=store, io=store, staging=slots)
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


class Whole:
    """One sub-group in DeepSpeed's swapper with two moments, and one too small for a drive."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.attachment: Any = Attachment()
        self.masters = [flat("0_4"), flat("5_5", 3)]
        self.swap_info = OptimizerStateSwapInfo(self.masters[0], NUMEL, "/swap", None)
        self.base: Any = SimpleNamespace(state={parameter: {} for parameter in self.masters})
        self.stage3 = SimpleNamespace(
            swap_optimizer=True,
            device=None,
            timers=None,
            master_weights_and_grads_dtype=FP32,
            fp32_partitioned_groups_flat=self.masters,
            fp16_partitioned_groups_flat_numel=[NUMEL, 3],
            optimizer=self.base,
            optimizer_swapper=SimpleNamespace(
                swap_params_info={"0_4": self.swap_info},
                dtype=FP32,
                swap_buffer_manager=SimpleNamespace(all_buffers=["buffer"]),
                note_gradient_factor=lambda parameter, factor: self.calls.append(
                    (parameter, factor)
                ),
                _io_aligned_numel=lambda numel: ALIGNED_NUMEL,
            ),
            loss_scale=4.0,
            clip_grad=0.0,
            _swappable_optimizer_subgroup=lambda number: number == 0,
        )
        self.steps = WholeSteps(Upstream(self.stage3), lambda: self.attachment)

    @property
    def swapper(self) -> Any:
        return self.stage3.optimizer_swapper

    def stock(self, *call: Any) -> Any:
        """Return a function of DeepSpeed that notes its call."""
        return lambda *arguments: self.calls.append((*call, *arguments))

    def add_moments(self) -> None:
        states = [torch.zeros(0), torch.zeros(0)]
        for name, state in zip(("exp_avg", "exp_avg_sq"), states, strict=True):
            state.ds_id = f"{name}-0_4"  # type: ignore[attr-defined]
        self.swap_info.add_state_tensors(states)

    def write(self, key: str, numel: int = ALIGNED_NUMEL) -> None:
        self.attachment.runtime.store.write(key=key, source=torch.ones(numel)).wait()


@pytest.fixture
def optimizer() -> Whole:
    return Whole()


# -- a step --------------------------------------------------------------------------------------


def test_a_whole_step_leaves_values_that_belong_together(optimizer: Whole) -> None:
    def step() -> None:
        for sub_group in range(2):
            optimizer.steps.step_sub_group(sub_group, optimizer.stock(sub_group))
            assert optimizer.steps.current.is_mixed

    optimizer.steps.step(step)
    optimizer.steps.step(step)
    assert optimizer.calls == [(index,) for index in (0, 1, 0, 1)]
    optimizer.steps.settle()


def test_after_half_a_step_neither_step_nor_save_nor_load_goes_on(optimizer: Whole) -> None:
    def fail() -> None:
        raise StoreError(5, "the drive failed")

    with pytest.raises(StoreError):
        optimizer.steps.step(lambda: optimizer.steps.step_sub_group(0, fail))
    whole_values = (optimizer.steps.settle, optimizer.steps.values.check)
    for refused in (lambda: optimizer.steps.step(fail), *whole_values):
        with pytest.raises(TornStepError, match="load a checkpoint"):
            refused()
    with pytest.raises(TornStepError, match=r"streaming\.optimizer .*restart the program"):
        optimizer.steps.begin_load()


def test_a_load_under_way_is_half_a_step_too(optimizer: Whole) -> None:
    optimizer.steps.begin_load()
    with pytest.raises(TornStepError):
        optimizer.steps.settle()
    optimizer.steps.mend()
    optimizer.steps.settle()


@pytest.mark.parametrize(
    ("clip_grad", "norm", "factor"),
    [(0.0, 1e9, 0.25), (1.0, 2.0, 0.25), (1.0, 40.0, 0.025), (5.0, 40.0, 0.125)],
)
def test_the_factor_is_what_upstream_multiplies_by(
    optimizer: Whole, clip_grad: float, norm: float, factor: float
) -> None:
    optimizer.stage3.clip_grad = clip_grad
    gradient = torch.full((3,), 0.7)
    parameter = SimpleNamespace(grad=gradient.clone())
    optimizer.masters[0] = parameter
    stock = functools.partial(Stock.unscale_and_clip_grads, optimizer.stage3, 0, torch.tensor(norm))
    optimizer.steps.unscale(0, torch.tensor(norm), stock)
    ((noted_for, noted),) = optimizer.calls
    assert noted_for is parameter
    assert float(noted) == pytest.approx(factor, rel=1e-5)
    assert torch.equal(parameter.grad, gradient * noted)


def test_a_gradient_in_memory_needs_no_factor_noted(optimizer: Whole) -> None:
    optimizer.steps.unscale(1, torch.tensor(1.0), optimizer.stock("unscale"))
    assert optimizer.calls == [("unscale",)]


# -- construction and the end --------------------------------------------------------------------


@pytest.mark.parametrize(("pipeline", "count"), [(False, 4), (True, 12)])
def test_deepspeeds_swapper_gets_the_buffers_it_needs_and_its_folder_goes(
    optimizer: Whole,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    pipeline: bool,
    count: int,
) -> None:
    made: dict[str, Any] = {}
    for name in ("SequentialSwapper", "PipelinedSwapper"):
        monkeypatch.setattr(whole, name, lambda name=name, **given: made.update(given, kind=name))
    attachment = optimizer.attachment = Attachment(tmp_path / "files")
    optimizer.stage3.optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    config = DeepSpeedZeroOffloadOptimizerConfig(
        device="nvme", nvme_path="/drive", buffer_count=2, pipeline_read=pipeline
    )
    optimizer.steps.configure(config, {"block_size": 1})
    assert made["kind"] == ("PipelinedSwapper" if pipeline else "SequentialSwapper")
    assert made["swap_config"].buffer_count == count
    assert made["swap_config"].pipeline == pipeline
    assert (made["base_folder"], made["largest_numel"]) == (str(tmp_path / "files"), NUMEL)
    assert attachment.served == ["optimizer buffers", "end"]
    assert list(tmp_path.iterdir()) == []
    assert config.buffer_count == 2


def test_more_buffers_than_needed_stay_and_without_our_store_the_folder_does(
    optimizer: Whole, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: dict[str, Any] = {}
    monkeypatch.setattr(whole, "SequentialSwapper", lambda **given: made.update(given))
    optimizer.attachment = Attachment(tmp_path / "files")
    optimizer.attachment.runtime.store = None
    optimizer.stage3.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    config = DeepSpeedZeroOffloadOptimizerConfig(device="nvme", nvme_path="/d", buffer_count=9)
    optimizer.steps.configure(config, {})
    assert made["swap_config"] is config
    assert (tmp_path / "files").is_dir()


@pytest.mark.parametrize(("swap_optimizer", "component"), [(True, None), (False, "gradients")])
def test_only_gradients_that_stay_in_memory_are_in_the_arena(
    optimizer: Whole, swap_optimizer: bool, component: str | None
) -> None:
    optimizer.stage3.swap_optimizer = swap_optimizer
    optimizer.steps.create_masters(optimizer.stock("masters"))
    assert optimizer.attachment.served == [None, "end"]
    optimizer.steps.initialize_states(optimizer.stock("states"))
    assert optimizer.attachment.served[2:] == [component, "end"]
    assert optimizer.calls == [("masters",), ("states",)]


def test_at_the_end_buffers_and_the_drives_space_go_back(optimizer: Whole) -> None:
    optimizer.add_moments()
    (gradient,) = optimizer.swap_info.get_or_create_gradient_paths([0], [NUMEL])
    keys = [*optimizer.swap_info.get_swap_paths(), gradient]
    assert len(keys) == 4
    for key in keys:
        optimizer.write(key)
    optimizer.steps.discard(optimizer.swapper)
    assert optimizer.swapper.swap_buffer_manager.all_buffers == []
    store = optimizer.attachment.runtime.store
    assert not any(store.discard(key=key) for key in keys)  # nothing is left of any


def test_without_our_store_stock_keeps_its_files(optimizer: Whole) -> None:
    optimizer.attachment.runtime.store = None
    optimizer.steps.discard(optimizer.swapper)
    assert optimizer.swapper.swap_buffer_manager.all_buffers == ["buffer"]


# -- checkpoints ---------------------------------------------------------------------------------


def test_what_is_stored_has_the_names_of_its_states(optimizer: Whole) -> None:
    optimizer.add_moments()
    found = [(*named, read.keywords["key"]) for *named, read in optimizer.steps.stored("0_4")]
    assert found == [
        (None, FP32, "/swap/0_4.tensor.swp"),
        ("exp_avg", FP32, "/swap/exp_avg-0_4.tensor.swp"),
        ("exp_avg_sq", FP32, "/swap/exp_avg_sq-0_4.tensor.swp"),
    ]
    assert list(optimizer.steps.stored("5_5")) == []  # in memory


def test_forgotten_states_leave_the_store_and_weights_stay(optimizer: Whole) -> None:
    optimizer.add_moments()
    weights, *moments = optimizer.swap_info.get_swap_paths()
    for key in (weights, *moments):
        optimizer.write(key)
    optimizer.steps.discard_states()
    assert [state for state, *_ in optimizer.steps.stored("0_4")] == [None]
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
    optimizer: Whole, state: str | None
) -> None:
    reader = Reader(NUMEL)
    optimizer.steps.load_tensor(LoadedTensor(0, state, FP32, reader))
    optimizer.attachment.runtime.staging.wait_writes()
    (read,) = [read for name, _, read in optimizer.steps.stored("0_4") if name == state]
    key = read.keywords["key"]
    found = torch.empty(ALIGNED_NUMEL)  # swappers read so much
    optimizer.attachment.runtime.store.read(key=key, target=found).wait()
    assert torch.equal(found[:NUMEL], reader.values)
    states = optimizer.base.state[optimizer.masters[0]]
    assert {name: value.numel() for name, value in states.items()} == ({state: 0} if state else {})


def test_a_sub_group_in_memory_takes_tensors_there(optimizer: Whole) -> None:
    parameter = optimizer.masters[1]
    optimizer.steps.load_tensor(LoadedTensor(1, None, FP32, Reader(3)))
    optimizer.steps.load_tensor(LoadedTensor(1, "exp_avg", torch.bfloat16, Reader(3)))
    assert parameter.tolist() == [0.0, 1.0, 2.0]
    state = optimizer.base.state[parameter]["exp_avg"]
    assert (state.dtype, state.numel()) == (torch.bfloat16, 3)


@pytest.mark.parametrize("uses_muon", [True, False])
def test_an_end_among_updates_of_matrices_tears_the_step(uses_muon: bool) -> None:
    """An update would be taken for a gradient by the next step."""
    optimizer = Whole()
    optimizer.stage3.fp16_groups = [[SimpleNamespace(use_muon=uses_muon)], []]

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimizer.steps.step(lambda: optimizer.steps.update_matrices(interrupt))
    assert optimizer.steps.current.is_mixed == uses_muon
    if not uses_muon:
        optimizer.steps.step(lambda: None)
        return
    with pytest.raises(TornStepError):
        optimizer.steps.step(lambda: None)
