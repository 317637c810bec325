"""Tensors that forward saves are what they were in backward, and what should stay stays."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memascend.streaming.activations.hooks import SavedTensors, Stored, without_hooks
from tests.support.activation_streams import activation_stream, keys, numbers

CPU = torch.device("cpu")


def is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


@pytest.fixture
def saved() -> Iterator[SavedTensors]:
    stream = activation_stream()
    yield SavedTensors(stream, min_bytes=1024, device=CPU, is_of_model=is_parameter)
    gc.collect()
    assert keys(stream) == []
    assert stream.count == 0


def packed_and_back(saved: SavedTensors, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Save some in this order, and some more so that they go to the drive; take them back."""
    packed = [saved.pack(tensor) for tensor in tensors]
    others = [saved.pack(numbers(seed)) for seed in range(9)]
    found = [saved.unpack(one) for one in reversed(packed)]
    del others
    return found[::-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_views_come_back_as_views_of_one_storage(saved: SavedTensors, dtype: torch.dtype) -> None:
    whole = torch.randint(0, 2, (40, 50, 3), generator=torch.Generator().manual_seed(1)).to(dtype)
    views = [whole, whole.transpose(0, 2), whole[10:30], whole.reshape(-1)[5:-7:2]]
    found = packed_and_back(saved, *views)
    for view, other in zip(views, found, strict=True):
        assert torch.equal(view, other)
        assert view.dtype == other.dtype
        assert view.stride() == other.stride()
        assert view.storage_offset() == other.storage_offset()
    assert len({one.untyped_storage().data_ptr() for one in found}) == 1
    assert found[0].data_ptr() != whole.data_ptr()
    assert saved.stream.traffic.count == 10


class Subclass(torch.Tensor):
    """A tensor of which nobody knows what it has besides its storage."""


def staying() -> dict[str, Callable[[], torch.Tensor]]:
    parameter = nn.Parameter(torch.randn(64, 64))
    return {
        "small": lambda: torch.randn(255),
        "parameter": lambda: parameter,
        "view of a parameter": lambda: parameter.t()[3:60],
        "parameter in another dtype": lambda: parameter.t().bfloat16(),
        "little of its storage": lambda: torch.randn(4096)[:1000],
        "subclass": lambda: torch.randn(64, 64).as_subclass(Subclass),
        "sparse": lambda: torch.eye(64).to_sparse(),
        "conjugate": lambda: torch.randn(64, 64, dtype=torch.complex64).conj(),
        "nested": lambda: torch.nested.nested_tensor([torch.randn(9, 99), torch.randn(7, 99)]),
        "other device": lambda: torch.empty(64, 64, device="meta"),
    }


@pytest.mark.parametrize("name", list(staying()))
def test_what_should_stay_stays(saved: SavedTensors, name: str) -> None:
    tensor = staying()[name]()
    packed = saved.pack(tensor)
    assert not isinstance(packed, Stored)
    found = saved.unpack(packed)
    assert (found is tensor) == (tensor.is_leaf)
    if tensor.device == CPU and tensor.layout is torch.strided and not tensor.is_nested:
        assert found.data_ptr() == tensor.data_ptr()
    assert saved.stream.traffic.count == 0


def test_a_storage_is_saved_once_as_long_as_it_is_not_changed(saved: SavedTensors) -> None:
    with saved.hooks():
        tensor = numbers(0)
        packed = [saved.pack(tensor), saved.pack(tensor.view(50, 100))]
        assert saved.stream.traffic.count == 1
        before = tensor.clone()
        found = saved.unpack(packed[0]).clone()
        assert torch.equal(found, before)
        packed.clear()
        packed.append(saved.pack(tensor))  # nobody has the first any more
        assert saved.stream.traffic.count == 2
        tensor.add_(1)
        packed.append(saved.pack(tensor))
        assert saved.stream.traffic.count == 3
        assert torch.equal(saved.unpack(packed[1]), before + 1)


@pytest.mark.parametrize("is_leaf", [True, False])
def test_what_stays_and_is_modified_is_refused(saved: SavedTensors, is_leaf: bool) -> None:
    tensor = torch.randn(100) if is_leaf else torch.randn(100, requires_grad=True) * 2
    packed = saved.pack(tensor)
    with torch.no_grad():
        tensor.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.unpack(packed)


# -- a training ------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Attention and a dense part, as far as what they save is concerned."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.qkv = nn.Linear(32, 96)
        self.out = nn.Linear(32, 32)
        self.dense = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1))
        self.down = nn.Linear(128, 32)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm(hidden)).view(*hidden.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(hidden.shape))
        return hidden + self.down(self.dense(hidden))


