"""Trains; one step is left by an error, at each of its gathers in turn, and tried again.

Started by tests/integration/test_retries.py. Prints for each place and error one line of JSON with
the losses, the norm and the weights that came out, the bytes of slots that nobody gave back, and
how many activations are still saved.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero import partition_parameters
from torch.utils.checkpoint import checkpoint

import memascend.errors  # noqa: F401  also does what the entry point does in an installed copy
from tests.support.process_group import leave

WIDTH, ROWS, STEPS, FAILING_STEP = 512, 8, 4, 2
ERRORS: dict[str, type[BaseException]] = {
    "memory": torch.OutOfMemoryError,
    "ctrl-c": KeyboardInterrupt,
}


class Model(torch.nn.Module):
    """Layers that are recomputed in backward, tied to nothing, one with a tiny tensor."""

    def __init__(self, norm: type[torch.nn.Module] = torch.nn.LayerNorm) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = norm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = rows
        for layer in self.layers:
            hidden = hidden + torch.tanh(checkpoint(layer, hidden, use_reentrant=False))
        return self.head(self.norm(hidden)).float().square().mean()


class Gathers:
    """Counts parameters that DeepSpeed gathers, and lets one fail after its copies were issued.

    How many are gathered together depends on what has been read by then; how many in all does not.
    """

    def __init__(self) -> None:
        self.count = 0
        self.failing: int | None = None
        self.error: type[BaseException] = torch.OutOfMemoryError

    def watch(self, kind: Any) -> None:
        init = kind.__init__

        def counted(handle: Any, params: Any, *arguments: Any) -> None:
            init(handle, params, *arguments)
            self.count += len(params) if isinstance(params, list) else 1
            if self.failing is not None and self.count >= self.failing:
                self.failing = None
                raise self.error("in the middle of a gather")

        kind.__init__ = counted


@contextmanager
def trained(config: dict[str, Any]) -> Iterator[Any]:
    torch.manual_seed(1)
    with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16):
        model = Model()
    engine = deepspeed.initialize(model=model, config=config)[0]
    try:
        yield engine
    finally:
        engine.destroy()


def pass_over(engine: Any, step: int, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    batch = torch.randn(rows, WIDTH, generator=generator).to(engine.device, torch.bfloat16)
    loss = engine(batch)
    engine.backward(loss)
    return loss


def result(config: dict[str, Any], gathers: Gathers, at: int | None, kind: str) -> dict[str, Any]:
    """What comes of a run whose third step is left at its gather number `at`; None: never."""
    losses, count = [], 0
    with trained(config) as engine:
        for step in range(STEPS):
            rows = ROWS // 2 if step == FAILING_STEP else ROWS
            if step == FAILING_STEP and at is not None:
                gathers.failing, gathers.error = gathers.count + at, ERRORS[kind]
                try:
                    pass_over(engine, step, ROWS)
                except ERRORS[kind]:
                    pass
                assert gathers.failing is None, "nothing failed"
            before = gathers.count
            loss = pass_over(engine, step, rows)
            if step == FAILING_STEP:
                count = gathers.count - before
            engine.step()
            losses.append(loss.item().hex())
        norm = float(engine.get_global_grad_norm()).hex()
        runtime = engine.memascend.runtime
        with runtime.lock:
            lost = runtime.pool.held_bytes - runtime.pool.free_bytes
        saved = 0
        if runtime.config.activations.enabled:
            assert runtime.activations.traffic.read_bytes > 0
            saved = runtime.activations.count
        weights = hashlib.sha256()
        for parameter in engine.module.parameters():
            full = deepspeed.utils.safe_get_full_fp32_param(parameter)
            weights.update(full.contiguous().cpu().numpy().tobytes())
        numbers = [*losses, norm, weights.hexdigest()]
        found = {"at": at, "kind": kind, "gathers": count, "numbers": numbers}
        return found | {"lost": lost, "saved": saved}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("--every", type=int, default=1, help="only every so many gathers fail")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    config = json.loads(arguments.config.read_text())
    gathers = Gathers()
    gathers.watch(partition_parameters.NoGatherHandle)
    gathers.watch(partition_parameters.NoGatherCoalescedHandle)
    undisturbed = result(config, gathers, None, "none")
    print("RESULT " + json.dumps(undisturbed), flush=True)
    for at in range(1, undisturbed["gathers"] + 1, arguments.every):
        for kind in ERRORS:
            print("RESULT " + json.dumps(result(config, gathers, at, kind)), flush=True)
    leave()


if __name__ == "__main__":
    main()
