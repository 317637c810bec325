"""How long do a training step and its optimizer step take, and what do they move on the drive?

Three training runs of the same model are alive side by side and take turns, one step each: stock as
DeepSpeed's documentation configures it, stock pipelined with the buffers that takes, and memascend
with an empty block. What is read and written is what the kernel counts for the process; all of them
bypass the page cache. Ratios are to stock, within a round.

In every round the drive is also timed with what memascend's optimizer step moves and nothing else
(`transfers.py`): no step that moves these bytes can take less.

With --accumulation a step has micro-steps, whose gradients are added up in --sum-dtype. Stock has
the sums in host memory; so memascend is there twice more: with the heap left alone, as stock has
it, and then with a limit that follows the model, for memory as stock has it.

With --one-pass besides memascend is there with as many slices as micro-steps, too: one micro-step
of all the tokens. All runs then checkpoint layers, by DeepSpeed's function, and embeddings are not
tied, so that losses can be equal. `loss_difference` is how far the mean losses of a run's steps are
from stock's, as a fraction.

With --muon all runs are DeepSpeed's Muon, and its CPU offload is the first of them. Stock with its
drives brings whole sub-groups into memory. Kernels are not compiled, which takes minutes for each
shape. On the CPU accelerator their temporaries are malloc's, so that memascend is there with the
heap left alone, too.

With --vary the runs are memascend's own and differ in one key; ratios are to the first:

    heap   freed memory goes back to the system: what it saves at the peak, what page faults cost
    limit  a limit of host memory: what it costs to keep
    tile   the size of a tile: from where on is larger no faster?
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import harness
from trainee import Model, Sleeping, Trainee, deepspeed_config, model_of, side_by_side
from transfers import ELEMENT_BYTES, READ, WRITTEN, Transfers

QUESTION = "Step: time and traffic of whole steps against stock"
# parameters: rounds
CASES = {
    "small": {20_000_000: 2},
    "large": {40_000_000: 12, 120_000_000: 8, 320_000_000: 5},
}
#: With --vary: what matters is the key, not the model.
VARIED_CASES = {"small": {20_000_000: 2}, "large": {80_000_000: 8}}
#: A limit costs more the larger the model.
LIMITED_CASES = {"small": {20_000_000: 2}, "large": {110_000_000: 8, 246_000_000: 4}}
#: With --size.
SQUARE_ROUNDS = 4
#: The first step makes the optimizer's states, and DeepSpeed learns the order of the modules.
WARMUPS = 2
TOKENS = 64
STOCK, PIPELINED, OURS = "stock", "stock pipelined", "memascend"
DRIVE = "the drive alone"


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to train.

    Attributes:
        optimizer: Keys of offload_optimizer.
        block: The memascend block, or None for stock.
        device: Where parameters and the optimizer are offloaded to.
        limit_bytes: `host_memory_limit` of that block for each parameter; 0: none is stated.
        is_one_pass: Whether a step is one micro-step of as many slices as others have micro-steps.
    """

    optimizer: Mapping[str, Any]
    block: Mapping[str, Any] | None = None
    device: str = "nvme"
    limit_bytes: int = 0
    is_one_pass: bool = False

    def block_for(self, model: Model | Sleeping) -> Mapping[str, Any] | None:
        """The block with a limit for this model."""
        if self.block is None or not self.limit_bytes:
            return self.block
        return {**self.block, "host_memory_limit": self.limit_bytes * model.numel}


CONTENDERS = {
    STOCK: Contender({"buffer_count": 4}),
    # Three sub-groups in flight, of four tensors each.
    PIPELINED: Contender({"buffer_count": 12, "pipeline_read": True, "pipeline_write": True}),
    OURS: Contender({}, block={}),
}

