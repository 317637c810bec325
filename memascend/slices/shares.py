"""Shares of a loss, one of each slice, and the proof that those of two slices add up.

A head is the model's own code: it may centre logits by those of all rows, and a library may put
another cross entropy in the place of torch's. So the first pass computes the loss of one slice in
two parts as well, without a graph: their shares must add up to that of the slice, and the logits
that the loss function is given must be the same. Nothing is compared where a head takes random
numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from memascend.slices.cut import BatchCut, CannotCut, Cut
from memascend.slices.documents import DocumentCut
from memascend.slices.proof import (
    STEPS_OF_SUMS,
    Compute,
    Proofs,
    check_values,
    if_it_fits,
    outputs_of,
    relative_step,
)
from memascend.slices.random_states import RandomState


@dataclasses.dataclass(frozen=True)
class LossCut:
    """Slices with an output of one number; others have the batch as the arguments do."""

    inputs: Cut  # how the arguments are cut

    @property
    def count(self) -> int:
        """Number of slices."""
        return self.inputs.count

    def take(self, number: int, place: int, value: Any) -> Any:
        """Return a slice of the leaf at a place."""
        return self.inputs.take(number, place, value)

    def is_shared(self, place: int) -> bool:
        """Return whether every slice gets the leaf at a place whole."""
        return self.inputs.is_shared(place)

    def part(self, number: int, output: torch.Tensor) -> torch.Tensor:
        """Return a view of a whole output: the number of a slice, or its part."""
        if output.dim() > 1:
            return self.inputs.part(number, output)
        return output[number : number + 1]

    def whole_shape(
        self, number: int, output: torch.Tensor, *, is_of_rows: bool = False
    ) -> tuple[int, ...]:
        """Return the shape of all numbers, or of a whole output.

        Raises:
            CannotCut: The output does not have the batch first.
        """
        if output.dim() < 2:
            return (self.count,)
        # Of a loss these are values of tokens, one fewer than a sequence has (FusedLoss.take).
        return self.inputs.whole_shape(number, output, is_of_rows=True)


class Probed(Protocol):
    """A loss function that keeps numbers of the logits that it is given."""

    def begin_probe(self) -> None:
        """Have the next call keep them."""

    def take_probe(self) -> torch.Tensor | None:
        """Return those of the last call, one for each token or sequence; None without logits."""


@dataclasses.dataclass(frozen=True)
class LossProofs(Proofs):
    """The proofs of a head, whose first output is the share of a slice."""

    loss: Probed = dataclasses.field(kw_only=True)

    def is_of(self, cut: Cut) -> bool:
        """Return whether slices of such a cut can be proven."""
        return isinstance(cut, LossCut) and isinstance(cut.inputs, BatchCut | DocumentCut)

    def prove(
        self,
        cut: Any,
        whole: Sequence[torch.Tensor | None],
        tensors: Sequence[torch.Tensor],
        compute: Compute,
    ) -> bool:
        """Compare a slice, of two sequences at least, with its two parts.

        Returns:
            Whether another call of this kind needs no proof; it does if the loss is zero, as of
            ignored labels.

        Raises:
            CannotCut: The shares do not add up, or logits differ.
        """
        slice_and_parts = _slice_and_parts(cut.inputs)
        before = RandomState(tensors)
        is_larger = isinstance(cut.inputs, BatchCut) and cut.inputs.rows[0] == (0, 1)
        with (
            if_it_fits(self.module, is_larger=is_larger),
            before.restored(),
            torch.no_grad(),
        ):
            found = [self._share(one, compute) for one in slice_and_parts]
            if RandomState(tensors).is_same(before):
                return _check(found, tensors)
        return True

    def _share(self, cut: Cut, compute: Compute) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the share of a slice, and a number of each of its tokens or sequences."""
        self.loss.begin_probe()
        outputs = outputs_of(compute, LossCut(cut), "its sequences in two parts")
        return outputs[0], self.loss.take_probe()


def _slice_and_parts(cut: Any) -> list[Cut]:
    """Return a cut into one slice, of two sequences at least, and those into its two parts.

    A part of a packed row may begin within a document: a head computes each token by itself.
    """
    if isinstance(cut, BatchCut):
        end = max(2, cut.rows[0][1])
        return [dataclasses.replace(cut, rows=(one,)) for one in ((0, end), (0, 1), (1, end))]
    documents = cut.documents
    end = max(2, documents.ranges[0][1])
    return [
        dataclasses.replace(
            cut,
            documents=dataclasses.replace(documents, ranges=(one,), longest=documents.longest[:1]),
        )
        for one in ((0, end), (0, end // 2), (end // 2, end))
    ]


def _check(
    found: Sequence[tuple[torch.Tensor, torch.Tensor | None]], tensors: Sequence[torch.Tensor]
) -> bool:
    """Return whether the share of a slice was compared with those of its parts; zero is not.

    Raises:
        CannotCut: They do not add up, or the logits of the parts are others.
    """
    (share, probe), (first, first_probe), (rest, rest_probe) = found
    step = relative_step(tensors, share)
    if probe is not None and first_probe is not None and rest_probe is not None:
        parts = torch.cat([first_probe.flatten(), rest_probe.flatten()])
        if parts.shape != probe.flatten().shape:
            raise CannotCut("its logits are not of sequences")
        check_values(parts, probe.flatten(), [], step)
    expected, difference = float(share), float(first + rest - share)
    if abs(difference) > step * STEPS_OF_SUMS * abs(expected):
        raise CannotCut(
            f"its loss is no sum over sequences: {expected:.6g} of some, and "
            f"{expected + difference:.6g} of two parts of them together"
        )
    return expected != 0
