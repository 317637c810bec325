"""One of several processes that use a drive at once: it has a store of its own, as a rank has.

Started by `ranks.py`. It fills its keys, says that it is ready, and then moves all of them once for
each line that it is given, "read" or "write"; it answers with JSON: when it began and ended, on the
clock that all processes of a machine share.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch

from memascend.base.units import MIB
from memascend.memory.allocator import HostAllocator
from memascend.nvme.store import TensorStore

TENSOR_BYTES = 16 * MIB
#: Under way at once: more than a lane has in flight, so that its queue is always full.
TENSORS_UNDER_WAY = 12


def answer(**figures: Any) -> None:
    """Tells the parent."""
    print(json.dumps(figures), flush=True)


class Rank:
    """A store and what is moved."""

    def __init__(self, directory: Path, nbytes: int) -> None:
        memory = HostAllocator()
        bounce = memory.tensor(4 * MIB, torch.uint8, component="bench")
        self.store = TensorStore(volumes=[directory], bounce=bounce)
        self.keys = [f"k{number}" for number in range(max(1, nbytes // TENSOR_BYTES))]
        self.slots = [
            memory.tensor(TENSOR_BYTES, torch.uint8, component="bench").random_()
            for _ in range(min(TENSORS_UNDER_WAY, len(self.keys)))
        ]
        self.move("write")

    def move(self, verb: str) -> tuple[float, float]:
        """Reads or writes every key; returns when that began and ended."""
        tickets: deque[Any] = deque()
        began = time.monotonic()
        for number, key in enumerate(self.keys):
            if len(tickets) == len(self.slots):
                tickets.popleft().wait()
            slot = self.slots[number % len(self.slots)]
            if verb == "read":
                tickets.append(self.store.read(key=key, target=slot))
            else:
                tickets.append(self.store.write(key=key, source=slot))
        while tickets:
            tickets.popleft().wait()
        return began, time.monotonic()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--nbytes", type=int, required=True, help="moved for each line")
    options = parser.parse_args()
    rank = Rank(options.directory, options.nbytes)
    answer(ready=True, nbytes=len(rank.keys) * TENSOR_BYTES)
    for line in sys.stdin:
        began, ended = rank.move(line.strip())
        answer(began=began, ended=ended)
    rank.store.close()


if __name__ == "__main__":
    main()