#: Of host memory for each parameter: about what stock takes with 40 M of them and sums in fp32, 4
#: bytes of them the sums'. Of larger models stock takes less for each.
LIMIT_BYTES = 12
#: With --accumulation; stock pipelined is left out.
ACCUMULATING = {
    STOCK: CONTENDERS[STOCK],
    OURS: CONTENDERS[OURS],
    f"{OURS}, heap left alone": Contender({}, block={"heap": {"enabled": False}}),
    f"{OURS}, {LIMIT_BYTES} bytes a parameter": Contender(
        {}, block={"heap": {"enabled": False}}, limit_bytes=LIMIT_BYTES
    ),
}
#: With --one-pass, all of ours with the heap left alone, as stock has it.
_HEAP = {"heap": {"enabled": False}}
ACCUMULATED, ONE_PASS = f"{OURS}, accumulation", f"{OURS}, one pass"
ONE_PASSES = {
    STOCK: CONTENDERS[STOCK],
    ACCUMULATED: Contender({}, block=_HEAP),
    ONE_PASS: Contender({}, block=_HEAP, is_one_pass=True),
}
#: With --muon. Updates are not clipped: their norm says nothing of gradients.
MUON: dict[str, Any] = {
    "optimizer": {"type": "Muon", "params": {"lr": 1e-3, "momentum": 0.95, "weight_decay": 0.01}},
    "gradient_clipping": 0.0,
}
CPU_OFFLOAD = "CPU offload"
MUONS = {
    CPU_OFFLOAD: Contender({}, device="cpu"),
    STOCK: CONTENDERS[STOCK],
    OURS: CONTENDERS[OURS],
    f"{OURS}, heap left alone": Contender({}, block=_HEAP),
    f"{OURS}, 64 MiB": Contender({}, block={"host_memory_limit": "64MiB", **_HEAP}),
}
#: With --vary: contenders by name.
VARIATIONS = {
    "heap": {
        "heap left alone": Contender({}, block={"heap": {"enabled": False}}),
        **{
            f"heap {size}": Contender({}, block={"heap": {"mapped_bytes_min": size}})
            for size in ("64KiB", "256KiB", "1MiB", "4MiB")
        },
    },
    "limit": {
        "no limit": Contender({}, block={}),
        **{
            f"limit {size}": Contender({}, block={"host_memory_limit": size})
            for size in ("256MiB", "128MiB", "64MiB", "32MiB")
        },
    },
    "tile": {
        f"tile {size}": Contender({}, block={"streaming": {"optimizer": {"tile_bytes": size}}})
        for size in ("32MiB", "16MiB", "8MiB", "4MiB", "1MiB", "256KiB")
    },
}


