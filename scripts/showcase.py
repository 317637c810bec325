#!/usr/bin/env python3
"""Trains a model that is far larger than the memory it takes, on a machine without a GPU.

    python scripts/showcase.py                                  # 3.2 billion parameters, two steps
    python scripts/showcase.py --layers 1                       # the same widths with one layer
    python scripts/showcase.py --model config.json --steps 4    # another model

The model has the widths of Llama-3.2-3B and random weights, so nothing is downloaded. The script
compares free memory and drive space with the plan, runs scripts/finetune.py below `memascend
compare`, and prints the plan beside the measured figures.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from memascend.base.units import format_nbytes
from memascend.cli.config import LOOP, config_for
from memascend.cli.main import main as run_memascend
from memascend.cli.plan_models import find_model
from memascend.errors import ConfigError
from memascend.plan.context import HOST_RESERVE_BYTES
from memascend.plan.shapes import ModelShapes

FINETUNE = Path(__file__).with_name("finetune.py")
#: On a CPU gathered weights and gradients of the largest tensor are in host memory: its weights,
#: its gradient, and the gradient of the head that shares them.
WHOLE_TENSORS, ITEMSIZE = 3, 2
#: Elements of gathered parameters that DeepSpeed keeps; its default is 2 GB in bf16.
LIVE_NUMEL = 100_000_000


@dataclass(frozen=True, slots=True)
class Files:
    """The files of a showcase."""

    out: Path
    swap: Path  # folder of the offloaded tensors

    @property
    def model(self) -> Path:
        """The folder of the model's config.json, read by the plan and by the training."""
        return self.out / "model"

    @property
    def config(self) -> Path:
        """The DeepSpeed JSON."""
        return self.out / "ds.json"

    @property
    def ledger(self) -> Path:
        """The account that memascend writes at the end of the run."""
        return self.out / "ledger.json"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train 3.2 billion parameters in little RAM.")
    parser.add_argument(
        "--model", default="Llama-3.2-3B", help="a name known to `memascend plan`, or a config.json"
    )
    parser.add_argument("--layers", type=int, help="layers of the model (default: all)")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=16, help="tokens of a step, one sequence")
    parser.add_argument("--nvme-path", type=Path, default=Path("nvme_swap"))
    parser.add_argument("--out", type=Path, default=Path("showcase-out"), help="folder for results")
    return parser.parse_args(arguments)


def prepare(args: argparse.Namespace) -> tuple[ModelShapes, Files]:
    """Write the model's config.json and the DeepSpeed JSON; return the shapes and the files."""
    files = Files(args.out.resolve(), args.nvme_path.resolve())
    for folder in (files.model, files.swap):
        folder.mkdir(parents=True, exist_ok=True)
    found = find_model(args.model).config
    if found is None:
        raise ConfigError(f"--model {args.model} has no config.json, so it cannot be built")
    content = dict(found) | ({} if args.layers is None else {"num_hidden_layers": args.layers})
    _write(files.model / "config.json", content)
    _write(files.config, deepspeed_config(files, hidden=content["hidden_size"]))
    return find_model(str(files.model)), files


def deepspeed_config(files: Files, *, hidden: int) -> dict[str, Any]:
    """Return the JSON that `memascend config` writes for a loop, with buffers for a CPU.

    The sizes are those that the Trainer takes from the hidden size. The memascend block states no
    limit, so that the run takes the least host memory.
    """
    config = config_for(str(files.swap), "1GiB", caller=LOOP)
    config["zero_optimization"] |= {
        "reduce_bucket_size": hidden * hidden,
        "stage3_prefetch_bucket_size": hidden * hidden * 9 // 10,
        "stage3_param_persistence_threshold": 10 * hidden,
        "stage3_max_live_parameters": LIVE_NUMEL,
        "stage3_max_reuse_distance": 0,
    }
    return config | {"memascend": {"report": str(files.ledger)}}


def planned(files: Files) -> dict[str, Any]:
    """Return the answer of `memascend plan` for the model and the DeepSpeed JSON."""
    options = ["--config", str(files.config), "--path", str(files.swap), "--json"]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        run_memascend(["plan", str(files.model), *options])
    found: dict[str, Any] = json.loads(output.getvalue())
    return found


