"""Finds sequences of a slice, or documents of a packed row, that change each other's output.

A layer computes two of them, then once more with one of them negated: the output of the other one
must be the same. All three calls have the same shapes and random numbers, so that kernels round
alike, no token goes to another expert by a rounding, and little is allowed. Negated values have the
same largest one, by which fp8 is scaled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memascend.slices.cut import CannotCut, Cut

#: Largest difference of all tokens together, in relative steps of the dtype: of the part that a
#: layer computes, and of its sum with the layer's input. Experts that get other tokens beside those
#: that are compared may round otherwise, and add in another order.
STEPS, STEPS_OF_SUMS = 2.0, 0.5
#: The same of each token: one that leaks into the next document is lost among all of them.
STEPS_OF_TOKEN, STEPS_OF_TOKEN_SUMS = 16.0, 2.0

#: Returns the two parts of a tensor: those of the first and the second sequence or document.
Halves = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class Two:
    """A cut of one slice that has two sequences or documents, and the parts of its tensors."""

    cut: Cut
    halves: Halves
    name: str  # of one of the two


@dataclasses.dataclass(frozen=True)
class _Negated:
    """Stands in for the cut, and negates the states of one half."""

    two: Two
    states: tuple[torch.Tensor, ...]
    half: int

    def take(self, number: int, place: int, value: Any) -> Any:
        taken = self.two.cut.take(number, place, value)
        if not any(value is one for one in self.states):
            return taken
        taken = taken.clone()
        self.two.halves(taken)[self.half].neg_()
        return taken


def check_influence(
    two: Two,
    outputs: Sequence[Any],
    tensors: Sequence[torch.Tensor],
    compute: Callable[[Any], Sequence[Any]],
    step: float,
) -> None:
    """Compare the outputs of each half where the other half is negated.

    Args:
        two: The slice.
        outputs: Those of the slice.
        tensors: The tensors that the call is given; the first is (sequences, tokens, ...).
        compute: Returns the outputs of a cut's only slice, with the same random numbers each time.
        step: The relative step of the coarsest dtype.

    Raises:
        CannotCut: They differ.
    """
    shape = tensors[0].shape
    states = tuple(one for one in tensors if one.is_floating_point() and one.shape == shape)
    if not states:
        return
    for half in (0, 1):
        others = compute(_Negated(two, states, half))
        for one, other in zip(outputs, others, strict=True):
            if getattr(one, "shape", None) != getattr(other, "shape", None):
                raise CannotCut(f"the shape of its output for a {two.name} depends on other ones")
            if not torch.is_tensor(one) or not one.is_floating_point():
                continue
            found, expected = (two.halves(output)[1 - half] for output in (other, one))
            given = [two.halves(two.cut.part(0, state))[1 - half] for state in states]
            _check_same(found, expected, [one for one in given if one.shape == found.shape], step)


def _check_same(
    found: torch.Tensor, expected: torch.Tensor, given: Sequence[torch.Tensor], step: float
) -> None:
    """Raise CannotCut if outputs differ, each token's or all; NaN and infinity say nothing."""
    difference, norm = _norms(found - expected), _norms(expected)
    computed, largest = norm, norm
    for state in given:
        computed = torch.minimum(computed, _norms(expected - state))
        largest = torch.maximum(largest, _norms(state))
    of_token = step * (STEPS_OF_TOKEN * computed + STEPS_OF_TOKEN_SUMS * largest)
    of_all = step * (STEPS * computed.norm() + STEPS_OF_SUMS * largest.norm())
    if bool((difference > of_token).any()) or bool(difference.norm() > of_all):
        raise CannotCut(
            "its output depends on other sequences or documents of the slice: it differs by "
            f"{float(difference.norm()):.1e}, with a norm of {float(norm.norm()):.1e}, where these "
            "have other values"
        )


def _norms(tensor: torch.Tensor) -> torch.Tensor:
    """Return the norm of each token, (..., features) as (...), in fp32 at least."""
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    finite = torch.nan_to_num(tensor, nan=0.0, posinf=0.0, neginf=0.0)
    norms: torch.Tensor = torch.linalg.vector_norm(finite, dim=-1, dtype=dtype)
    return norms
