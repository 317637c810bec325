"""Router logits of mixtures of experts, which transformers records inside of layers.

Hooks of transformers append them to the list of a collector. A layer in slices collects those of
each slice apart, and returns them as further outputs: so those of the whole batch have a gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memascend.slices.cut import CannotCut

#: The file of transformers that has the collector, from its release 5 on.
_FILE = "transformers.utils.output_capturing"
_KEY = "router_logits"


class RouterLogits:
    """Those that one call of a layer records, in any number of slices."""

    def __init__(self, collected: dict[str, list[Any]]) -> None:
        """Append those of the whole batch to the list of `collected`, a collector."""
        self._collected = collected
        self._is_tuple, self._own_count = False, 1
        self._are_flat: list[bool] = []  # of each: whether its first dimension is that of tokens

    def outputs_of(self, call: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
        """Return a function that returns a call's outputs, and behind them its router logits.

        These have (sequences, tokens, ...), which no statistic of a slice of one sequence has.
        That function raises CannotCut if they do not have the tokens first, as (tokens, experts).
        """

        def run(*arguments: Any, **keywords: Any) -> tuple[Any, ...]:
            found: dict[str, list[Any]] = {_KEY: []}
            with _collecting(found):
                output = call(*arguments, **keywords)
            self._is_tuple = type(output) is tuple
            outputs = output if self._is_tuple else (output,)
            self._own_count = len(outputs)
            states = next(one for one in (*arguments, *keywords.values()) if torch.is_tensor(one))
            for one in found[_KEY]:
                _check_tokens_first(one, states)
            places = states.shape[:2]
            self._are_flat = [one.shape[:2] != places for one in found[_KEY]]
            return (
                *outputs,
                *(
                    one.reshape(*places, *one.shape[1:]) if is_flat else one
                    for one, is_flat in zip(found[_KEY], self._are_flat, strict=True)
                ),
            )

        return run

    def take(self, outputs: tuple[Any, ...]) -> Any:
        """Return the outputs of the call alone, and append its router logits to the list."""
        own, logits = outputs[: self._own_count], outputs[self._own_count :]
        self._collected[_KEY].extend(
            one.flatten(0, 1) if is_flat else one
            for one, is_flat in zip(logits, self._are_flat, strict=True)
        )
        return own if self._is_tuple else own[0]


def are_collected() -> bool:
    """Return whether this release of transformers has a collector."""
    return _collector() is not None


def recorded() -> RouterLogits | None:
    """Return what collects the router logits of a layer's call; None if none are recorded."""
    collector = _collector()
    collected = None if collector is None else collector.get()
    return None if collected is None or _KEY not in collected else RouterLogits(collected)


def _check_tokens_first(logits: torch.Tensor, states: torch.Tensor) -> None:
    """Raise CannotCut if logits have neither (tokens, ...) nor (sequences, tokens, ...)."""
    places = states.shape[:2]
    if logits.shape[0] != places.numel() and logits.shape[:2] != places:
        raise CannotCut(
            f"it records router logits of shape {tuple(logits.shape)} for states of shape "
            f"{tuple(states.shape)}"
        )


def _collector() -> Any:
    return getattr(sys.modules.get(_FILE), "_active_collector", None)


@contextmanager
def _collecting(found: dict[str, list[Any]]) -> Iterator[None]:
    """Within the context hooks append to the lists of `found`."""
    collector = _collector()
    before = collector.get()
    try:
        collector.set(found)
        yield
    finally:
        collector.set(before)
