"""Stands in for the runtime of an attachment."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from memascend.config.block import parse_block
from memascend.ledger.ledger import Ledger
from memascend.ledger.wear import WearMeter
from memascend.streaming.background import BackgroundStep
from tests.support.streaming_fakes import FakeMemory, FakeStore


class FakeRuntime:
    """What an attachment asks of a runtime. Each step writes ten bytes."""

    def __init__(self, block: dict[str, Any], *, has_arena: bool, has_store: bool) -> None:
        self.config = parse_block(block)
        self.memory = FakeMemory()
        self.host = SimpleNamespace(is_ours=has_arena)
        self.drive = SimpleNamespace(is_ours=has_store, stats=dict)
        self.io = FakeStore()
        self.adopted: list[Any] = []
        self.ledger_count = 0
        self.limit_bytes = 5
        self.new_event = None
        self.background = BackgroundStep()
        self._wear = WearMeter(budget_bytes=self.config.wear.write_budget)
        self._steps = 0

    def adopt(self, plan: Any) -> None:
        self.adopted.append(plan)

    def ledger(self) -> Ledger:
        self.ledger_count += 1
        return Ledger((), None, 0, 0, 0, 0, {})

    def note_step(self) -> Any:
        self._steps += 1
        return self._wear.note_step(10 * self._steps)

    def read_wear(self) -> Any:
        return self._wear.read(10 * self._steps) if self.drive.is_ours else None
