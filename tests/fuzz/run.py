"""Feeds one target to atheris: `python tests/fuzz/run.py TARGET [options of libFuzzer]`.

A crash, a hang or too much memory ends it with the input written to a file.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

with atheris.instrument_imports(include=["memascend"]):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    """Runs until libFuzzer's options say that it is enough."""
    name, *options = sys.argv[1:]
    target = TARGETS[name]

    def mutate(data: bytes, bytes_max: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.randrange(8) == 0:
            changed: bytes = atheris.Mutate(data, len(data))
            return changed[:bytes_max]
        return target.mutate(data, rng)[:bytes_max]

    atheris.Setup(
        [sys.argv[0], f"-max_len={target.bytes_max}", *options],
        target.check,
        custom_mutator=mutate,
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()
