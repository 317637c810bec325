"""Trains beyond a write budget, stops with a checkpoint, resumes, and prints all of it as JSON.

Started by test_wear.py. Runs have the same data and no budget, one that stops, one that warns.
"""

from __future__ import annotations

import gc
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import deepspeed
import torch

import memascend  # noqa: F401  what the torch.backends entry point does in an installed copy
from memascend.errors import WriteBudgetError
from tests.integration.checkpoint_program import WIDTH, build
from tests.integration.programs import BLOCK, training_config
from tests.support.process_group import leave

STEPS, SAVED_EVERY = 6, 2


def run(
    folder: Path, name: str, wear: dict[str, Any], *, first: int = 0, load: str = ""
) -> dict[str, Any]:
    """Train and save every few steps; return losses, bytes at saves, and the error at the end."""
    drive = folder / name
    drive.mkdir()
    config = training_config(drive, BLOCK | {"wear": wear}, 1)
    engine = build(config, seed=2 if load else 1)
    found: dict[str, Any] = {"losses": [], "saved": [], "error": ""}
    if load:
        engine.load_checkpoint(str(folder / "checkpoints"), tag=load)
    try:
        for step in range(first, STEPS):
            generator = torch.Generator().manual_seed(step)
            rows = torch.randn(4, WIDTH, generator=generator).to(torch.bfloat16)
            loss = engine(rows)
            engine.backward(loss)
            engine.step()
            found["losses"].append(loss.item())
            if (step + 1) % SAVED_EVERY == 0:
                engine.save_checkpoint(str(folder / "checkpoints"), tag=f"{name}-{step + 1}")
                found["saved"].append(engine.memascend.ledger().wear.written_bytes)
    except WriteBudgetError as error:
        found["error"] = str(error)
    engine.destroy()
    gc.collect()
    return found


class Warnings(logging.Handler):
    """Keeps what memascend warns of its budget."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "write_budget" in record.getMessage():
            self.texts.append(record.getMessage())

    def taken(self) -> list[str]:
        """Return those since the last call."""
        texts, self.texts = self.texts, []
        return texts


def main() -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    warnings = Warnings()
    logging.getLogger("memascend").addHandler(warnings)
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name)
        whole = run(folder, "whole", {})
        # Writes of a step end during the next: exceeded when the third or fourth step has ended.
        budget = sum(whole["saved"][:2]) // 2
        for kind in ("stop", "warn"):
            wear = {"write_budget": budget, "over_budget": kind}
            found = run(folder, kind, wear)
            whole[kind] = found | {"warnings": warnings.taken()}
        left = {"write_budget": 2 * budget, "over_budget": "stop"}
        whole["resumed"] = run(folder, "resumed", left, first=4, load="stop-4")
        whole["resumed"]["warnings"] = warnings.taken()
        whole["budget"] = budget
    print(json.dumps(whole))
    leave()


if __name__ == "__main__":
    main()
