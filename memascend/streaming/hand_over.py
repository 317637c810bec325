"""Slots that the optimizer's walk fills with new values, which need not be read from the drive.

A forward pass behind a step waits for the walk. A shard that waits has its slot already, and the
walk has the shard's new value in a tile, on its way to the drive: it copies it. Two threads meet
here: the one that stages shards offers and takes slots, the walk's thread fills them. A slot is
filled only between `offer` and `take`, so its owner may reuse it afterwards.

Knows host tensors and the keys of values; neither the store nor the course of a walk.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch


@dataclass(slots=True)
class _Offer:
    """A slot, and the run of its elements that are new."""

    slot: torch.Tensor
    begin: int = 0
    end: int = 0


class HandOver:
    """Slots by the key of the value that each waits for."""

    def __init__(self) -> None:
        """Start without slots."""
        # A signal's handler may let shards go while its thread is in here.
        self._lock = threading.RLock()
        self._offers: dict[str, _Offer] = {}

    def offer(self, key: str, slot: torch.Tensor) -> None:
        """Let the walk fill a slot with the rest of a value; end with `take`.

        Args:
            key: The value's key in the store; the walk has not passed its end.
            slot: Host memory, flat, as long as the value and in its dtype.
        """
        with self._lock:
            self._offers[key] = _Offer(slot)

    def take(self, key: str, numel: int) -> int:
        """Stop filling a slot of `numel` elements, if it was offered.

        Returns how many of its leading elements are not new, once the walk has passed the value.
        """
        with self._lock:
            offer = self._offers.pop(key, None)
            return numel if offer is None or offer.end != numel else offer.begin

    def fill(self, key: str, begin: int, values: torch.Tensor) -> None:
        """Copy new values into the slot that waits for them, if there is one; the walk's thread.

        Ranges of a value come in ascending order. Those before a gap count as old.

        Args:
            key: The value's key in the store, which gets the same values.
            begin: First element in the value.
            values: Host memory, flat, in the value's dtype.
        """
        with self._lock:
            offer = self._offers.get(key)
            if offer is None:
                return
            # A slot that was offered in this mode can be changed in it alone; others can, too.
            with torch.inference_mode():
                offer.slot.narrow(0, begin, values.numel()).copy_(values)
            if begin != offer.end:
                offer.begin = begin
            offer.end = begin + values.numel()
