"""Does training with Muon notice a momentum that is stored in codes of 8 bits?

A small model of bytes is trained over several seeds. DeepSpeed's `muon_update` makes the updates of
matrices; embeddings, the head and norms have torch's AdamW. Momentum is stored between two steps in
bf16, as DeepSpeed keeps it, in our codes, or in equal distances of 8 bits, each rounded to nearest.
To know how much a loss moves by chance, the bf16 run is made again with one weight moved, and with
other batches. Everything runs on the CPU, in one thread.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import harness
import torch
from byte_model import ByteModel, Text, load_text, sequences
from byte_training import Training, held_out_loss, learning_rate

from memascend.kernels import codes

QUESTION = "Losses of Muon with its momentum in bf16 and in 8 bits"
BF16 = torch.bfloat16
#: Muon's rate is so many times that of AdamW, which rises and falls.
MUON_RATE = 10.0
BETA, DECAY = 0.95, 0.1
MOVED, OTHER_BATCHES = 1.01, 1000
#: Largest code of equal distances.
LARGEST = 127


@dataclass(frozen=True, slots=True)
class Run:
    """A training: the form of momentum, and its difference from the first run beside it."""

    name: str
    stored: Callable[[torch.Tensor], torch.Tensor]
    moved: float = 1.0
    batches: int = 0


@dataclass(frozen=True, slots=True)
class Size:
    """How large everything is."""

    training: Training
    seeds: tuple[int, ...]
    text_bytes: int


SIZES = {
    "small": Size(Training(ByteModel(32, 1, 2, 16), 2, 8, 2, 2), (0,), 1 << 16),
    "large": Size(Training(ByteModel(96, 3, 4, 128), 4, 300, 30, 48), (0, 1, 2), 16 << 20),
}


def in_bf16(momentum: torch.Tensor) -> torch.Tensor:
    """Returns the momentum of a step in bf16."""
    return momentum


def in_codes(momentum: torch.Tensor) -> torch.Tensor:
    """Returns momentum as it is read from our codes."""
    values = momentum.flatten().float()
    stored = torch.empty(values.numel(), dtype=torch.int8)
    scales = torch.empty(codes.scale_count(values.numel()))
    codes.encode(values, stored, scales)
    codes.decode(stored, scales, values)
    return values.view_as(momentum).to(momentum.dtype)


def in_equal_distances(momentum: torch.Tensor) -> torch.Tensor:
    """Returns momentum as multiples of the largest of a block, divided by 127."""
    blocks = momentum.float().view(-1, codes.SCALE_NUMEL)
    distance = (blocks.abs().amax(1, keepdim=True) / LARGEST).clamp_min(1e-30)
    return ((blocks / distance).round() * distance).view_as(momentum).to(momentum.dtype)


#: The others are compared with the first of each seed.
RUNS = (
    Run("bf16", in_bf16),
    Run("bf16, one weight moved by 1 %", in_bf16, moved=MOVED),
    Run("bf16, other batches", in_bf16, batches=OTHER_BATCHES),
    Run("int8", in_codes),
    Run("8 bits, equal distances", in_equal_distances),
)


def train(run: Run, seed: int, training: Training, text: Text) -> tuple[float, torch.Tensor]:
    """Trains, and gives the held-out loss at the end and the last weights in fp32."""
    from deepspeed.runtime.zero.muon.original_muon import muon_update

    model = training.model
    whole = model.initial(seed).to(BF16).float()
    whole[model.numel // 2] *= run.moved
    shapes = model.shapes()
    parts = dict(zip(shapes, whole.split([math.prod(one) for one in shapes.values()]), strict=True))
    matrices = [name for name in shapes if "." in name and "norm" not in name]
    momenta = {name: torch.zeros(shapes[name], dtype=BF16) for name in matrices}
    others = [torch.nn.Parameter(part) for name, part in parts.items() if name not in momenta]
    adam = torch.optim.AdamW(others, betas=(0.9, 0.999), weight_decay=DECAY)
    generator = torch.Generator().manual_seed(seed + run.batches)
    for step in range(1, training.steps + 1):
        used = whole.to(BF16).float().requires_grad_()
        batch = sequences(text.learned, training.rows, model.length, generator)
        model.loss(used, *batch).backward()
        assert used.grad is not None
        gradients = dict(
            zip(
                shapes,
                used.grad.to(BF16).split([one.numel() for one in parts.values()]),
                strict=True,
            )
        )
        rate = learning_rate(step, training)
        for name in matrices:
            gradient = gradients[name].view(shapes[name]).clone()
            update = muon_update(gradient, momenta[name], beta=BETA)
            momenta[name] = run.stored(momenta[name])
            parts[name].mul_(1 - MUON_RATE * rate * DECAY)
            parts[name].add_(update.flatten(), alpha=-MUON_RATE * rate)
        adam.param_groups[0]["lr"] = rate
        for one, name in zip(others, [n for n in parts if n not in momenta], strict=True):
            one.grad = gradients[name].float()
        adam.step()
    return held_out_loss(whole.to(BF16).float(), training, text), whole


def trained(size: Size, out: Path | None) -> list[harness.Row]:
    """Train every run of each seed; return a row for each."""
    torch.set_num_threads(1)
    machine, text, training = harness.machine(), load_text(size.text_bytes), size.training
    rows: list[harness.Row] = []
    for seed, run in itertools.product(size.seeds, RUNS):
        begin_s = time.perf_counter()
        with torch.compiler.set_stance("force_eager"):  # compiling takes minutes
            loss, last = train(run, seed, training, text)
        if run is RUNS[0]:
            base, start = last, training.model.initial(seed).to(BF16).float()
        distance = ((last - base).norm() / (base - start).norm()).item()
        figures = {"loss": loss, "distance": distance}
        config = {"parameters": training.model.numel, "steps": training.steps}
        config |= {"seconds": time.perf_counter() - begin_s}
        rows.append(
            harness.Row("muon_momentum", f"seed {seed}", run.name, figures, config, machine)
        )
        print(f"seed {seed}, {run.name}: {figures}", flush=True)
        harness.write("muon_momentum", rows, out)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The losses of all seeds, by run, beside the first one's."""
    found: dict[str, list[dict[str, float]]] = {}
    for row in rows:
        found.setdefault(row["contender"], []).append(row["figures"])
    base = [one["loss"] for one in next(iter(found.values()))]
    lines = [
        "| momentum | loss at the end | above bf16 | mean | distance of weights from bf16's |",
        "|---|---|---|---|---|",
    ]
    for name, figures in found.items():
        above = [one["loss"] - first for one, first in zip(figures, base, strict=True)]
        cells = [name, ", ".join(f"{one['loss']:.4f}" for one in figures), "", "", ""]
        if name != RUNS[0].name:
            cells[2:4] = ", ".join(f"{one:+.4f}" for one in above), f"{fmean(above):+.4f}"
            cells[4] = ", ".join(f"{one['distance']:.2f}" for one in figures)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def run_and_report(options: argparse.Namespace) -> None:
    """Trains everything and prints the table; nothing without DeepSpeed."""
    if options.without_deepspeed:
        return
    size = SIZES["small" if options.small else "large"]
    print(table([asdict(row) for row in trained(size, options.out)]))


if __name__ == "__main__":
    run_and_report(harness.parser(QUESTION).parse_args())
