"""Which of DeepSpeed's host buffers come from our memory, and how large they are there."""

from __future__ import annotations

import io

import pytest
import torch

pytest.importorskip("deepspeed")

from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

from memascend.base.interfaces import HostMemory
from memascend.deepspeed.stock.host_buffers import (
    CHUNK_BYTES,
    SHARED_BYTES_MAX,
    AbsentBuffers,
    HostBuffers,
)

LARGE_NUMEL = SHARED_BYTES_MAX  # of float32: four times too large to share
HOST = OffloadDeviceEnum.cpu


class RecordingMemory(HostMemory):
    """Gives plain tensors filled with a mark, and remembers what was asked."""

    MARK = 0xAB

    def __init__(self) -> None:
        self.requests: list[tuple[int, str]] = []
        self.tensors: list[torch.Tensor] = []

    def allocate(self, nbytes: int, *, component: str, zero: bool) -> torch.Tensor:
        self.requests.append((nbytes, component))
        self.tensors.append(torch.full((nbytes,), 0 if zero else self.MARK, dtype=torch.uint8))
        return self.tensors[-1]

    def contains(self, tensor: torch.Tensor) -> bool:
        address = tensor.data_ptr()
        return any(t.data_ptr() <= address < t.data_ptr() + t.nbytes for t in self.tensors)


@pytest.fixture
def memory() -> RecordingMemory:
    return RecordingMemory()


@pytest.fixture
def host_buffers(memory: RecordingMemory) -> HostBuffers:
    return HostBuffers(memory)


def test_a_large_host_buffer_is_ours_at_its_exact_size(
    memory: RecordingMemory, host_buffers: HostBuffers
) -> None:
    with host_buffers("gradients"):
        tensor = torch.zeros(LARGE_NUMEL + 1, dtype=torch.float32, device=HOST)
    assert memory.requests == [((LARGE_NUMEL + 1) * 4, "gradients")]
    assert memory.contains(tensor)
    assert tensor.shape == (LARGE_NUMEL + 1,)
    assert tensor.count_nonzero() == 0


def test_memory_without_a_device_is_host_memory(
    memory: RecordingMemory, host_buffers: HostBuffers
) -> None:
    with host_buffers("gradients"):
        tensor = torch.empty(LARGE_NUMEL, dtype=torch.bfloat16)
    assert memory.contains(tensor)
    assert tensor.dtype is torch.bfloat16


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "meta"])
def test_a_device_given_by_name_is_the_accelerators_and_left_alone(
    memory: RecordingMemory, host_buffers: HostBuffers, device: object
) -> None:
    """On the CPU accelerator both are CPU tensors; only DeepSpeed's enum means host memory."""
    with host_buffers("gradients"):
        torch.zeros(LARGE_NUMEL, device=device)  # type: ignore[arg-type]
    assert memory.requests == []


def test_the_default_dtype_is_followed(memory: RecordingMemory, host_buffers: HostBuffers) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with host_buffers("gradients"):
            tensor = torch.zeros(LARGE_NUMEL, device=HOST)
    finally:
        torch.set_default_dtype(torch.float32)
    assert tensor.dtype is torch.float64
    assert memory.requests == [(LARGE_NUMEL * 8, "gradients")]


def test_other_forms_are_torchs(memory: RecordingMemory, host_buffers: HostBuffers) -> None:
    with host_buffers("gradients"):
        two_dimensional = torch.zeros(300, 300)
        from_shape = torch.zeros((LARGE_NUMEL,))
        with_gradient = torch.zeros(LARGE_NUMEL, requires_grad=True)
        pinned_by_name = torch.empty(LARGE_NUMEL, layout=torch.strided)
        empty = torch.zeros(0)
        other = torch.ones(LARGE_NUMEL)
    assert memory.requests == []
    assert two_dimensional.shape == (300, 300)
    assert from_shape.numel() == pinned_by_name.numel() == LARGE_NUMEL
    assert with_gradient.requires_grad
    assert empty.numel() == 0
    assert other[0] == 1


def test_outside_torch_allocates(memory: RecordingMemory, host_buffers: HostBuffers) -> None:
    with host_buffers("gradients"):
        pass
    torch.zeros(LARGE_NUMEL, device=HOST)
    torch.zeros(LARGE_NUMEL)
    assert memory.requests == []


# -- components ----------------------------------------------------------------------------------


def test_components_nest(memory: RecordingMemory, host_buffers: HostBuffers) -> None:
    with host_buffers("outer"):
        torch.empty(LARGE_NUMEL)
        with host_buffers("inner"):
            torch.empty(LARGE_NUMEL)
        torch.empty(LARGE_NUMEL)
    torch.empty(LARGE_NUMEL)
    assert [component for _, component in memory.requests] == ["outer", "inner", "outer"]


