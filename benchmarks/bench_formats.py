"""Does training notice the format in which Adam's moments and master weights are stored?

Three tables, beside fp32 and beside the formats of two other libraries (`state_formats.py`):

- A small model of bytes is trained over several seeds with each format; the learning rate falls to
  a hundredth. Losses are those of the same held-out sequences. To know how much a loss moves by
  chance, fp32 runs again with one weight moved, and with other batches.
- Moments of the first fp32 run are rounded once: how far does that move an update?
- Second moments follow gradients of a known size, half of which have fallen to a tenth.

Everything runs on the CPU, in one thread. The JSON is written after each training, and `--show`
prints the tables of one.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import harness
import torch
from byte_model import ByteModel, load_text
from byte_training import (
    BETA1,
    BETA2,
    EPSILON,
    PARTS,
    Run,
    Training,
    coefficients,
    first_weights,
    train,
)
from state_formats import BITSANDBYTES, FLASH_OPTIM, FORMATS, INT8, NUMEL_MULTIPLE, Moments

from memascend.kernels.adam import make_rounding_key

QUESTION = "Losses, updates and second moments with each format of moments and master weights"
MOVED = 1.01
#: Sizes of gradients that fall, relative to before.
FALL = 0.1
#: Added to a seed where only the batches shall differ.
OTHER_BATCHES = 1000
#: Cases beside the seeds.
ROUNDED, FOLLOWED = "rounded at ", "second moments follow"


@dataclass(frozen=True, slots=True)
class Size:
    """How large everything is."""

    training: Training
    seeds: tuple[int, ...]
    text_bytes: int
    #: Steps after which moments are rounded once, and one after which second moments follow.
    rounded_at: tuple[int, ...]
    followed_from: int
    followed_blocks: int
    followed_steps: int


SIZES = {
    "small": Size(Training(ByteModel(32, 1, 2, 16), 2, 8, 2, 2), (0,), 1 << 16, (4, 8), 4, 2, 6),
    "large": Size(
        training=Training(
            ByteModel(width=96, layers=3, heads=4, length=128),
            rows=4,
            steps=3000,
            warmup=100,
            held_out_batches=48,
        ),
        seeds=(0, 1, 2),
        text_bytes=16 << 20,
        rounded_at=(100, 1000, 3000),
        followed_from=1000,
        followed_blocks=40,
        followed_steps=3000,
    ),
}

#: The others are compared with the first of each seed.
RUNS = (
    Run("fp32", "fp32"),
    Run("fp32, one weight moved by 1 %", "fp32", moved=MOVED),
    Run("fp32, other batches", "fp32", batches=OTHER_BATCHES),
    Run("bf16 moments", "bf16"),
    Run("int8", "int8"),
    Run("int8/bf16", "int8/bf16"),
    Run("fp32 moments, bf16+8 master", "fp32", INT8),
    Run("int8, bf16+8 master", "int8", INT8),
    Run("FlashOptim's moments", FLASH_OPTIM),
    Run("bitsandbytes' moments", BITSANDBYTES),
)


# -- moments without a model ---------------------------------------------------------------------


def update_of(exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, step: int) -> torch.Tensor:
    """The change of weights at a learning rate of 1."""
    first, second = exp_avg.double() / (1 - BETA1**step), exp_avg_sq.double() / (1 - BETA2**step)
    return first / (second.sqrt() + EPSILON)


def one_rounding(
    exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, step: int
) -> dict[str, dict[str, float]]:
    """For each format the error of an update, its largest element, and moments that became zero."""
    exact = update_of(exp_avg, exp_avg_sq, step)
    found = {}
    for name, make in FORMATS.items():
        moments = make(exp_avg.numel())
        moments.put(exp_avg, exp_avg_sq, make_rounding_key(step))
        first, second = moments.read()
        made = update_of(first, second, step)
        is_lost = (second == 0) & (exp_avg_sq > 0)
        found[name] = {
            "error": ((made - exact).norm() / exact.norm()).item(),
            "largest": (made.abs().max() / exact.abs().max()).item(),
            "lost_share": is_lost.double().mean().item(),
        }
    return found


def chosen_blocks(exp_avg_sq: torch.Tensor, count: int) -> torch.Tensor:
    """Second moments of whole blocks without a zero, evenly spread over the model."""
    blocks = exp_avg_sq.view(-1, NUMEL_MULTIPLE)
    blocks = blocks[(blocks > 0).all(1)]
    places = torch.linspace(0, len(blocks) - 1, min(count, len(blocks))).long()
    return blocks[places].flatten()


def following(exp_avg_sq: torch.Tensor, steps: int) -> dict[str, dict[str, float]]:
    """Lets second moments follow gradients, every other of which has fallen to a tenth.

    Gradients are normal numbers; before the first step their sizes were the roots of `exp_avg_sq`.

    Returns:
        For each format the ratio of sqrt(stored) to sqrt(exact) at the end: median and root of the
        mean square error, of gradients that stayed and of those that fell.
    """
    numel = exp_avg_sq.numel()
    sizes = exp_avg_sq.sqrt()
    sizes[::2] *= FALL
    exact = exp_avg_sq.double()
    formats = {name: make(numel) for name, make in FORMATS.items()}
    for moments in formats.values():
        moments.put(torch.zeros(numel), exp_avg_sq, make_rounding_key(0))
    generator = torch.Generator().manual_seed(0)
    for step in range(1, steps + 1):
        gradient = torch.randn(numel, generator=generator) * sizes
        exact = exact * BETA2 + gradient.double().square() * (1 - BETA2)
        for moments in formats.values():
            moments.step(
                gradient=gradient,
                weight=torch.zeros(numel),
                coefficients=coefficients(steps, 0.0, 1.0),
                rounding_key=make_rounding_key(step),
                threads=1,
            )
    found = {}
    for name, moments in formats.items():
        ratio = (moments.read()[1].double() / exact).sqrt()
        parts = {"steady": ratio[1::2], "fallen": ratio[::2]}
        found[name] = {
            f"{part}_{figure}": value.item()
            for part, values in parts.items()
            for figure, value in (
                ("median", values.median()),
                ("error", (values - 1).square().mean().sqrt()),
            )
        }
    return found


# -- rows ----------------------------------------------------------------------------------------


class Bench:
    """All trainings, and the rows that they and the moments of the first one give."""

    def __init__(self, size: Size, out: Path | None) -> None:
        self._size, self._out = size, out
        self._machine = harness.machine()
        self._text = load_text(size.text_bytes)
        self.rows: list[harness.Row] = []

    def run(self, seeds: Sequence[int]) -> None:
        """Trains every run of each seed; the first one's moments are looked at."""
        torch.set_num_threads(1)
        training = self._size.training
        for seed in seeds:
            start = first_weights(RUNS[0], seed, training)
            base: torch.Tensor | None = None
            for run in RUNS:
                is_watched = run == RUNS[0] and seed == seeds[0]
                begin_s = time.perf_counter()
                losses, last = train(
                    run, seed, training, self._text, self._look if is_watched else _ignore
                )
                base = last if base is None else base
                distance = ((last - base).norm() / (base - start).norm()).item()
                figures = {"losses": losses, "distance": distance}
                self._add(f"seed {seed}", run.name, figures, seconds=time.perf_counter() - begin_s)

    def _look(self, step: int, moments: Moments) -> None:
        if step in self._size.rounded_at:
            for name, figures in one_rounding(*moments.read(), step).items():
                self._add(f"{ROUNDED}step {step}", name, figures)
        if step == self._size.followed_from:
            sizes = chosen_blocks(moments.read()[1], self._size.followed_blocks)
            for name, figures in following(sizes, self._size.followed_steps).items():
                self._add(FOLLOWED, name, figures)

    def _add(self, case: str, contender: str, figures: dict[str, Any], **more: float) -> None:
        training = self._size.training
        config = {
            "parameters": training.model.numel,
            "steps": training.steps,
            "rows": training.rows,
            "length": training.model.length,
            "text_bytes": self._text.learned.numel() + self._text.held_out.numel(),
        }
        self.rows.append(
            harness.Row("formats", case, contender, figures, config | more, self._machine)
        )
        print(f"{case}, {contender}: {figures}", flush=True)
        harness.write("formats", self.rows, self._out)


