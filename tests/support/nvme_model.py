"""A store beside a dict of bytes: the rules that every state machine of a store shares."""

from __future__ import annotations

import unittest

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from memascend import _core
from tests.support.examples import examples
from tests.support.nvme_memory import read, write

KEYS = st.sampled_from(["a", "b", "c", "d", "e"])
FRACTIONS, SHIFTS = st.floats(0, 1), st.integers(0, 600)


class StoreModel(RuleBasedStateMachine):
    """Whoever derives from it opens a store with `begin`."""

    store: _core.Store | None = None

    def begin(self, store: _core.Store) -> None:
        self.store = store
        self.model: dict[str, bytes] = {}
        self.serial = 0

    def fresh(self, nbytes: int) -> bytes:
        self.serial += 1
        return (self.serial.to_bytes(4, "little") * (nbytes // 4 + 1))[:nbytes]

    @rule(key=KEYS, nbytes=st.integers(0, 300_000), shift=SHIFTS)
    def write_whole(self, key: str, nbytes: int, shift: int) -> None:
        self.model[key] = self.fresh(nbytes)
        write(self.store, key, self.model[key], shift=shift)

    @rule(key=KEYS, start=FRACTIONS, stop=FRACTIONS, shift=SHIFTS)
    def write_part(self, key: str, start: float, stop: float, shift: int) -> None:
        if key not in self.model:
            return
        old = self.model[key]
        offset, end = sorted((int(start * len(old)), int(stop * len(old))))
        part = self.fresh(end - offset)
        self.model[key] = old[:offset] + part + old[end:]
        write(self.store, key, part, offset=offset, shift=shift)

    @rule(key=KEYS, start=FRACTIONS, stop=FRACTIONS, shift=SHIFTS)
    def read_part(self, key: str, start: float, stop: float, shift: int) -> None:
        if key not in self.model:
            return
        content = self.model[key]
        offset, end = sorted((int(start * len(content)), int(stop * len(content))))
        assert read(self.store, key, end - offset, offset, shift) == content[offset:end]

    @rule(key=KEYS)
    def discard(self, key: str) -> None:
        assert self.store.discard(key=key) == (self.model.pop(key, None) is not None)

    def end(self) -> None:
        """What is in the store last is what the model says."""
        for key, content in self.model.items():
            assert read(self.store, key, len(content)) == content

    def teardown(self) -> None:
        if self.store is not None:
            self.end()
            self.store.close()


def run_as_test(machine: type[StoreModel], *, max_examples: int) -> type[unittest.TestCase]:
    """The machine as something that pytest runs."""
    machine.TestCase.settings = settings(
        max_examples=examples(max_examples),
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    return machine.TestCase