def training_config(
    model: Model | Sleeping,
    optimizer: Mapping[str, Any],
    directory: Path,
    micro_steps: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """The repository's own CPU configuration, with buffers as large as this model's tensors."""
    config = deepspeed_config(
        directory=directory,
        zero={
            "sub_group_size": 17_000_000,
            "reduce_bucket_size": 1 << 20,
            "stage3_prefetch_bucket_size": 1 << 20,
            "stage3_param_persistence_threshold": 7680,
            "stage3_max_live_parameters": 17_000_000,
            "stage3_max_reuse_distance": 0,
        },
        parameters={"buffer_count": 8, "buffer_size": model.largest_numel},
        optimizer=optimizer,
    )
    config |= micro_steps
    if config["optimizer"]["type"] == "Muon":  # refuses it
        config["zero_optimization"]["reduce_scatter"] = False
    return config


def trainee_of(
    name: str,
    contender: Contender,
    model: Model | Sleeping,
    directory: Path,
    *,
    tokens: int = TOKENS,
    micro_steps: Mapping[str, Any] = MappingProxyType({}),
    clipping: float | None = None,
    accelerator: str = "cpu",
    checkpoints: bool = False,
) -> Trainee:
    """Return the run of a contender, which has not started."""
    config = training_config(model, contender.optimizer, directory, micro_steps)
    if clipping is not None:
        config["gradient_clipping"] = clipping
    for offload in ("offload_param", "offload_optimizer"):
        config["zero_optimization"][offload]["device"] = contender.device
    options = ["--checkpointing", "deepspeed"] if checkpoints else []
    block = contender.block_for(model)
    if contender.is_one_pass:
        count = config.get("gradient_accumulation_steps", 1)
        config |= {"gradient_accumulation_steps": 1, "train_micro_batch_size_per_gpu": count}
        block = {**(block or {}), "micro_batches": {"count": count}}
        options += ["--sequences", str(count)]
    return Trainee(
        name,
        config,
        model,
        directory,
        block=block,
        tokens=tokens,
        options=options,
        accelerator=accelerator,
        environment={"TORCHDYNAMO_DISABLE": "1"} if "optimizer" in micro_steps else {},
    )


def losses_of(steps: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the mean loss of each step's micro-steps."""
    losses = [[float(loss) for loss in step["loss"].split(",")] for step in steps]
    return [sum(one) / len(one) for one in losses]


def loss_difference(ours: Sequence[Mapping[str, Any]], stock: Sequence[Mapping[str, Any]]) -> float:
    """Return the largest difference of the losses of steps, as a fraction."""
    pairs = zip(losses_of(ours), losses_of(stock), strict=True)
    return max(abs(our / their - 1) for our, their in pairs)


def run(
    cases: Mapping[int, int],
    directory: Path,
    contenders: Mapping[str, Contender] = CONTENDERS,
    *,
    tokens: int = TOKENS,
    micro_steps: Mapping[str, Any] = MappingProxyType({}),
    accelerator: str = "cpu",
    build: Callable[[int], Model | Sleeping] = model_of,
) -> Iterator[harness.Row]:
    """Trains every size so many rounds with all of them, in turns; ratios are to the first."""
    base = next(iter(contenders))
    circumstances = harness.machine(directory)
    for numel, rounds in cases.items():
        model = build(numel)
        steps = take_steps(
            model,
            directory,
            rounds,
            contenders,
            tokens=tokens,
            micro_steps=micro_steps,
            accelerator=accelerator,
        )
        case = f"{round(model.numel / 1e6)}M"
        losses = {
            tuple(step["loss"] for step in taken) for name, taken in steps.items() if name != DRIVE
        }
        for name, taken in steps.items():
            config: dict[str, Any] = {"rounds": rounds}
            found = figures(taken, steps[base], model)
            if name == DRIVE:
                config |= {"element_bytes": ELEMENT_BYTES}
            else:
                config |= {
                    **training_config(model, contenders[name].optimizer, directory, micro_steps),
                    "tokens": tokens,
                    "accelerator": accelerator,
                    "losses_equal": len(losses) == 1,
                }
                found["training_loss_difference"] = loss_difference(taken, steps[base])
            yield harness.Row("step", case, name, found, config, circumstances)


def take_steps(
    model: Model | Sleeping,
    directory: Path,
    rounds: int,
    contenders: Mapping[str, Contender] = CONTENDERS,
    *,
    tokens: int = TOKENS,
    micro_steps: Mapping[str, Any] = MappingProxyType({}),
    accelerator: str = "cpu",
) -> dict[str, list[dict[str, Any]]]:
    """The figures of each contender's steps but the first ones; they start in rotating order.

    The transfers alone are those of Adam: they are left out where the optimizer is another.
    """
    has_drive = "optimizer" not in micro_steps
    names = (*contenders, *([DRIVE] if has_drive else []))
    taken: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    checkpoints = any(contender.is_one_pass for contender in contenders.values())
    runs = [
        trainee_of(
            name,
            contender,
            model,
            directory,
            tokens=tokens,
            micro_steps=micro_steps,
            accelerator=accelerator,
            checkpoints=checkpoints,
        )
        for name, contender in contenders.items()
    ]
    with (
        side_by_side(runs),
        Transfers(model.numel, directory) if has_drive else nullcontext() as transfers,
    ):
        for index in range(WARMUPS + rounds):
            for one in harness.in_turn(runs, index):
                step = one.step()
                step["above_imports_bytes"] = (
                    step["peak_bytes"] - one.events["baseline"]["rss_bytes"]
                )
                if index >= WARMUPS:
                    taken[one.name].append(step)
            if transfers is not None:
                part = move(transfers, model)
                if index >= WARMUPS:
                    taken[DRIVE].append({"optimizer": part})
    return taken


def move(transfers: Transfers, model: Model | Sleeping) -> dict[str, float]:
    """The figures of the optimizer step's transfers alone."""
    sample = harness.measure(transfers.run)
    return {
        "wall_s": sample.wall_s,
        "cpu_s": sample.cpu_s,
        "read_bytes": model.numel * sum(READ.values()),
        "written_bytes": model.numel * sum(WRITTEN.values()),
    }


def figures(
    ours: Sequence[Mapping[str, Any]],
    stock: Sequence[Mapping[str, Any]],
    model: Model | Sleeping,
) -> dict[str, Any]:
    """Spreads of one contender's steps, and of their ratios to stock's, round by round."""
    found: dict[str, Any] = {}
    if "above_imports_bytes" in ours[0]:
        found["memory_peak_mb"] = max(step["above_imports_bytes"] for step in ours) / 1e6
        found["memory_faults"] = harness.spread([step["training"]["minor_faults"] for step in ours])
    for part in [part for part in ("training", "optimizer") if part in ours[0]]:
        nbytes = [moved_bytes(step[part]) for step in ours]
        found[f"{part}_bytes_per_parameter"] = harness.spread(nbytes).p50 / model.numel
        stock_bytes = harness.spread([moved_bytes(step[part]) for step in stock]).p50
        if stock_bytes:  # a file system in memory moves none
            found[f"{part}_bytes_ratio"] = harness.spread(nbytes).p50 / stock_bytes
        for figure in ("wall_s", "cpu_s"):
            values = [step[part][figure] for step in ours]
            found[f"{part}_{figure}"] = harness.spread(values)
            found[f"{part}_{figure.removesuffix('_s')}_ratio"] = harness.spread(
                [
                    our[part][figure] / their[part][figure]
                    for our, their in zip(ours, stock, strict=True)
                ]
            )
    return found


def moved_bytes(part: Mapping[str, float]) -> float:
    return part["read_bytes"] + part["written_bytes"]


def table_rows(rows: Sequence[harness.Row], part: str) -> list[harness.Row]:
    """The same rows with the figures of one part alone, so that a table fits a screen."""
    prefix = f"{part}_"
    return [
        harness.Row(
            row.bench,
            row.case,
            row.contender,
            {
                name.removeprefix(prefix): value
                for name, value in row.figures.items()
                if name.startswith(prefix)
            },
        )
        for row in rows
        if any(name.startswith(prefix) for name in row.figures)
    ]


def untied(numel: int) -> Model:
    """Return the model of about so many parameters, whose head is a matrix of its own."""
    return replace(model_of(numel), is_tied=False)


def run_and_report(options: argparse.Namespace) -> None:
    """What the command line asks for."""
    name, question, cases = "step", QUESTION, CASES
    contenders = CONTENDERS if options.accumulation == 1 else ACCUMULATING
    if options.one_pass:
        contenders = ONE_PASSES
    if options.muon:
        name, question, contenders = "muon", "Step with Muon: time and traffic", MUONS
    if options.vary is not None:
        name, question = options.vary, f"Step: time and memory by {options.vary}"
        cases = LIMITED_CASES if name == "limit" else VARIED_CASES
        contenders = VARIATIONS[name]
    build: Callable[[int], Model | Sleeping]
    sizes, build = (
        cases["small" if options.small else "large"],
        untied if options.one_pass else model_of,
    )
    if options.size is not None:
        square = Sleeping(*options.size)
        sizes, build = {square.numel: SQUARE_ROUNDS}, lambda numel: square
    micro_steps = {
        "gradient_accumulation_steps": options.accumulation,
        "data_types": {"grad_accum_dtype": options.sum_dtype},
        **(MUON if options.muon else {}),
    }
    rows = list(
        run(
            sizes,
            options.directory,
            contenders,
            tokens=options.tokens,
            micro_steps=micro_steps,
            accelerator="sim" if options.emulated else "cpu",
            build=build,
        )
    )
    for part in ("training", "optimizer", "memory"):
        harness.report(name, f"{question}: {part} step", table_rows(rows, part), None)
    harness.write(name, rows, options.out)


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = harness.parser(QUESTION)
    parser.add_argument("--vary", choices=VARIATIONS, help="a key of ours, without stock")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a micro-step")
    parser.add_argument(
        "--size",
        type=int,
        nargs=2,
        metavar=("LAYERS", "WIDTH"),
        help="of square matrices that compute nothing, instead of Llamas",
    )
    parser.add_argument("--accumulation", type=int, default=1, help="micro-steps of a step")
    parser.add_argument(
        "--one-pass", action="store_true", help="slices in the place of micro-steps, beside these"
    )
    parser.add_argument("--muon", action="store_true", help="DeepSpeed's Muon, in all runs")
    parser.add_argument("--sum-dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument(
        "--emulated", action="store_true", help="train on the emulated device of the tests"
    )
    return parser


if __name__ == "__main__":
    run_and_report(arguments().parse_args())
