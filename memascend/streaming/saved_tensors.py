"""Which of the tensors that autograd saves go to the drive, and how they come back as they were.

Hooks for what forward saves for backward, checkpoints' inputs included. A tensor stands for its
storage: all that share one share what is on the drive, and what comes back is one storage again.
Knows torch; never DeepSpeed: the caller says what belongs to the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from memascend.streaming.activation_records import Activation, modified_error
from memascend.streaming.activations import ActivationStream

#: A tensor that covers less of its storage stays: the rest may be somebody's for good.
SHARE_MIN = 1 / 4
#: What makes of a parameter something else with the same values, by autograd's names.
_SAME_VALUES = (
    "AliasBackward0",
    "AsStridedBackward0",
    "CloneBackward0",
    "ExpandBackward0",
    "PermuteBackward0",
    "ReshapeAliasBackward0",
    "SelectBackward0",
    "SliceBackward0",
    "SplitBackward0",
    "SqueezeBackward1",
    "TBackward0",
    "ToCopyBackward0",
    "TransposeBackward0",
    "UnsafeViewBackward0",
    "UnsqueezeBackward0",
    "ViewBackward0",
)


@dataclass(eq=False)
class Stored:
    """A tensor whose storage was given away."""

    storage: _SharedStorage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_taken: bool = False


@dataclass(eq=False)
class _SharedStorage:
    """A storage that was given away, and those who have a part in it."""

    activation: Activation
    version: int
    parts: list[weakref.ref[Stored]] = field(default_factory=list)

    def is_wanted(self) -> bool:
        """Return whether somebody is still to take a part."""
        return any((part := found()) is not None and not part.is_taken for found in self.parts)


@dataclass(slots=True, eq=False)
class _Left:
    """A tensor that stays where it is."""

    tensor: torch.Tensor
    version: int | None  # None where there are none


Packed = Stored | _Left


class SavedTensors:
    """Hooks around the forward passes of one model. Its threads may unpack at once."""

    def __init__(
        self,
        stream: ActivationStream,
        *,
        min_bytes: int,
        device: torch.device,
        is_of_model: Callable[[torch.Tensor], bool],
    ) -> None:
        """Begin with nothing saved.

        Args:
            stream: Where storages go.
            min_bytes: Smaller ones stay.
            device: What is on another one stays.
            is_of_model: Tells parameters, and what else lives as long as the model.
        """
        self.stream = stream
        self._min_bytes = min_bytes
        self._device = device
        self._is_of_model = is_of_model
        self._known: dict[int, tuple[StorageWeakRef, weakref.ref[_SharedStorage]]] = {}

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Give storages away that are saved by what runs in this block and has no other hooks."""
        # A compiled model's forward would compile whatever Python runs within it.
        pack, unpack = map(torch.compiler.disable, (self.pack, self.unpack))
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                yield
        finally:
            self._known.clear()

    def pack(self, tensor: torch.Tensor) -> Packed:
        """Return what stands for a tensor until backward.

        Raises:
            StoreError: The drive failed.
        """
        return self.pack_if_it_goes(tensor) or _leave(tensor)

    def pack_if_it_goes(self, tensor: torch.Tensor) -> Stored | None:
        """Return what stands for a tensor that goes to the drive; None for one that stays.

        Raises:
            StoreError: The drive failed.
        """
        if not self._goes(tensor):
            return None
        storage = self._shared(tensor)
        stored = Stored(
            storage, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset())
        )
        storage.parts.append(weakref.ref(stored))
        return stored

    def unpack(self, packed: Packed) -> torch.Tensor:
        """Return the tensor as it was saved: dtype, shape, strides, and whom it shares bytes with.

        Raises:
            StoreError: The drive failed.
            RuntimeError: It was modified in place since then.
        """
        if isinstance(packed, _Left):
            return _unchanged(packed)
        storage = packed.storage
        data = self.stream.take(storage.activation)
        tensor = torch.empty(0, dtype=packed.dtype, device=data.device)
        tensor.set_(data.untyped_storage(), packed.offset, packed.size, packed.stride)
        packed.is_taken = True
        if not storage.is_wanted():
            self.stream.release(storage.activation)
        return tensor

    # -- inner -----------------------------------------------------------------------------------

    def _goes(self, tensor: torch.Tensor) -> bool:
        is_plain = (
            type(tensor) is torch.Tensor
            and tensor.device == self._device
            and tensor.layout is torch.strided
            and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
            and not tensor.is_nested
            and not tensor.is_inference()
        )
        if not is_plain or tensor.nbytes < self._min_bytes * SHARE_MIN:
            return False
        nbytes = tensor.untyped_storage().nbytes()
        if nbytes < self._min_bytes or tensor.nbytes < nbytes * SHARE_MIN:
            return False
        return not is_part_of(tensor, self._is_of_model)

    def _shared(self, tensor: torch.Tensor) -> _SharedStorage:
        """Return the storage of a tensor, given away now unless it has been, as it is."""
        untyped = tensor.untyped_storage()
        known = self._known.get(untyped._cdata)
        if known is not None and not known[0].expired():  # type: ignore[no-untyped-call]
            shared = known[1]()
            if shared is not None and shared.version == tensor._version:
                return shared
        shared = _SharedStorage(self.stream.put(tensor), tensor._version)
        weak = StorageWeakRef(untyped)  # type: ignore[no-untyped-call]
        self._known[untyped._cdata] = (weak, weakref.ref(shared))
        return shared


@contextmanager
def without_hooks() -> Iterator[None]:
    """Have this thread's saved tensors stay as they are, whatever hooks are set around the block.

    torch has no public way to do so; its own context managers stand on the same three functions.
    """
    autograd = torch._C._autograd
    removed = []
    try:
        while (hooks := autograd._top_saved_tensors_default_hooks(False)) is not None:
            autograd._pop_saved_tensors_default_hooks()
            removed.append(hooks)
        yield
    finally:
        for pack, unpack in reversed(removed):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


def is_part_of(tensor: torch.Tensor, is_of_model: Callable[[torch.Tensor], bool]) -> bool:
    """Return whether a tensor is one of the model's, a view of one, or one in another dtype."""
    if is_of_model(tensor) or (tensor._base is not None and is_of_model(tensor._base)):
        return True
    node = tensor.grad_fn
    while node is not None and node.name() in _SAME_VALUES:
        node = node.next_functions[0][0]
    variable = getattr(node, "variable", None)
    return variable is not None and is_of_model(variable)


def _leave(tensor: torch.Tensor) -> _Left:
    if tensor.is_inference():
        return _Left(tensor, None)
    # Else not itself: it may be the result of the very node that keeps it.
    return _Left(tensor if tensor.is_leaf else tensor.detach(), tensor._version)


def _unchanged(left: _Left) -> torch.Tensor:
    tensor = left.tensor
    if left.version is not None and tensor._version != left.version:
        raise modified_error(tensor, left.version)
    return tensor