def check_machine(plan: Mapping[str, Any], shapes: ModelShapes, files: Files) -> list[str]:
    """Print free drive space and available memory beside the need; return the names of lacks."""
    largest = max(tensor.numel for tensor in shapes.tensors)
    ours, tensors = plan["memascend"]["host_bytes"], WHOLE_TENSORS * ITEMSIZE * largest
    needs = {
        "drive": (plan["memascend"]["drive_bytes"], shutil.disk_usage(files.swap).free),
        "memory": (ours + tensors + HOST_RESERVE_BYTES, psutil.virtual_memory().available),
    }
    lacks = []
    for name, (needed, have) in needs.items():
        verdict = "enough"
        if needed > have:
            verdict = f"{format_nbytes(needed - have)} too little"
            lacks.append(name)
        where = f" free in {files.swap}" if name == "drive" else " available"
        print(f"{name:7} {format_nbytes(needed)} of {format_nbytes(have)}{where}: {verdict}")
    print(
        f"        memory is for memascend ({format_nbytes(ours)}), whole tensors "
        f"({format_nbytes(tensors)}), Python and torch ({format_nbytes(HOST_RESERVE_BYTES)})"
    )
    return lacks


def train(args: argparse.Namespace, files: Files) -> int:
    """Run the training below `memascend compare`; return its exit status."""
    command = [sys.executable, str(FINETUNE), "--model", str(files.model)]
    command += ["--steps", str(args.steps), "--seq-len", str(args.tokens)]
    command += ["--gradient-checkpointing", "--deepspeed_config", str(files.config)]
    options = ["--columns", "memascend", "--out", str(files.out), "--interval-ms", "250"]
    return run_memascend(["compare", *options, "--", *command])


def account(
    plan: Mapping[str, Any], shapes: ModelShapes, files: Files
) -> list[tuple[str, str, str]]:
    """Return the rows of the account: title, planned, measured."""
    report = json.loads((files.out / "report.json").read_text(encoding="utf-8"))
    column = report["columns"]["memascend"]
    ledger = json.loads(files.ledger.read_text(encoding="utf-8"))
    ours, answer = plan["memascend"], plan["answer"]
    seconds = column["step_time_s_mean"]

    def peak(name: str) -> str:
        return _size(max(plan[name]["initialization_bytes"], plan[name]["step_bytes"]))

    return [
        (f"{shapes.numel:,} parameters", "planned", "measured"),
        ("memascend's memory", _size(ours["host_bytes"]), _size(ledger["held_bytes_peak"])),
        ("peak RSS of the process", "", _size(column["process_rss_bytes_max"])),
        ("a process that only imports", "", _size(report["baseline_bytes"] or None)),
        ("on the drive", _size(ours["drive_bytes"]), _size(column["disk_bytes_max"])),
        ("read in the whole run", "", _size(column["read_bytes"])),
        ("written in the whole run", "", _size(column["written_bytes"])),
        ("a step after the first", _seconds(answer["step_seconds"]), _seconds(seconds)),
        ("the whole run", "", _seconds(column["runs"][0]["elapsed_s"])),
        ("stock DeepSpeed's memory", peak("stock"), "not run"),
        ("stock, tuned", peak("tuned_stock"), "not run"),
    ]


def main(arguments: list[str] | None = None) -> int:
    """Check the machine, train, and print the account; return the exit status."""
    args = parse_arguments(arguments)
    try:
        shapes, files = prepare(args)
        plan = planned(files)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(
        f"{args.model}: {shapes.numel:,} parameters, random weights; "
        f"{args.steps} steps of {args.tokens} tokens"
    )
    if lacks := check_machine(plan, shapes, files):
        print(
            f"not started: too little {' and '.join(lacks)}. --nvme-path names a folder on another "
            "drive, --layers N takes a smaller model",
            file=sys.stderr,
        )
        return 1
    if status := train(args, files):
        return status
    rows = account(plan, shapes, files)
    widths = [max(len(row[index]) for row in rows) for index in range(3)]
    for title, before, after in rows:
        print(f"{title:<{widths[0]}}  {before:>{widths[1]}}  {after:>{widths[2]}}")
    return 0


def _size(nbytes: float | None) -> str:
    return "" if nbytes is None else format_nbytes(int(nbytes))


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} s"


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