class Model(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.how == "nested":
                hidden = checkpoint(self.checkpointed, layer, hidden, use_reentrant=False)
            elif self.how == "none":
                hidden = layer(hidden)
            else:
                hidden = checkpoint(layer, hidden, use_reentrant=self.how == "reentrant")
        return hidden.square().mean()

    def checkpointed(self, layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, hidden, use_reentrant=False)


def train(
    how: str, saved: SavedTensors | None, *, passes: int = 1, retain: bool = False
) -> list[torch.Tensor]:
    """Every gradient and the loss, after several forward passes before one backward pass."""
    model = Model(how)
    inputs = [numbers(seed, 4096).view(2, 64, 32).requires_grad_() for seed in range(passes)]
    torch.manual_seed(1)
    losses = []
    for one in inputs:
        with saved.hooks() if saved is not None else contextlib.nullcontext():
            losses.append(model(one))
    loss = torch.stack(losses).sum()
    if retain:
        loss.backward(retain_graph=True)
    loss.backward()
    gradients = [parameter.grad for parameter in (*model.parameters(), *inputs)]
    assert all(gradient is not None for gradient in gradients)
    return [loss.detach(), *gradients]  # type: ignore[list-item]


@pytest.mark.parametrize("how", ["none", "reentrant", "nonreentrant", "nested"])
@pytest.mark.parametrize("changes", [{}, {"passes": 3}, {"retain": True}], ids=str)
def test_gradients_are_those_without_hooks(
    saved: SavedTensors, how: str, changes: dict[str, Any]
) -> None:
    if how == "reentrant" and changes.get("retain"):
        changes = {}  # autograd itself refuses the second pass
    expected = train(how, None, **changes)
    found = train(how, saved, **changes)
    assert all(map(torch.equal, found, expected))
    traffic = saved.stream.traffic
    assert traffic.count >= 4
    assert 0 < traffic.written_bytes <= traffic.saved_bytes
    if "retain" not in changes:
        assert traffic.read_bytes <= traffic.written_bytes


def test_a_graph_that_is_dropped_leaves_nothing(saved: SavedTensors) -> None:
    model = Model("none")
    for seed in range(3):
        with saved.hooks():
            loss = model(numbers(seed, 4096).view(2, 64, 32))
    del loss
    assert keys(saved.stream) == []
    assert saved.stream.count == 0
    assert train("none", saved)


def test_a_forward_pass_that_fails_leaves_nothing(saved: SavedTensors) -> None:
    model = Model("none")
    model.layers.append(nn.Linear(7, 7))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), saved.hooks():
        model(numbers(0, 4096).view(2, 64, 32))
    assert keys(saved.stream) == []
    assert saved.stream.count == 0
    expected = train("nonreentrant", None)
    assert all(map(torch.equal, train("nonreentrant", saved), expected))


def test_a_compiled_model_does_not_compile_the_hooks(saved: SavedTensors) -> None:
    frames = []
    for around in (contextlib.nullcontext, saved.hooks):
        torch._dynamo.reset()

        @torch.compiler.disable(recursive=False)
        def apart(hidden: torch.Tensor) -> torch.Tensor:
            return hidden.exp().tanh()

        compiled = torch.compile(lambda hidden, apart=apart: apart(hidden * 2) + 1, backend="eager")
        hidden = numbers(0).requires_grad_()
        torch._dynamo.utils.counters.clear()
        with around():
            loss = compiled(hidden).sum()
        loss.backward()
        frames.append(torch._dynamo.utils.counters["frames"]["total"])
    assert frames[0] == frames[1] > 0
    assert saved.stream.traffic.count > 0


def test_outside_the_block_nothing_is_saved(saved: SavedTensors) -> None:
    with saved.hooks():
        pass
    train("none", None)
    with saved.hooks(), torch.no_grad():
        Model("none")(numbers(0, 4096).view(2, 64, 32))
    assert saved.stream.traffic.count == 0


def test_hooks_that_were_set_aside_are_set_again_whatever_happens() -> None:
    packed: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.numel())
        return tensor

    def save(numel: int) -> None:
        torch.ones(numel, requires_grad=True).exp()

    def fail() -> None:
        with without_hooks():
            save(2)
            raise RuntimeError("within")

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with pytest.raises(RuntimeError, match="within"):
            fail()
        save(3)
    assert packed == [3]
