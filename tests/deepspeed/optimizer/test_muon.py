"""Muon's updates, matrix by matrix, beside those that DeepSpeed's function makes of whole ones."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from memascend.base.interfaces import Device
from memascend.deepspeed.optimizer.muon import MuonUpdates, uses_muon
from memascend.memory.guard import Guard
from memascend.plan.optimizers import MOMENTUM
from memascend.streaming.gradients.on_device import GradientsOnDevice
from tests.support.tiled_training import SIZES, Training

BF16, FP32 = torch.bfloat16, torch.float32
ROWS, COLUMNS = 7, 11
NUMEL = ROWS * COLUMNS


@pytest.fixture(autouse=True)
def plain_update(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """DeepSpeed's signature, and arithmetic that shows whole matrices: no kernels are compiled."""
    from deepspeed.runtime.zero.muon import original_muon

    calls: list[dict[str, Any]] = []

    def muon_update(gradient: torch.Tensor, momentum: torch.Tensor, **options: Any) -> torch.Tensor:
        calls.append(options | {"shape": tuple(gradient.shape)})
        momentum.lerp_(gradient, 1 - options["beta"])
        return gradient / (momentum.norm() + 1)

    monkeypatch.setattr(original_muon, "muon_update", muon_update)
    return calls


class Rank:
    """A rank that has one part of each of two matrices, and the other ranks' parts at hand."""

    def __init__(
        self, rank: int = 0, world: int = 1, *, device: Device | None = None, **changes: Any
    ) -> None:
        device = device or Device()
        self.on_device = GradientsOnDevice(device, Guard(threading.RLock()))
        self.training = Training(lambda params: torch.optim.SGD(params, lr=1.0))
        self.part_numel = -(-NUMEL // world)
        self.others: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        self.norms: dict[int, torch.Tensor] = {}
        shape = torch.Size((ROWS, COLUMNS))
        self.params = [
            SimpleNamespace(
                number=number,
                use_muon=True,
                ds_numel=NUMEL,
                ds_shape=shape,
                partition_numel=lambda: self.part_numel,
            )
            for number in range(2)
        ]
        names = list(SIZES)
        self.upstream: Any = SimpleNamespace(
            accumulation_dtype=BF16,
            reduction_dtype=BF16,
            master_dtype=FP32,
            loss_scale=1.0,
            params=[[], self.params, [SimpleNamespace(use_muon=False)]],
            masters=[SimpleNamespace(ds_id=name) for name in names],
            position_of=lambda param: (1, param.number * self.part_numel, self.part_numel),
            part_begin=lambda param, numel: rank * numel,
            hyperparameters=lambda number: {"momentum": 0.5, "ns_method": "standard"},
            gather_matrix=self._gather,
            note_norm=lambda param, norm: self.norms.__setitem__(param.number, norm),
        )
        for name, value in changes.items():
            setattr(self.upstream, name, value)
        self.rank = rank
        runtime: Any = SimpleNamespace(
            optimizer=self.training.stream,
            gradients=self.training.gradient_stream,
            staging=self.training.slots,
            device=device,
            on_device=self.on_device,
        )
        self.updates = MuonUpdates(self.upstream, runtime, None)
        self.group = self.training.groups.group(names[1])
        self.group.apart = frozenset(self.training.groups.apart)
        self.training.groups.add_state(names[1], MOMENTUM, self.updates.momentum_dtype, 0.0)

    def put(self, number: int, whole: torch.Tensor) -> None:
        self.training.gradient_stream.put(
            self.group.name, number * self.part_numel, self.part(whole)
        )

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        flat = torch.zeros(2 * NUMEL, dtype=whole.dtype)
        flat[:NUMEL] = whole.flatten()
        return flat.narrow(0, self.rank * self.part_numel, self.part_numel).clone()

    def _gather(self, param: Any, *parts: torch.Tensor) -> list[torch.Tensor]:
        if self.part_numel == NUMEL:
            return [part.view(param.ds_shape) for part in parts]
        whole = []
        for part, others in zip(parts, self.others[param.number], strict=True):
            every = list(others)
            every.insert(self.rank, part)
            whole.append(torch.cat(every)[:NUMEL].view(param.ds_shape))
        return whole

    def read(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The update and the momentum that the walk and the next step see."""
        begin = number * self.part_numel
        found = [torch.empty(self.part_numel) for _ in range(2)]
        self.training.gradient_stream.get(self.group.name, begin, found[0])
        self.training.groups.get(self.group.name, begin, found[1], state=MOMENTUM)
        return found[0], found[1]


def gradients(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(ROWS, COLUMNS, generator=generator).bfloat16() for _ in range(2)]


def expected(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Update and momentum of each matrix, of whole ones in memory."""
    momenta = [torch.zeros(ROWS, COLUMNS, dtype=BF16) for _ in range(2)]
    updates = []
    for step in range(steps):
        updates = [gradient.clone() for gradient in gradients(step)]
        for update, momentum in zip(updates, momenta, strict=True):
            momentum.lerp_(update, 0.5)
            update.div_(momentum.norm() + 1)
    return list(zip(updates, momenta, strict=True))


def test_momentum_lives_from_step_to_step_and_each_update_is_of_a_whole_matrix(
    plain_update: list[dict[str, Any]],
) -> None:
    rank = Rank()
    for step in range(3):
        for number, gradient in enumerate(gradients(step)):
            rank.put(number, gradient)
        rank.updates.update_all()
    for number, (update, momentum) in enumerate(expected(3)):
        for found, whole in zip(rank.read(number), (update, momentum), strict=True):
            assert torch.equal(found, whole.flatten().float())
        assert torch.equal(rank.norms[number].float(), update.double().norm().float())
    assert {call["shape"] for call in plain_update} == {(ROWS, COLUMNS)}
    assert plain_update[0]["ns_method"] == "standard"
    assert plain_update[0]["is_expert_group"] is False
    assert plain_update[0]["num_heads"] is None


def test_ranks_write_their_own_parts_and_zeros_behind_the_end() -> None:
    """77 elements on two ranks: the second has 38 and one of padding."""
    ranks = [Rank(number, 2) for number in range(2)]
    for number, gradient in enumerate(gradients(0)):
        for rank in ranks:
            rank.put(number, gradient)
    for rank, other in (ranks, ranks[::-1]):
        zeros = torch.zeros(rank.part_numel, dtype=BF16)
        rank.others = [([other.part(gradient)], [zeros]) for gradient in gradients(0)]
        rank.updates.update_all()
    for number, values in enumerate(expected(1)):
        for found, whole in zip(
            zip(*(rank.read(number) for rank in ranks), strict=True), values, strict=True
        ):
            assert torch.equal(torch.cat(found)[:NUMEL], whole.flatten().float())
            assert torch.cat(found)[NUMEL:].tolist() == [0.0]
        norm = torch.stack([rank.norms[number] for rank in ranks]).norm()
        assert torch.allclose(norm.float(), values[0].float().norm())


class Passed:
    """An event of a device that is always done."""

    def record(self) -> None: ...
    def wait(self) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


def with_streams(log: list[str]) -> Device:
    """Return a device whose work on its second stream is logged."""

    @contextmanager
    def on_stream() -> Iterator[None]:
        log.append("aside")
        yield
        log.append("back")

    return Device(new_event=Passed, new_stream=lambda: on_stream)


@pytest.mark.parametrize(
    ("room_bytes", "order"),
    [
        (4 * NUMEL, ["read", "update", "aside", "read", "back", "write", "update", "write"]),
        (4 * NUMEL - 1, ["read", "update", "write", "read", "update", "write"]),
    ],
)
def test_the_next_matrix_is_read_while_one_is_computed_if_the_room_has_both_values(
    monkeypatch: pytest.MonkeyPatch, room_bytes: int, order: list[str]
) -> None:
    from deepspeed.runtime.zero.muon import original_muon

    log: list[str] = []
    rank = Rank(device=with_streams(log))
    rank.on_device.room_bytes = room_bytes

    def logged(word: str, call: Any) -> Any:
        def log_and_call(*arguments: Any, **keywords: Any) -> Any:
            log.append(word)
            return call(*arguments, **keywords)

        return log_and_call

    stream = rank.updates._stream
    monkeypatch.setattr(stream, "_fill", logged("read", stream._fill))
    monkeypatch.setattr(stream, "write", logged("write", stream.write))
    monkeypatch.setattr(original_muon, "muon_update", logged("update", original_muon.muon_update))
    for number, gradient in enumerate(gradients(0)):
        rank.put(number, gradient)
    rank.updates.update_all()
    assert log == order
    assert rank.on_device.bytes_peak == (4 * NUMEL if "aside" in order else 0)
    for number, values in enumerate(expected(1)):
        for found, whole in zip(rank.read(number), values, strict=True):
            assert torch.equal(found, whole.flatten().float())


def test_a_loss_scale_is_taken_out_before_and_put_back_behind() -> None:
    scaled, plain = Rank(loss_scale=8.0), Rank()
    for number, gradient in enumerate(gradients(0)):
        scaled.put(number, gradient * 8)
        plain.put(number, gradient)
    scaled.updates.update_all()
    plain.updates.update_all()
    for number in range(2):
        (update, momentum), (other, same) = scaled.read(number), plain.read(number)
        assert torch.equal(update, other * 8)
        assert torch.equal(momentum, same)
        assert torch.equal(scaled.norms[number], plain.norms[number] * 8)


@pytest.mark.parametrize(
    ("accumulated", "communicated", "kept"),
    [(BF16, BF16, BF16), (BF16, FP32, BF16), (FP32, BF16, BF16), (FP32, FP32, FP32)],
)
def test_momentum_is_stored_in_a_dtype_that_loses_nothing(
    accumulated: torch.dtype, communicated: torch.dtype, kept: torch.dtype
) -> None:
    """DeepSpeed rounds it to both dtypes between two steps."""
    rank = Rank(accumulation_dtype=accumulated, reduction_dtype=communicated)
    assert rank.updates.momentum_dtype == kept


def test_only_sub_groups_of_matrices_are_updated() -> None:
    for flags, expectation in (((), False), ((False, False), False), ((True, True), True)):
        assert uses_muon([SimpleNamespace(use_muon=flag) for flag in flags]) is expectation
    assert not uses_muon([SimpleNamespace()])
    rank = Rank()
    rank.updates.update_all()
    others = [name for name, _ in itertools.islice(SIZES.items(), 3) if name != rank.group.name]
    assert all(not rank.training.groups.group(name).states for name in others)
