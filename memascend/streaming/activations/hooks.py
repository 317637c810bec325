"""Hooks for saved activations: which tensors go to the drive, and how they are restored.

The hooks see every tensor that forward saves for backward, inputs of checkpoints included. A tensor
stands for its storage: tensors that share a storage share its copy on the drive, and share one
storage again when they are restored. Knows torch; never DeepSpeed: the caller decides which tensors
belong to the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from memascend.streaming.activations.records import Activation, modified_error
from memascend.streaming.activations.stream import ActivationStream

#: A tensor that covers less of its storage stays: the rest may be in use elsewhere for longer.
SHARE_MIN = 1 / 4
#: Autograd nodes whose result has the parameter's values: views, copies and casts.
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
    """A tensor whose storage was passed to the stream."""

    storage: _SharedStorage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_taken: bool = False


@dataclass(eq=False)
class _SharedStorage:
    """A storage that was passed to the stream, and the tensors that share it."""

    activation: Activation
    version: int
    parts: list[weakref.ref[Stored]] = field(default_factory=list)

    def is_wanted(self) -> bool:
        """Return whether a tensor that shares the storage is still to be restored."""
        return any((part := found()) is not None and not part.is_taken for found in self.parts)


@dataclass(slots=True, eq=False)
class _Left:
    """A tensor that stays where it is."""

    tensor: torch.Tensor
    version: int | None  # None for inference tensors, which have none


Packed = Stored | _Left


class SavedTensors:
    """Hooks around the forward passes of one model. Several threads may unpack at once."""

    def __init__(
        self,
        stream: ActivationStream,
        *,
        min_bytes: int,
        device: torch.device,
        is_of_model: Callable[[torch.Tensor], bool],
    ) -> None:
        """Create the hooks; no tensor is saved yet.

        Args:
            stream: Takes the storages.
            min_bytes: Smaller storages stay.
            device: Tensors on other devices stay.
            is_of_model: Returns whether a tensor is a parameter, or lives as long as the model.
        """
        self.stream = stream
        self._min_bytes = min_bytes
        self._device = device
        self._is_of_model = is_of_model
        self._known: dict[int, tuple[StorageWeakRef, weakref.ref[_SharedStorage]]] = {}

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Apply the hooks to tensors that are saved in this block, unless inner hooks are set."""
        # Else a compiled forward pass would compile the hooks, too.
        pack, unpack = map(torch.compiler.disable, (self.pack, self.unpack))
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                yield
        finally:
            self._known.clear()

    def pack(self, tensor: torch.Tensor) -> Packed:
        """Return the placeholder of a tensor until backward.

        Raises:
            StoreError: The drive failed.
        """
        return self.pack_if_it_goes(tensor) or _leave(tensor)

    def pack_if_it_goes(self, tensor: torch.Tensor) -> Stored | None:
        """Return the placeholder of a tensor that goes to the drive; None for one that stays.

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
        """Return the tensor as it was saved: dtype, shape, strides, and sharing of its storage.

        Raises:
            StoreError: The drive failed.
            RuntimeError: The tensor was modified in place since then.
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
        """Return the storage of a tensor; pass it to the stream unless this version was passed."""
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
    """Remove all saved-tensor hooks of this thread for the block.

    torch has no public way to do so; its own context managers use the same three functions.
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
    """Return whether a tensor belongs to the model, or is a view, copy or cast of such a tensor."""
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
    # A non-leaf may be the result of the node that saves it: detach, or the two form a cycle.
    return _Left(tensor if tensor.is_leaf else tensor.detach(), tensor._version)


def _unchanged(left: _Left) -> torch.Tensor:
    tensor = left.tensor
    if left.version is not None and tensor._version != left.version:
        raise modified_error(tensor, left.version)
    return tensor
