"""Ends every rank with an error where one rank alone ran out of device memory in a pass.

The others wait for that rank in a collective, where no exception reaches them, and a pass that it
tries again has other collectives than theirs. So a rank notes its failure in the store of the
process group, which a thread of each rank reads; a pass begins again if all ranks failed in it.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from deepspeed import comm as dist
from torch.distributed import distributed_c10d

from memascend.errors import LoneRankError

log = logging.getLogger(__name__)

#: Seconds in which all other ranks have to fail as well.
PATIENCE_S = 60.0
#: Seconds between two looks at the notes of other ranks.
POLL_S = 5.0
#: Characters of an error that other ranks log.
TEXT_MAX = 600
#: Models are built in the same order on every rank.
_numbers = itertools.count()


class Store(Protocol):
    """The methods of torch's store that are used."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return it; a new one is 0."""

    def set(self, key: str, value: str) -> None:
        """Set a value."""

    def get(self, key: str) -> bytes:
        """Return a value."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have a value."""


class LoneFailures:
    """The failed passes of one model's ranks. Used by the script's thread and a thread of its own.

    Passes are counted: all ranks begin the same ones in the same order.
    """

    def __init__(self, store: Store, rank: int, world: int, end: Callable[[str], None]) -> None:
        """Start without a pass.

        Args:
            store: Shared by all ranks.
            rank: The number of this rank.
            world: The number of ranks.
            end: Ends this process with a message.
        """
        self._store, self._rank, self._world, self._end = store, rank, world, end
        self._prefix = f"memascend/{next(_numbers)}"
        self._pass_number = 0
        self._failed = 0  # number of the last pass in which this rank failed
        self._is_left = False  # that pass was not begun again yet
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def begin_pass(self) -> None:
        """Begin a forward pass that has a gradient.

        Raises:
            LoneRankError: This rank failed in the last pass, and another one did not.
        """
        if self._is_left:
            self._is_left = False
            self._wait_for_others()
        self._pass_number += 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="memascend-ranks", daemon=True)
            self._thread.start()

    def note(self, error: BaseException) -> None:
        """Note that the pass failed on this rank, and add to the error which ranks have to."""
        if self._failed == self._pass_number:
            return
        self._failed, self._is_left = self._pass_number, True
        text, seconds = str(error), PATIENCE_S + 2 * POLL_S
        error.args = (
            f"{text}\nmemascend: this is rank {self._rank} of {self._world}. Ranks that do not run "
            f"out of memory in the same pass end within {seconds:.0f} s. fix: let this "
            "error end the run, and start it again with smaller slices "
            "(memascend.micro_batches.sequences) or a smaller batch",
        )
        note = {"rank": self._rank, "pass": self._failed, "error": text[:TEXT_MAX]}
        self._store.set(self._key(self._failed, self._rank), "")
        self._store.set(f"{self._prefix}/last", json.dumps(note))
        self._store.add(f"{self._prefix}/failures", 1)

    def close(self) -> None:
        """End the thread; a pass starts it again."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(POLL_S)
        self._thread = None
        self._stop.clear()

    def _key(self, pass_number: int, rank: int) -> str:
        return f"{self._prefix}/{pass_number}/{rank}"

    def _wait_for_others(self) -> None:
        keys = {rank: self._key(self._failed, rank) for rank in range(self._world)}
        deadline = time.monotonic() + PATIENCE_S
        while not self._store.check(list(keys.values())):
            if time.monotonic() >= deadline:
                others = [rank for rank, key in keys.items() if not self._store.check([key])]
                raise LoneRankError(self._rank, others, PATIENCE_S)
            time.sleep(min(POLL_S, PATIENCE_S) / 50)

    def _watch(self) -> None:
        seen, since = 0, 0.0
        while not self._stop.wait(POLL_S):
            try:
                count = self._store.add(f"{self._prefix}/failures", 0)
                if count == seen:
                    continue
                note = json.loads(self._store.get(f"{self._prefix}/last"))
            except RuntimeError:  # the process that has the store is gone
                return
            if self._failed >= note["pass"] or self._pass_number > note["pass"]:
                seen, since = count, 0.0
                continue
            since = since or time.monotonic()
            if time.monotonic() - since >= PATIENCE_S:
                self._end(
                    f"memascend: rank {note['rank']} of {self._world} ran out of device memory "
                    f"alone, and rank {self._rank} waits for it in a collective, where no error "
                    f"reaches it: this process ends. {note['error']} fix: start all ranks again "
                    "with smaller slices (memascend.micro_batches.sequences) or a smaller batch"
                )
                return


@contextmanager
def noting(failures: LoneFailures | None, *, begins: bool = False) -> Iterator[None]:
    """Wrap a part of a pass: note it if device memory runs out.

    Args:
        failures: Those of the model; None: it has one rank.
        begins: Whether it is the forward pass.

    Raises:
        LoneRankError: It is tried again by this rank alone.
    """
    if failures is None:
        yield
        return
    if begins and torch.is_grad_enabled():
        failures.begin_pass()
    try:
        yield
    except torch.OutOfMemoryError as error:
        failures.note(error)
        raise


def lone_failures() -> LoneFailures | None:
    """Return those of a new model; None with one rank, or where torch shows no store."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    find = getattr(distributed_c10d, "_get_default_store", None)
    store: Any = find() if find is not None and torch.distributed.is_initialized() else None
    if store is None:
        return None
    return LoneFailures(store, dist.get_rank(), dist.get_world_size(), _end)


def _end(message: str) -> None:
    log.critical(message)
    os._exit(1)  # the script's thread is in a collective that does not return