def test_an_exception_leaves_the_component_as_it_was(
    memory: RecordingMemory, host_buffers: HostBuffers
) -> None:
    with host_buffers("outer"):
        with pytest.raises(RuntimeError), host_buffers("inner"):
            raise RuntimeError
        torch.empty(LARGE_NUMEL)
    assert [component for _, component in memory.requests] == ["outer"]
    torch.empty(LARGE_NUMEL)
    assert len(memory.requests) == 1


# -- small buffers -------------------------------------------------------------------------------


def test_small_buffers_share_a_chunk_and_not_their_bytes(
    memory: RecordingMemory, host_buffers: HostBuffers
) -> None:
    with host_buffers("small"):
        tensors = [torch.empty(numel, dtype=torch.bfloat16) for numel in (1, 7, 100, 3)]
        for index, tensor in enumerate(tensors):
            tensor.fill_(index)
    assert memory.requests == [(CHUNK_BYTES, "small")]
    assert [tensor.unique().tolist() for tensor in tensors] == [[0], [1], [2], [3]]
    assert [tensor.numel() for tensor in tensors] == [1, 7, 100, 3]
    assert all(tensor.data_ptr() % 64 == tensors[0].data_ptr() % 64 for tensor in tensors)


def test_small_buffers_of_several_dtypes_can_be_saved(host_buffers: HostBuffers) -> None:
    """torch.save refuses tensors of one storage that see it as different types."""
    with host_buffers("small"):
        table = torch.empty(3, dtype=torch.int64).fill_(1 << 40)
        mask = torch.zeros(5, dtype=torch.bool)
    file = io.BytesIO()
    torch.save([table, mask], file)
    assert len(file.getvalue()) < 4096  # their own bytes, not all of the chunk
    file.seek(0)
    for found, given in zip(torch.load(file), (table, mask), strict=True):
        assert found.dtype == given.dtype
        assert torch.equal(found, given)


def test_a_full_chunk_is_followed_by_another(
    memory: RecordingMemory, host_buffers: HostBuffers
) -> None:
    count = CHUNK_BYTES // SHARED_BYTES_MAX
    with host_buffers("small"):
        tensors = [torch.empty(SHARED_BYTES_MAX, dtype=torch.uint8) for _ in range(count + 1)]
        for index, tensor in enumerate(tensors):
            tensor.fill_(index)
    assert memory.requests == [(CHUNK_BYTES, "small")] * 2
    assert [tensor[-1].item() for tensor in tensors] == list(range(count + 1))


def test_zeros_of_a_small_buffer_are_zero_without_touching_its_neighbours(
    memory: RecordingMemory, host_buffers: HostBuffers
) -> None:
    with host_buffers("small"):
        left = torch.empty(16).fill_(1)
        middle = torch.zeros(16)
        right = torch.empty(16).fill_(2)
        zeros = torch.zeros(16)
    assert middle.tolist() == zeros.tolist() == [0.0] * 16
    assert left.tolist() == [1.0] * 16
    assert right.tolist() == [2.0] * 16


@pytest.mark.parametrize(("more", "shares"), [(0, True), (1, False)])
def test_the_limit_of_sharing_is_inclusive(
    memory: RecordingMemory, host_buffers: HostBuffers, more: int, shares: bool
) -> None:
    with host_buffers("small"):
        torch.empty(SHARED_BYTES_MAX + more, dtype=torch.uint8)
    expected = CHUNK_BYTES if shares else SHARED_BYTES_MAX + more
    assert memory.requests == [(expected, "small")]


# -- absent buffers ------------------------------------------------------------------------------


def test_an_absent_buffer_is_one_element_seen_many_times() -> None:
    with AbsentBuffers(torch.empty, {1000}):
        tensor = torch.empty(1000, dtype=torch.bfloat16, device=HOST)
        assert tensor.pin_memory() is tensor
    assert (tensor.shape, tensor.dtype) == ((1000,), torch.bfloat16)
    assert tensor.untyped_storage().nbytes() == 2


def test_other_sizes_other_functions_and_memory_of_ours_are_real() -> None:
    """Memory of ours may have any size, also that of a buffer of DeepSpeed."""
    with AbsentBuffers(torch.empty, {1000}):
        tensors = [
            torch.empty(999, device=HOST),
            torch.zeros(1000, device=HOST),
            torch.empty(1000),
            torch.empty(1000, device="cpu"),
        ]
    nbytes = [tensor.untyped_storage().nbytes() for tensor in tensors]
    assert nbytes == [999 * 4, 4000, 4000, 4000]
