"""The losses of transformers that a head computes in slices.

Each is a sum over labels divided by their number. A slice computes its part of the sum, divided by
the number of labels of the whole batch.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Any

import torch
from torch import nn

from memascend.slices.cut import CannotCut

IGNORED_LABEL = -100
#: The problem of a classifier whose loss counts labels that are not ignored. The losses of other
#: problems are means over all outputs, and no argument tells them another number.
_ONE_OF_CLASSES = "single_label_classification"


class LabelsOf(Enum):
    """The parts of a batch that have a label each."""

    NEXT_TOKENS = auto()  # the label of a token is at the position behind it
    TOKENS = auto()
    SEQUENCES = auto()


#: By the name of the loss function.
LOSSES = {
    "ForCausalLMLoss": LabelsOf.NEXT_TOKENS,
    "ForMaskedLMLoss": LabelsOf.TOKENS,
    "ForTokenClassification": LabelsOf.TOKENS,
    "ForSequenceClassificationLoss": LabelsOf.SEQUENCES,
}


def is_known(function: Any) -> bool:
    """Return whether a loss function is one of `LOSSES`, and not another one with its name.

    A script's function may have the name by `functools.wraps`, and add to the loss.
    """
    file = sys.modules.get("transformers.loss.loss_utils")
    is_of_file = getattr(function, "__globals__", None) is getattr(file, "__dict__", function)
    return is_of_file and function.__code__.co_name in LOSSES


def counted_labels(labels: torch.Tensor, shift_labels: torch.Tensor | None) -> torch.Tensor:
    """Return how many labels of next tokens are not ignored, as a tensor of one number."""
    counted = labels[:, 1:] if shift_labels is None else shift_labels
    return (counted != IGNORED_LABEL).sum()


def labels_of_next_tokens(labels: torch.Tensor) -> torch.Tensor:
    """Return labels at the positions of the tokens before theirs, as (sequences, tokens)."""
    return nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)


class SlicedLoss:
    """A loss function of which each slice computes its share."""

    def __init__(
        self,
        function: Callable[..., torch.Tensor],
        config: Any,
        labels: torch.Tensor,
        shift_labels: torch.Tensor | None = None,
    ) -> None:
        """Count the labels of the whole batch.

        Args:
            function: One of `LOSSES`.
            config: The configuration that the model gives it.
            labels: Those of the whole batch, one for each token or sequence. A sequence may have a
                vector of floating point.
            shift_labels: Those of the next tokens, if the model is given them.

        Raises:
            CannotCut: A sequence has another number of labels than the model has outputs for it, or
                labels are not those of tokens (the loss function is a default of transformers).
        """
        self._function, self._labels = function, labels
        self._labels_version = _version(labels)
        #: The parts of the batch that have a label each.
        self.labels_of = LOSSES[function.__name__]
        #: Whether the label of a slice's last token may belong to the next slice.
        self.shifts = self.labels_of is LabelsOf.NEXT_TOKENS and shift_labels is None
        if self.labels_of is not LabelsOf.SEQUENCES and labels.dim() != 2:
            raise CannotCut(f"it is given labels of shape {tuple(labels.shape)}, and not of tokens")
        of_sequences = self.labels_of is LabelsOf.SEQUENCES
        self._is_mean = of_sequences and _is_mean_of_outputs(config, labels)
        if self.labels_of is LabelsOf.NEXT_TOKENS:
            self._item_count = counted_labels(labels, shift_labels)
        else:
            self._item_count = self._count(labels)
        if self._is_mean and labels.numel() != len(labels) * config.num_labels:
            raise CannotCut(
                f"it is given labels of shape {tuple(labels.shape)}, and has {config.num_labels} "
                "outputs for each sequence"
            )
        self._value: torch.Tensor | None = None
        self._version = 0
        #: Labels and shifted ones that the loss function was given last.
        self._given: tuple[Any, Any] = (None, None)
        self._is_own_count = True  # the script gives no number of items
        #: Whether the model computes the whole batch: then the loss is as without slices.
        self.is_whole = False
        self._probes = False
        self._probe: torch.Tensor | None = None

    def shifted(self) -> torch.Tensor:
        """Return the labels of the next tokens, each at the position of its token."""
        return labels_of_next_tokens(self._labels)

    def __call__(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        """Return the loss of a slice, as the model calls its loss function.

        Raises:
            CannotCut: It ignores another label.
        """
        if keywords.get("ignore_index", IGNORED_LABEL) != IGNORED_LABEL:
            raise CannotCut(f"its loss ignores the label {keywords['ignore_index']}")
        self._is_own_count = keywords.get("num_items_in_batch") is None
        if self._is_own_count and not self.is_whole:
            keywords["num_items_in_batch"] = self._item_count
        bound = inspect.signature(self._function).bind_partial(*arguments, **keywords).arguments
        if self._probes:
            self._probe = probe_of(bound.get("logits", bound.get("pooled_logits")))
        self._given = bound.get("labels"), keywords.get("shift_labels")
        self._value = self._function(*arguments, **keywords)
        self._version = self._value._version
        return self._value

    def begin_probe(self) -> None:
        """Have the next call keep a number of each token's or sequence's logits."""
        self._probes = True

    def take_probe(self) -> torch.Tensor | None:
        """Return those numbers of the last call; None without logits."""
        found, self._probe, self._probes = self._probe, None, False
        return found

    def take(self, output: Any, keywords: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """Return a slice's share of the loss of the whole batch, and its number of labels.

        Both have the shape (1,). The last value is forgotten: its graph keeps the hidden states of
        the whole batch.

        Args:
            output: The output of the model.
            keywords: Its arguments, with the labels of the slice.

        Raises:
            CannotCut: The model did not return the value of its loss function, or has changed
                labels whose shifted ones the slice was given.
        """
        value, self._value = self._value, None
        if value is None or output.loss is not value or value._version != self._version:
            raise CannotCut("its loss is more than that of its loss function")
        labels, shift_labels = self._given
        if self.shifts and keywords.get("shift_labels") is not None:
            is_same = labels is None or labels is keywords["labels"]
            if not is_same or _version(self._labels) != self._labels_version:
                raise CannotCut("its forward changes labels")
        counted = labels if self.labels_of is not LabelsOf.NEXT_TOKENS else shift_labels
        if counted is None:
            counted = labels[..., 1:]
        count = self._item_count if self.is_whole else self._count(counted)
        if self._is_mean:
            value = value * (counted.numel() / self._labels.numel())
        return value.reshape(1), count.reshape(1)

    def of_batch(self, loss: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return the loss of the whole batch: exactly the sum of shares, if labels are unchanged.

        A forward may ignore more labels than the model is given, such as those of padding.

        Args:
            loss: The sum of all shares.
            counts: Numbers of labels of all slices.
        """
        if not (self._is_own_count or self._is_mean):
            return loss
        return loss * (self._item_count.to(loss) / counts.sum())

    def _count(self, labels: torch.Tensor) -> torch.Tensor:
        if self._is_mean:
            return torch.full((), labels.numel(), device=labels.device)
        return (labels != IGNORED_LABEL).sum()


def probe_of(logits: Any) -> torch.Tensor | None:
    """Return logits (..., outputs) times fixed numbers, as (...); None of no such tensor."""
    if not torch.is_tensor(logits) or logits.dim() < 2:
        return None
    numbers = torch.arange(logits.shape[-1], device=logits.device, dtype=torch.float32)
    return logits.detach() @ numbers.cos().to(logits.dtype)


def _version(tensor: torch.Tensor) -> int:
    """Return a number that is another one behind each change in place."""
    return 0 if tensor.is_inference() else tensor._version


def _is_mean_of_outputs(config: Any, labels: torch.Tensor) -> bool:
    """Return whether a classifier's loss is a mean over outputs, by the rules of transformers."""
    if config.problem_type is not None:
        return bool(config.problem_type != _ONE_OF_CLASSES)
    return config.num_labels == 1 or labels.dtype not in (torch.long, torch.int)
