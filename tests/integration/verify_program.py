"""Trains on several ranks; on the last one a bit of the drive turns in the middle.

Started by tests/integration/test_verify.py. The rank whose drive it is prints `tensor same` when
the tensor that it was in has not been written since.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import deepspeed
import torch

from memascend.deepspeed.attach.attachment import attachment_of
from memascend.errors import CorruptionError
from memascend.nvme.resident import ResidentStore
from memascend.plan.checksums import GRAIN_BYTES
from tests.integration.checkpoint_program import build, train


def content_of(store: ResidentStore, key: str) -> torch.Tensor:
    target = torch.empty(store.nbytes(key=key), dtype=torch.uint8)
    store.read(key=key, target=target).wait()
    return target


class Volume:
    """The file of this process on the drive; it has no name, but its descriptor leads to it."""

    def __init__(self, drive: Path) -> None:
        own = Path("/proc/self/fd")
        names = [entry for entry in os.listdir(own) if (own / entry).exists()]
        found = [name for name in names if os.readlink(own / name).startswith(f"{drive}/")]
        assert len(found) == 1, found
        self._descriptor = os.open(own / found[0], os.O_RDWR)

    def place_of(self, content: torch.Tensor) -> int:
        """Where a key lies whose content is this."""
        wanted = content[:GRAIN_BYTES].numpy().tobytes()
        for offset in range(0, os.fstat(self._descriptor).st_size, GRAIN_BYTES):
            if os.pread(self._descriptor, len(wanted), offset) == wanted:
                return offset
        raise AssertionError("the tensor is not on the volume")

    def turn_a_bit(self, offset: int) -> None:
        byte = os.pread(self._descriptor, 1, offset)[0]
        os.pwrite(self._descriptor, bytes([byte ^ 4]), offset)
        os.fsync(self._descriptor)


def go_on_with_a_turned_bit(engine: Any, drive: Path, stream: str) -> None:
    """Trains until the bit is found, then looks at what it would have changed."""
    engine.optimizer.finish_walk()  # the last step may still be writing
    attachment = attachment_of(engine)
    assert attachment is not None
    store = attachment.runtime.store
    assert store is not None
    key = next(name for name in store.keys() if name.startswith(f"{stream}."))  # noqa: SIM118
    before = content_of(store, key)
    volume = Volume(drive)
    offset = volume.place_of(before)
    print(f"turning a bit of {key} at {offset}", flush=True)
    volume.turn_a_bit(offset + 5)
    try:
        train(engine, 1, 2)
    except CorruptionError as error:
        volume.turn_a_bit(offset + 5)
        is_named = (error.key, error.offset) == (key, offset)
        if is_named and torch.equal(content_of(store, key), before):
            print("tensor same", flush=True)
        raise


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("drive", type=Path)
    parser.add_argument("stream", choices=["low", "state"])
    parser.add_argument("--checkpoint", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    engine = build(json.loads(arguments.config.read_text()), seed=1)
    train(engine, 0, 1)
    if arguments.checkpoint is not None:
        engine.save_checkpoint(str(arguments.checkpoint), tag="here")
    if deepspeed.comm.get_rank() == deepspeed.comm.get_world_size() - 1:
        go_on_with_a_turned_bit(engine, arguments.drive, arguments.stream)
    else:
        train(engine, 1, 2)
    print("went on", flush=True)


if __name__ == "__main__":
    main()
