"""Ends every rank with an error where one rank alone ran out of device memory.

The others wait for that rank in a collective, where no exception reaches them, and a pass that it
tries again has other collectives than theirs. So a rank notes its failure in the store of the
process group, which a thread of each rank reads. Training continues if all ranks failed in the
pass, or if it was an evaluation whose collectives the failed rank had all joined.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from deepspeed import comm as dist
from torch.distributed import distributed_c10d

from memascend.base.interfaces import Event
from memascend.base.waiting import event_here
from memascend.errors import LoneRankError

log = logging.getLogger(__name__)

#: Seconds in which all other ranks have to fail as well.
PATIENCE_S = 60.0
#: Seconds between two looks at the notes of other ranks.
POLL_S = 5.0
#: Characters of an error that other ranks log.
TEXT_MAX = 600
#: Begins the text that is added to an error.
_MARK = "memascend: this is rank"
#: The number of training passes begun, and the begins and ends of evaluations since the last one.
Position = tuple[int, int]
_START: Position = (0, 0)
_NEVER: Position = (-1, 0)
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

    Ranks begin the same passes in the same order, so equal positions are the same pass.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world: int,
        end: Callable[[str], None],
        new_event: Callable[[], Event] | None = None,
    ) -> None:
        """Start without a pass.

        Args:
            store: Shared by all ranks.
            rank: The number of this rank.
            world: The number of ranks.
            end: Ends this process with a message.
            new_event: Makes an event of the device; None for the CPU.
        """
        self._store, self._rank, self._world, self._end = store, rank, world, end
        self._new_event = new_event
        self._prefix = f"memascend/{next(_numbers)}"
        self._position = _START
        self._failed = _NEVER  # position of this rank's last failure
        self._is_left = False  # no pass was begun since
        self._evaluated: tuple[Position, Event | None] = _NEVER, None  # behind the last evaluation
        self._seen = 0  # failures of all ranks that were dealt with
        self._since = 0.0  # when the next one was seen
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def begin_pass(self, *, trains: bool, was_left: bool) -> None:
        """Begin a forward pass.

        Args:
            trains: Whether the model trains; else `end_pass` ends this evaluation.
            was_left: Whether an error ended the last backward pass, noted or not.

        Raises:
            LoneRankError: This rank failed in the last pass, and another one may wait in it.
        """
        if was_left and self._failed != self._position:
            self._note("its backward pass ended with an error")
        if self._is_left:
            self._is_left = False
            self._wait_for_others()
        passes, evaluations = self._position
        self._position = (passes + 1, 0) if trains else (passes, evaluations + 1)
        if self._thread is None:
            self._stop = threading.Event()
            arguments = weakref.ref(self), self._stop
            self._thread = threading.Thread(
                target=_watch, args=arguments, name="memascend-ranks", daemon=True
            )
            self._thread.start()

    def end_pass(self, *, is_well: bool) -> None:
        """End a forward pass of an evaluation, well or by an error."""
        passes, evaluations = self._position
        self._position = passes, evaluations + 1
        if is_well:
            self._evaluated = self._position, event_here(self._new_event)

    def note(self, error: BaseException) -> None:
        """Note that the pass or step failed on this rank, and add the remedy to the error."""
        text, seconds = str(error), PATIENCE_S + 2 * POLL_S
        if _MARK in text:  # a call inside this one has noted it
            return
        error.args = (
            f"{text}\n{_MARK} {self._rank} of {self._world}. Ranks that wait for it end within "
            f"{seconds:.0f} s. fix: let this error end the run, and start it again with smaller "
            "slices (memascend.micro_batches.sequences) or a smaller batch",
        )
        self._note(text)

    def close(self) -> None:
        """End the thread; a pass starts another one."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(POLL_S)
        self._thread, self._since = None, 0.0

    def look(self) -> bool:
        """Look for failures of other ranks; end this process if it waits for one.

        Returns:
            Whether to look again.
        """
        try:
            count = self._store.add(f"{self._prefix}/failures", 0)
            if count == self._seen:
                return True
            is_complete = self._publish()
            note = json.loads(self._store.get(f"{self._prefix}/last"))
        except RuntimeError:  # the process that has the store is gone
            return False
        failed = tuple(note["position"])
        if self._failed >= failed or self._position > failed:
            self._since = 0.0
            self._seen = count if is_complete else self._seen
            return True
        self._since = self._since or time.monotonic()
        if time.monotonic() - self._since < PATIENCE_S:
            return True
        self._end(
            f"memascend: rank {note['rank']} of {self._world} failed alone, and rank {self._rank} "
            "waits for it in a collective, where no error reaches it: this process ends. Its "
            f"error: {note['error']}\nfix: start all ranks again; if device memory ran out, with "
            "smaller slices (memascend.micro_batches.sequences) or a smaller batch"
        )
        return False

    def _note(self, text: str) -> None:
        self._failed, self._is_left = self._position, True
        self._publish()
        note = {"rank": self._rank, "position": self._failed, "error": text[:TEXT_MAX]}
        self._store.set(f"{self._prefix}/last", json.dumps(note))
        self._store.add(f"{self._prefix}/failures", 1)

    def _publish(self) -> bool:
        """Tell other ranks the passes in which this one does not wait for them.

        Returns:
            Whether the device has come as far as this thread; else there is more to tell later.
        """
        position, event = self._evaluated
        has_passed = event is None or event.query()
        state = self._failed, position if has_passed else _NEVER
        self._store.set(self._key(self._rank), json.dumps(state))
        return has_passed

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/rank/{rank}"

    def _may_wait(self, rank: int) -> bool:
        """Return whether a rank may wait in the pass in which this one failed.

        It does not if it failed as well, or if its device has ended that evaluation: this rank has
        joined all collectives then.
        """
        if not self._store.check([self._key(rank)]):
            return True
        failed, evaluated = json.loads(self._store.get(self._key(rank)))
        return tuple(failed) < self._failed and tuple(evaluated) <= self._failed

    def _wait_for_others(self) -> None:
        others = [rank for rank in range(self._world) if rank != self._rank]
        deadline = time.monotonic() + PATIENCE_S
        while others:
            if not self._may_wait(others[-1]):
                others.pop()
            elif time.monotonic() < deadline:
                time.sleep(min(POLL_S, PATIENCE_S) / 50)
            else:
                others = [rank for rank in others if self._may_wait(rank)]
                raise LoneRankError(self._rank, others, PATIENCE_S)


