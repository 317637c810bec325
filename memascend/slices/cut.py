"""Decides how the arguments of a call are cut into slices of the batch.

The batch is the first dimension of the first tensor. Every other tensor either has the batch in a
known dimension and is cut there, or is shared by all slices. Where shapes do not tell, nothing is
cut: `CannotCut` says why, and the caller runs the batch as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

#: Without the batch, whatever their size: positions of the sequence, and sizes of feature maps.
SHARED_NAMES = frozenset({"cache_position", "spatial_shapes", "level_start_index"})
#: Lists of numbers without the batch, whatever their length: sizes of images and feature maps.
SIZE_NAMES = frozenset({"input_dimensions", "resolution", "spatial_shapes", "spatial_shapes_list"})
#: The first dimension is the batch, whatever its size.
BATCH_NAMES = frozenset(
    {"attention_mask", "input_ids", "labels", "position_ids", "shift_labels", "token_type_ids"}
)
#: So ends the name of a mask of each sequence's tokens, also of those of an encoder.
_MASK_ENDING = ("attention_mask", "padding_mask")
#: Offsets of documents in packed rows, as flash attention gets them.
OFFSETS_PREFIX = "cu_seq"
#: Positions in several dimensions (time, height, width, text) come before the batch.
POSITION_DIMENSION_COUNTS = (3, 4)
#: Values of which every slice gets the same.
SHARED_TYPES = (type(None), bool, int, float, str, torch.dtype, torch.device)


class CannotCut(BaseException):
    """A call that cannot be cut; the text is the reason.

    It goes through the forward of a model that catches its own errors (Exception).
    """


@dataclass(frozen=True)
class Leaves:
    """The arguments of a call, flat, with the path of each, such as "[1].attention_mask"."""

    paths: tuple[str, ...]
    values: tuple[Any, ...]
    spec: pytree.TreeSpec

    @classmethod
    def of(cls, arguments: Sequence[Any], keywords: dict[str, Any]) -> Leaves:
        """Flatten the arguments of a call."""
        found, spec = pytree.tree_flatten_with_path((tuple(arguments), keywords))
        paths = (pytree.keystr(path).replace("['", ".").replace("']", "") for path, _ in found)
        return cls(tuple(paths), tuple(value for _, value in found), spec)

    def call(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments and keywords with these values in place of the leaves."""
        arguments, keywords = pytree.tree_unflatten(list(values), self.spec)
        return arguments, keywords


class Cut(Protocol):
    """How the leaves of a call are cut."""

    @property
    def count(self) -> int:
        """Number of slices."""

    def take(self, number: int, place: int, value: Any) -> Any:
        """Return a slice of the leaf at a place; all of it if it is shared."""

    def is_shared(self, place: int) -> bool:
        """Return whether every slice gets the leaf at a place whole."""

    def part(self, number: int, output: torch.Tensor) -> torch.Tensor:
        """Return a view of a whole output: the part that a slice computes."""

    def whole_shape(
        self, number: int, output: torch.Tensor, *, is_of_rows: bool = False
    ) -> tuple[int, ...]:
        """Return the shape of a whole output, from that of a slice.

        Args:
            number: That of the slice.
            output: The output of the slice.
            is_of_rows: Whether it is known that the first dimension has the slice's sequences.

        Raises:
            CannotCut: The output does not have the batch first, or may be shared by the batch.
        """


