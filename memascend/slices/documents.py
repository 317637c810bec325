"""Cuts a batch of one packed row where its documents begin.

Packing puts several documents into one row and keeps them apart in attention: by a mask of four
dimensions, or by the documents' offsets. Each slice is a run of whole documents. A row that nothing
keeps apart is not cut.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from memascend.slices.cut import (
    POSITION_DIMENSION_COUNTS,
    SHARED_NAMES,
    SHARED_TYPES,
    CannotCut,
    Leaves,
)

#: The first of so many rows of positions is that of text, which flash attention gets.
_TEXT_FIRST = 4
#: Offsets of documents, as transformers passes them to flash attention, and the longest one.
_OFFSETS = ("cu_seq_lens_q", "cu_seq_lens_k")
_LONGEST = ("max_length_q", "max_length_k")


@dataclass(frozen=True)
class Documents:
    """The documents of a packed row.

    Attributes:
        length: Tokens of the row.
        ranges: Begin and end of each slice, in tokens.
        longest: Tokens of the longest document of each slice.
        keep_apart: Whether attention keeps documents apart without a mask.
        begins: The first token of each document; those of slices if it is left out.
    """

    length: int
    ranges: tuple[tuple[int, int], ...]
    longest: tuple[int, ...]
    keep_apart: bool
    begins: tuple[int, ...] = ()


def find_documents(
    keywords: Mapping[str, Any],
    length: int,
    count_of: Callable[[int], int],
    *,
    keep_apart: bool,
) -> Documents | None:
    """Return the documents of a row in slices; None if it has one only.

    Args:
        keywords: The model's named arguments.
        length: Tokens of the row.
        count_of: Returns the wanted number of slices of so many documents.
        keep_apart: Whether attention keeps documents apart without a mask, as flash attention
            does from their offsets or `position_ids`.
    """
    offsets, positions = keywords.get(_OFFSETS[0]), keywords.get("position_ids")
    if torch.is_tensor(positions) and positions.dim() == 3 and len(positions) != _TEXT_FIRST:
        keep_apart = False  # flash attention gets none of them
    if torch.is_tensor(offsets):
        keep_apart &= all(keywords.get(name) is not None for name in (*_OFFSETS, *_LONGEST))
        begins = [one for one in offsets.tolist() if one < length]  # behind it others are padding
    elif torch.is_tensor(positions) and positions.shape[-2:] == (1, length):
        begins = (positions.reshape(-1, length)[0] == 0).nonzero()[:, 0].tolist()
    else:
        return None
    if len(begins) < 2 or begins[0] != 0:
        return None
    count = count_of(len(begins))
    wanted = [length * number / count for number in range(1, count)]
    edges = sorted({min(begins, key=lambda begin: abs(begin - one)) for one in wanted} - {0})
    ranges = tuple(zip([0, *edges], [*edges, length], strict=True))
    lengths = {begin: end - begin for begin, end in zip(begins, [*begins[1:], length], strict=True)}
    longest = tuple(
        max(tokens for begin, tokens in lengths.items() if first <= begin < last)
        for first, last in ranges
    )
    return Documents(length, ranges, longest, keep_apart, tuple(begins))


class _Kind(enum.Enum):
    """How a leaf depends on the row's tokens."""

    SHARED = enum.auto()
    TOKENS = enum.auto()  # has one dimension of tokens
    MASK = enum.auto()  # the last two dimensions are tokens
    OFFSETS = enum.auto()
    LONGEST = enum.auto()