def _ignore(_step: int, _moments: Moments) -> None:
    """Looks at nothing."""


# -- tables --------------------------------------------------------------------------------------


def tables(rows: Sequence[Mapping[str, Any]]) -> str:
    """The tables of a JSON file, in Markdown; only seeds whose runs are all there.

    Seeds may be in several files; of other rows that are in more than one the first counts.
    """
    cases: dict[str, dict[str, Any]] = {}
    for row in rows:
        cases.setdefault(row["case"], {}).setdefault(row["contender"], row["figures"])
    seeds = [
        found
        for case, found in cases.items()
        if case.startswith("seed ") and len(found) == len(RUNS)
    ]
    rounded = {case: found for case, found in cases.items() if case.startswith(ROUNDED)}
    parts = []
    if seeds:
        steps = rows[0]["config"]["steps"]
        parts = [_training_table(seeds), _parts_table(seeds, steps)]
    if rounded:
        parts.append(_rounding_table(rounded))
    if FOLLOWED in cases:
        parts.append(_following_table(cases[FOLLOWED]))
    return "\n\n".join(map("\n".join, parts))


def _training_table(seeds: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "| formats | loss at the end | above fp32 | mean | distance of weights from fp32's |"
    yield "|---|---|---|---|---|"
    for run in RUNS:
        last = [found[run.name]["losses"][-1] for found in seeds]
        cells = ["", "", ""]
        if run != RUNS[0]:
            above = _above(run, seeds, -1)
            cells = [
                _join(above, "{:+.4f}"),
                f"{fmean(above):+.4f}",
                _join([found[run.name]["distance"] for found in seeds], "{:.2f}"),
            ]
        yield _line([run.name, _join(last, "{:.4f}"), *cells])


def _parts_table(seeds: Sequence[Mapping[str, Any]], steps: int) -> Iterator[str]:
    ends = [steps // PARTS * part for part in range(1, PARTS + 1)]
    yield _line(["above fp32, mean of seeds", *map("step {}".format, ends)])
    yield "|---" * (PARTS + 1) + "|"
    for run in RUNS[1:]:
        means = [fmean(_above(run, seeds, part)) for part in range(PARTS)]
        yield _line([run.name, *map("{:+.4f}".format, means)])


def _above(run: Run, seeds: Sequence[Mapping[str, Any]], part: int) -> list[float]:
    return [
        found[run.name]["losses"][part] - found[RUNS[0].name]["losses"][part] for found in seeds
    ]


def _rounding_table(cases: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    steps = [f"error at {case.removeprefix(ROUNDED)}" for case in cases]
    yield _line(["moments", *steps, "largest update", "second moments that become 0"])
    yield "|---" * (len(steps) + 3) + "|"
    for name in FORMATS:
        figures = [found[name] for found in cases.values()]
        cells = [
            *(f"{figure['error']:.4f}" for figure in figures),
            f"{max(figure['largest'] for figure in figures):.2f}",
            f"{max(figure['lost_share'] for figure in figures):.4%}",
        ]
        yield _line([name, *cells])


def _following_table(found: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    yield "| second moments | steady: median, error | fallen: median, error |"
    yield "|---|---|---|"
    for name, figures in found.items():
        cells = [
            f"{figures[f'{part}_median']:.3f}, {figures[f'{part}_error']:.3f}"
            for part in ("steady", "fallen")
        ]
        yield _line([name, *cells])


def _join(values: Sequence[float], form: str) -> str:
    return ", ".join(map(form.format, values))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def run_and_report(options: argparse.Namespace) -> None:
    """Runs it all, or shows the tables of a run."""
    if options.show is not None:
        print(tables([row for file in options.show for row in json.loads(file.read_text())]))
        return
    size = SIZES["small" if options.small else "large"]
    bench = Bench(size, options.out)
    bench.run(options.seeds or size.seeds)
    print(tables([asdict(row) for row in bench.rows]))


def arguments() -> argparse.ArgumentParser:
    parser = harness.parser(QUESTION)
    parser.add_argument("--seeds", type=int, nargs="+", help="these alone")
    parser.add_argument(
        "--show", type=Path, nargs="+", metavar="FILE", help="print the tables of these JSON files"
    )
    return parser


if __name__ == "__main__":
    run_and_report(arguments().parse_args())