@dataclass(frozen=True)
class BatchCut:
    """Sequences of a batch, `rows[number]` for each slice."""

    batch: int
    sequence: int
    rows: tuple[tuple[int, int], ...]
    dimensions: tuple[int | None, ...]  # of each leaf; None: shared

    @property
    def count(self) -> int:
        """Number of slices."""
        return len(self.rows)

    def take(self, number: int, place: int, value: Any) -> Any:
        """Return a slice of the leaf at a place; all of it if it is shared."""
        dimension = self.dimensions[place]
        if dimension is None:
            return value
        begin, end = self.rows[number]
        return value.narrow(dimension, begin, end - begin)

    def is_shared(self, place: int) -> bool:
        """Return whether every slice gets the leaf at a place whole."""
        return self.dimensions[place] is None

    def part(self, number: int, output: torch.Tensor) -> torch.Tensor:
        """Return a view of a whole output: the part that a slice computes."""
        per_row = output.shape[0] // self.batch
        begin, end = self.rows[number]
        return output[begin * per_row : end * per_row]

    def whole_shape(
        self, number: int, output: torch.Tensor, *, is_of_rows: bool = False
    ) -> tuple[int, ...]:
        """Return the shape of a whole output, from that of a slice.

        An output of a slice has (sequences, tokens, ...) or (sequences * tokens, ...). Another one
        may be a bias or a statistic of the slice: such are the first dimensions (1, heads) of a
        slice of one sequence; of several, attention weights (sequences, heads, tokens, tokens) are
        known. For one sequence tokens come first only as in the router logits
        (tokens, experts): other tensors may be of positions, which all sequences share. Shapes of
        one size are no proof: proof.py has it.

        Args:
            number: That of the slice.
            output: The output of the slice.
            is_of_rows: Whether it is known that the first dimension has the slice's sequences.

        Raises:
            CannotCut: The output does not have the batch first, or may be shared by the batch.
        """
        begin, end = self.rows[number]
        rows, shape = end - begin, tuple(output.shape)
        has_rows = shape[:2] == (rows, self.sequence) or (is_of_rows and shape[:1] == (rows,))
        has_tokens = len(shape) > 1 and shape[0] == rows * self.sequence
        if rows == 1:
            has_tokens &= len(shape) == 2 and shape[1] != self.sequence
        elif shape[:1] == (rows,):
            has_rows |= shape[2:] == (self.sequence, self.sequence)
        if not (has_rows or has_tokens):
            raise CannotCut(
                f"an output of shape {shape} has no dimensions of {rows} sequence(s) of "
                f"{self.sequence} tokens"
            )
        return (shape[0] // rows * self.batch, *shape[1:])


@dataclass(frozen=True)
class WholeCut:
    """One slice, which has all of every argument; its output may have any shape."""

    @property
    def count(self) -> int:
        """Number of slices."""
        return 1

    def take(self, number: int, place: int, value: Any) -> Any:
        """Return the leaf."""
        return value

    def is_shared(self, place: int) -> bool:
        """Return True."""
        return True

    def part(self, number: int, output: torch.Tensor) -> torch.Tensor:
        """Return the output."""
        return output

    def whole_shape(
        self, number: int, output: torch.Tensor, *, is_of_rows: bool = False
    ) -> tuple[int, ...]:
        """Return the shape of the output."""
        return tuple(output.shape)


def cut_batch(
    leaves: Leaves,
    batch: int,
    count: int,
    *,
    mixes: bool = False,
    head_counts: frozenset[int] = frozenset(),
    is_batch_first: bool = True,
) -> BatchCut:
    """Cut a call along its batch.

    Args:
        leaves: The arguments. The first tensor is (batch, sequence, ...).
        batch: Sequences of the batch.
        count: The wanted number of slices; fewer if there are fewer sequences.
        mixes: Whether a layer is called, where numbers are rather frequencies, slopes or sizes than
            weights or lengths of sequences, as a loss has them.
        head_counts: Numbers of attention heads of the layer that is called.
        is_batch_first: Whether it is known that the batch comes before the sequence.

    Raises:
        CannotCut: The shapes do not tell where the batch is.
    """
    tensors = [value for value in leaves.values if torch.is_tensor(value)]
    if not tensors:
        raise CannotCut("it has no tensor")
    if batch == 0:
        raise CannotCut("its batch has no rows")
    first = tensors[0]
    if first.dim() < 3 and not _is_index(first):
        raise CannotCut(f"its first tensor has the shape {tuple(first.shape)}: no sequences")
    if first.shape[0] != batch:
        raise CannotCut(
            f"its first tensor has the shape {tuple(first.shape)}, and the batch {batch} sequences"
        )
    sequence = first.shape[1]
    if not is_batch_first and batch == sequence > 1:
        raise CannotCut(f"its first tensor of shape {tuple(first.shape)} may have the batch second")
    if batch > 1:
        _check_lists(leaves, batch)
    dimensions: list[int | None] = []
    for path, value in zip(leaves.paths, leaves.values, strict=True):
        dimension = 0 if value is first else _dimension(path, value, batch, sequence)
        if dimension == 0 and value is not first:
            if mixes and _may_be_shared(path, value, sequence):
                raise CannotCut(f"{path} of shape {tuple(value.shape)} may be of all sequences")
            if batch in head_counts:
                _check_not_of_heads(path, value, sequence)
        dimensions.append(dimension)
    return BatchCut(batch, sequence, _rows(batch, min(count, batch)), tuple(dimensions))


def _check_lists(leaves: Leaves, batch: int) -> None:
    """Raise CannotCut if a list of numbers is as long as the batch: it may have one for each row.

    Every slice would get all of it. Its items may be lists of numbers themselves.
    """
    lengths: dict[str, set[str]] = {}
    others = set()  # lists of other values, too
    for path, value in zip(leaves.paths, leaves.values, strict=True):
        while path.endswith("]") and "[" in path.lstrip("["):  # the arguments are a list themselves
            path, _, item = path.rpartition("[")
            lengths.setdefault(path, set()).add(item)
            if not isinstance(value, int | float):
                others.add(path)
    for path, items in lengths.items():
        if len(items) != batch or path in others or path == "[0]":
            continue
        if SIZE_NAMES.isdisjoint(re.split(r"[.\[]", path)):
            raise CannotCut(f"{path} of {batch} numbers may have one for each sequence")


def _is_index(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 2 and not tensor.is_floating_point()


def _rows(batch: int, count: int) -> tuple[tuple[int, int], ...]:
    """Return begin and end of each slice; the first ones are longer if it does not come out."""
    base, more = divmod(batch, count)
    ends = [base * (number + 1) + min(number + 1, more) for number in range(count)]
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def _dimension(path: str, value: Any, batch: int, sequence: int) -> int | None:
    """Return the dimension of a leaf that is the batch; None if it is shared."""
    if isinstance(value, SHARED_TYPES):
        return None
    if not torch.is_tensor(value):
        raise CannotCut(f"{path} is a {type(value).__name__}")
    name, shape = path.rsplit(".", 1)[-1], tuple(value.shape)
    if not shape or name in SHARED_NAMES or batch == 1:
        return None
    if name.startswith(OFFSETS_PREFIX):
        raise CannotCut(f"{path} has offsets of documents in all sequences")
    if shape[0] == 1:
        if batch in shape[1:2] and batch != sequence:
            raise CannotCut(f"{path} of shape {shape} has the batch elsewhere")
        return None
    if shape[0] == batch:
        is_known = name in BATCH_NAMES and len(shape) != 3
        if not is_known and _is_ambiguous(shape, batch, sequence):
            raise CannotCut(f"{path} of shape {shape} may have the batch elsewhere")
        return 0
    if shape[0] in POSITION_DIMENSION_COUNTS and shape[1:2] == (batch,) and "position" in path:
        return 1
    if (
        name in BATCH_NAMES
        or batch in shape[1:3]
        or (shape[0] != sequence and not shape[0] % batch)
    ):
        raise CannotCut(f"{path} of shape {shape} may have the batch elsewhere")
    return None


def _is_ambiguous(shape: tuple[int, ...], batch: int, sequence: int) -> bool:
    """Return whether a tensor whose first dimension is as long as the batch may be shared."""
    if batch == sequence and (len(shape) < 3 or sequence not in shape[1:]):
        return True  # such as (sequence, head) of rotary positions
    return batch in POSITION_DIMENSION_COUNTS and shape[1:2] == (batch,)


def _may_be_shared(path: str, value: torch.Tensor, sequence: int) -> bool:
    """Return whether a leaf of few dimensions, as long as the batch, may be of all sequences.

    Frequencies, slopes, sizes of windows and tables are; masks and (batch, sequence) are not.
    """
    name = path.rsplit(".", 1)[-1]
    if value.dim() == 2:
        is_of_tokens = name in BATCH_NAMES or value.shape[1] == sequence
        return not (is_of_tokens or name.endswith(_MASK_ENDING))
    return value.dim() == 1


def _check_not_of_heads(path: str, value: torch.Tensor, sequence: int) -> None:
    """Raise CannotCut if a tensor may have attention heads first, as the slopes of a bias."""
    shape = tuple(value.shape)
    is_bias = shape[1:2] == (1,) or shape[1:] == (sequence, sequence)
    if len(shape) == 1 or (len(shape) == 3 and is_bias):
        raise CannotCut(f"{path} of shape {shape} may have attention heads first")
