"""Heads of TRL and Liger, which compute a loss of tokens without logits of the whole batch.

`trl.trainer.utils.add_fused_lm_head` and Liger's `lce_forward` stand in for a model's `forward`.
TRL's returns values of each token as well, from which its trainers compute their loss. Slices have
the rows of micro-steps: so the gradient of the head is rounded once for each slice, as with
accumulation.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from memascend.slices.cut import CannotCut
from memascend.slices.losses import (
    IGNORED_LABEL,
    LabelsOf,
    counted_labels,
    labels_of_next_tokens,
)

_LOSS = "loss"
_LIGER = "liger_kernel."
#: Called by heads of older releases, without the number of tokens.
_MEAN = "LigerFusedLinearCrossEntropyLoss"
#: Liger's argument that has the model compute logits.
_SKIPS_LOGITS = "skip_logits"


def is_of_liger(forward: Callable[..., Any]) -> bool:
    """Return whether a model's forward is one of Liger's."""
    return str(getattr(forward, "__module__", "")).startswith(_LIGER)


def is_fused(forward: Callable[..., Any], given: Mapping[str, Any]) -> bool:
    """Return whether a model that trains computes a fused loss.

    Args:
        forward: The model's.
        given: Its arguments by name.
    """
    if is_of_liger(forward):
        return given.get(_SKIPS_LOGITS) is not False
    return bool(given.get("fused_lm_head"))


def check_counts(forward: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Check that the loss is the sum over tokens, divided by the number that a slice is given.

    Args:
        forward: The model's.
        given: Its arguments by name.

    Raises:
        CannotCut: It may be another one.
    """
    code = getattr(inspect.unwrap(forward), "__code__", None)
    if code is not None and _MEAN in code.co_names:
        raise CannotCut(f"this release of Liger takes the mean of each call ({_MEAN})")
    if given.get("ignore_index", IGNORED_LABEL) != IGNORED_LABEL:
        raise CannotCut(f"ignore_index is {given['ignore_index']}, and not {IGNORED_LABEL}")
    if given.get("ce_weight") is not None:
        raise CannotCut("its tokens have weights (ce_weight)")
    if given["labels"].dim() != 2:
        shape = tuple(given["labels"].shape)
        raise CannotCut(f"it is given labels of shape {shape}, and not of tokens")


def unfused(forward: Callable[..., Any]) -> dict[str, Any]:
    """Return arguments for a call without tokens, of which Liger's kernel takes at least one."""
    return {_SKIPS_LOGITS: False} if is_of_liger(forward) else {}


def mark_as_gathered(weight: torch.Tensor) -> None:
    """Mark a tensor in place of a weight: TRL has DeepSpeed gather weights without this mark."""
    zero = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    if zero is not None:
        weight.ds_status = zero.ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]


class FusedLoss:
    """A loss of which each slice computes its share, and the values of its tokens."""

    #: The parts of the batch that have a label each.
    labels_of = LabelsOf.NEXT_TOKENS
    #: Whether the model computes the whole batch; its loss is the same sum.
    is_whole = False

    def __init__(self, labels: torch.Tensor, shift_labels: torch.Tensor | None) -> None:
        """Count the labels of the whole batch.

        Args:
            labels: (sequences, tokens).
            shift_labels: Those of the next tokens, if the model is given them; the same shape.
        """
        self._labels = labels
        #: Whether the label of a slice's last token may belong to the next slice.
        self.shifts = shift_labels is None
        #: The loss is a sum divided by this number, unless the script gives another one.
        self.item_count = counted_labels(labels, shift_labels).clamp(min=1)
        self._names: tuple[str, ...] = ()

    def shifted(self) -> torch.Tensor:
        """Return the labels of the next tokens, each at the position of its token."""
        return labels_of_next_tokens(self._labels)

    def __call__(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        """Stand in for the model's loss function.

        Raises:
            CannotCut: The model calls it.
        """
        raise CannotCut("its loss is more than a fused one")

    def begin_probe(self) -> None:
        """Do nothing: there are no logits."""

    def take_probe(self) -> None:
        """Return None."""

    def take(self, output: Any, keywords: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """Return a slice's share of the loss, of shape (1,), and its values of tokens.

        Raises:
            CannotCut: A value is not (sequences, tokens).
        """
        values = {name: one for name, one in output.items() if name != _LOSS}
        for name, one in values.items():
            if not torch.is_tensor(one) or one.dim() != 2:
                raise CannotCut(f"its output {name} has no value for each token")
        self._names = tuple(values)
        return (output.loss.reshape(1), *values.values())

    def outputs(self, values: Sequence[torch.Tensor], *, is_shifted: bool) -> dict[str, Any]:
        """Return the values of all tokens by name.

        Args:
            values: Those of all slices, put together.
            is_shifted: Whether slices were given `shifted`; then the last token has no value.
        """
        end = -1 if is_shifted else None
        return {name: one[:, :end] for name, one in zip(self._names, values, strict=True)}