def _watch(failures: weakref.ref[LoneFailures], stop: threading.Event) -> None:
    """Look for failures until the model is gone, or its engine destroyed."""
    while not stop.wait(POLL_S):
        found = failures()
        if found is None or not found.look():
            return
        del found  # the model may go while this thread waits


@contextmanager
def noting(failures: LoneFailures | None) -> Iterator[None]:
    """Wrap a backward pass or a step: note it if device memory runs out.

    Args:
        failures: Those of the model; None: it has one rank.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        if failures is not None:
            failures.note(error)
        raise


@contextmanager
def noting_forward(failures: LoneFailures, *, trains: bool, was_left: bool) -> Iterator[None]:
    """Wrap a forward pass likewise; `LoneFailures.begin_pass` has the arguments and the error."""
    failures.begin_pass(trains=trains, was_left=was_left)
    is_well = False
    try:
        with noting(failures):
            yield
        is_well = True
    finally:
        if not trains:
            failures.end_pass(is_well=is_well)


def lone_failures(new_event: Callable[[], Event] | None) -> LoneFailures | None:
    """Return those of a new model; None with one rank, or where torch shows no store."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    find = getattr(distributed_c10d, "_get_default_store", None)
    store: Any = find() if find is not None and torch.distributed.is_initialized() else None
    if store is None:
        return None
    return LoneFailures(store, dist.get_rank(), dist.get_world_size(), _end, new_event)


def _end(message: str) -> None:
    log.critical(message)
    os._exit(1)  # the script's thread is in a collective that does not return