@dataclass(frozen=True)
class DocumentCut:
    """Runs of documents, each a slice."""

    documents: Documents
    kinds: tuple[tuple[_Kind, int], ...]  # of each leaf, with the dimension of tokens

    @property
    def count(self) -> int:
        """Number of slices."""
        return len(self.documents.ranges)

    def take(self, number: int, place: int, value: Any) -> Any:
        """Return a slice of the leaf at a place; all of it if it is shared."""
        begin, end = self.documents.ranges[number]
        match self.kinds[place]:
            case _Kind.SHARED, _:
                return value
            case _Kind.TOKENS, dimension:
                return value.narrow(dimension, begin, end - begin)
            case _Kind.MASK, _:
                return value[..., begin:end, begin:end]
            case _Kind.OFFSETS, _:
                return value[(value >= begin) & (value <= end)] - begin
            case _:
                return self.documents.longest[number]

    def is_shared(self, place: int) -> bool:
        """Return whether every slice gets the leaf at a place whole."""
        return self.kinds[place][0] is _Kind.SHARED

    def part(self, number: int, output: torch.Tensor) -> torch.Tensor:
        """Return a view of a whole output: the part that a slice computes."""
        begin, end = self.documents.ranges[number]
        return output.narrow(self._dimension(output, self.documents.length), begin, end - begin)

    def whole_shape(
        self, number: int, output: torch.Tensor, *, is_of_rows: bool = False
    ) -> tuple[int, ...]:
        """Return the shape of a whole output, from that of a slice.

        Raises:
            CannotCut: The output has no dimension of tokens.
        """
        begin, end = self.documents.ranges[number]
        dimension = self._dimension(output, end - begin)
        shape = list(output.shape)
        shape[dimension] = self.documents.length
        return tuple(shape)

    def across_edge(self) -> tuple[DocumentCut, int]:
        """Return a slice of the documents on both sides of the first edge, and the first's length.

        No document that is longer than a slice is in it, and no slice but these two.
        """
        (_, edge), (_, last) = self.documents.ranges[:2]
        begin = max((one for one in self.documents.begins if one < edge), default=0)
        end = min((one for one in self.documents.begins if one > edge), default=last)
        documents = replace(
            self.documents, ranges=((begin, end),), longest=(max(edge - begin, end - edge),)
        )
        return replace(self, documents=documents), edge - begin

    def halves(self, first: int, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of a tensor of the only slice: its first tokens, so many, and the others."""
        begin, end = self.documents.ranges[0]
        dimension = self._dimension(tensor, end - begin)
        return (
            tensor.narrow(dimension, 0, first),
            tensor.narrow(dimension, first, end - begin - first),
        )

    @staticmethod
    def _dimension(output: torch.Tensor, length: int) -> int:
        shape = tuple(output.shape)
        if shape[:1] == (1,) and shape[1:2] == (length,):
            return 1
        if shape[:1] == (length,):
            return 0
        raise CannotCut(f"an output of shape {shape} has no dimension of {length} tokens")


def cut_documents(leaves: Leaves, documents: Documents, *, mixes: bool) -> DocumentCut:
    """Cut a call along its documents.

    Args:
        leaves: The arguments. The first tensor is (1, tokens, ...).
        documents: Those of the row.
        mixes: Whether a token's output depends on other tokens, as in attention.

    Raises:
        CannotCut: The shapes do not tell where tokens are, or attention joins documents.
    """
    named = dict(
        zip((path.rsplit(".", 1)[-1] for path in leaves.paths), leaves.values, strict=True)
    )
    first = next((value for value in leaves.values if torch.is_tensor(value)), None)
    if first is None or first.shape[:2] != (1, documents.length):
        shape = None if first is None else tuple(first.shape)
        raise CannotCut(f"its first tensor has the shape {shape}: not that of the packed row")
    kinds = tuple(
        _kind(path, value, documents.length)
        for path, value in zip(leaves.paths, leaves.values, strict=True)
    )
    if mixes:
        masks = [
            value
            for value, (kind, _) in zip(leaves.values, kinds, strict=True)
            if kind is _Kind.MASK
        ]
        marks = [named.get(name) for name in (_OFFSETS[0], "position_ids")]
        knows_documents = any(one is not None for one in marks)
        is_masked = named.get("attention_mask") is not None
        if not masks and (is_masked or not (documents.keep_apart and knows_documents)):
            raise CannotCut("no mask keeps the documents of its row apart")
        for mask in masks:
            _check_apart(mask, documents)
    return DocumentCut(documents, kinds)


def _check_apart(mask: torch.Tensor, documents: Documents) -> None:
    """Raise CannotCut if tokens of one slice may attend to those of another."""
    if not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise CannotCut(f"its mask is of {mask.dtype}")
    allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    for begin, end in documents.ranges:
        rows = allowed[..., begin:end, :]
        if bool(rows[..., :begin].any()) or bool(rows[..., end:].any()):
            raise CannotCut("its mask joins documents of the row")


def _kind(path: str, value: Any, length: int) -> tuple[_Kind, int]:
    name = path.rsplit(".", 1)[-1]
    if name in _LONGEST:
        return _Kind.LONGEST, 0
    if isinstance(value, SHARED_TYPES):
        return _Kind.SHARED, 0
    if not torch.is_tensor(value):
        raise CannotCut(f"{path} is a {type(value).__name__}")
    shape = tuple(value.shape)
    if name in _OFFSETS:
        return _Kind.OFFSETS, 0
    if "encoder" in name:
        raise CannotCut(f"{path} has tokens of another model")
    if len(shape) == 4 and shape[-2:] == (length, length):
        return _Kind.MASK, 0
    if shape[:2] == (1, length):
        return _Kind.TOKENS, 1
    if shape[:1] == (length,) and length not in shape[1:]:
        return _Kind.TOKENS, 0
    if shape[:1] in [(one,) for one in POSITION_DIMENSION_COUNTS] and shape[1:3] == (1, length):
        return _Kind.TOKENS, 2
    if length in shape:
        raise CannotCut(f"{path} of shape {shape} may have tokens elsewhere")
    if len(shape) == 1 and not (value.is_floating_point() or name in SHARED_NAMES):
        raise CannotCut(f"{path} of shape {shape} may have offsets of documents")
    return _Kind.SHARED, 0
