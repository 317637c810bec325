"""A whole program within a host memory limit: what it prints, what it writes, what it takes."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from memascend.base.units import MIB

from .programs import REPOSITORY, alone, losses, run

pytestmark = pytest.mark.deepspeed

PROGRAM = REPOSITORY / "tests" / "integration" / "limit_program.py"
LIMIT_BYTES = 24 * MIB
# Of the model under the cap: 48 Mi weights take 96 MiB in 16 bit and eight times as much in all.
LAYERS = 48
# Layers have one square matrix of a Mi weights.
LAYERS_OF_MUON = (4, 16, 64)
MUON_LIMIT_BYTES = 64 * MIB
ADAMW, MUON = ({"type": name, "params": {"lr": 1e-3}} for name in ("AdamW", "Muon"))
# On the CPU accelerator the device's share comes from the process too: gathered layers, activations
# and the buckets of gradients.
DEVICE_BYTES = 64 * MIB
# glibc keeps freed tensors in its heap, more with every layer built. memascend has them given back,
# so that what is capped is what is in use; stock gets the same.
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536"}


class Program:
    """Starts the program on a drive of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.drive = folder, folder / "drive"
        self.report = folder / "ledger.json"
        self.drive.mkdir()

    def __call__(
        self, *options: str, block: dict[str, Any] | None = None, **keys: Any
    ) -> tuple[int, str]:
        """Run it with keys of the JSON; return the status and what it printed."""
        on_drive = {"device": "nvme", "nvme_path": str(self.drive)}
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": True},
            "optimizer": ADAMW,
            "zero_optimization": {
                "stage": 3,
                "offload_param": on_drive | {"buffer_count": 6, "buffer_size": 2 * MIB},
                "offload_optimizer": on_drive | {"buffer_count": 5},
                "sub_group_size": 4_000_000,
                "reduce_bucket_size": 2_000_000,
                "reduce_scatter": keys.get("optimizer") != MUON,  # refuses it
                "stage3_prefetch_bucket_size": 0,
                "stage3_max_live_parameters": 4_000_000,
                "stage3_max_reuse_distance": 0,
            },
            "steps_per_print": 1_000_000,
            **keys,
        }
        if block is not None:
            config["memascend"] = block
        path = self.folder / "config.json"
        path.write_text(json.dumps(config))
        environment = {
            **alone(),
            "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1",
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ["PYTHONPATH"]]),
            **(GIVES_BACK if block is None else {}),
        }  # fmt: skip
        done = run([str(PROGRAM), str(path), *options], cwd=self.folder, environment=environment)
        return done.returncode, done.stdout


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(tmp_path)


@pytest.mark.parametrize(
    "ending",
    [pytest.param((), marks=pytest.mark.full), ("--keep",)],
    ids=["destroyed", "left to the interpreter"],
)
def test_the_tables_and_the_report_say_what_was_planned_and_measured(
    program: Program, ending: tuple[str, ...]
) -> None:
    block = {"host_memory_limit": LIMIT_BYTES, "report": str(program.report)}
    status, output = program(*ending, block=block)
    assert status == 0, output[-6000:]
    for title in (r"host memory of this rank:\n", r"host memory of this rank, measured:\n"):
        assert len(re.findall(title, output)) == 1, output[-6000:]
    start = output.index("host memory of this rank:")
    end = output.index("host memory of this rank, measured:")
    assert start < output.index("step 0 loss") < end
    assert "memascend (limit 24.00 MiB)" in output[start:end]
    assert "on the drive" in output[start:end]
    ledger = json.loads(program.report.read_text())
    assert ledger["limit_bytes"] == LIMIT_BYTES
    for row in ledger["rows"]:
        assert row["component"] in output[start:end]
        assert row["component"] in output[end:]
        if ending:  # after destroy() most of it has been given back
            assert row["live_bytes"] == pytest.approx(row["planned_bytes"], rel=0.02)
    assert ledger["held_bytes_peak"] == pytest.approx(
        ledger["planned_bytes"], rel=0.02, abs=2 * MIB
    )
    assert 0 < ledger["held_bytes_peak"] <= LIMIT_BYTES
    assert ledger["drive"]["bytes_written"] > 0
    assert list(program.drive.iterdir()) == []


@pytest.mark.full
def test_a_limit_too_small_stops_the_program_with_one_message_and_nothing_on_the_drive(
    program: Program,
) -> None:
    block = {"host_memory_limit": "5MiB", "report": str(program.report)}
    status, output = program(block=block)
    assert status != 0
    (message,) = re.findall(r"LimitTooSmallError: (.*)", output)
    assert "the host memory limit of 5242880 bytes (5.00 MiB) is too small" in message
    minimum_bytes = int(re.findall(r"set the limit to (\d+) bytes or more", output)[0])
    assert list(program.drive.iterdir()) == []
    assert not program.report.exists()
    # The number is true to the byte.
    status, output = program("--steps", "1", block=block | {"host_memory_limit": minimum_bytes})
    assert status == 0, output[-6000:]
    status, output = program("--steps", "1", block=block | {"host_memory_limit": minimum_bytes - 1})
    assert status != 0
    assert "LimitTooSmallError" in output


@pytest.mark.full
@pytest.mark.parametrize("clipping", [0, pytest.param(1.0, marks=pytest.mark.matrix)])
def test_host_memory_of_muon_does_not_grow_with_the_layers(
    program: Program, clipping: float
) -> None:
    """Nor does the process, which has the gathered layers of the CPU accelerator besides.

    Without clipping there are second values; with it updates are written.
    """
    held, process = [], []
    for layers in LAYERS_OF_MUON:
        block = {"host_memory_limit": MUON_LIMIT_BYTES, "report": str(program.report)}
        options = ("--steps", "3", "--layers", str(layers))
        status, output = program(*options, block=block, optimizer=MUON, gradient_clipping=clipping)
        assert status == 0, output[-6000:]
        ledger = json.loads(program.report.read_text())
        assert ledger["limit_bytes"] == MUON_LIMIT_BYTES
        held.append(ledger["held_bytes_peak"])
        assert held[-1] == pytest.approx(ledger["planned_bytes"], rel=0.02)
        process.append(int(re.findall(r"data after (\d+)", output)[0]))
    assert max(held) <= MUON_LIMIT_BYTES
    assert min(held) == pytest.approx(max(held), rel=0.02)
    # In 16 bits alone the layers between would be ten times as large.
    assert max(process) - min(process) < (LAYERS_OF_MUON[-1] - LAYERS_OF_MUON[0]) * 2 * MIB / 10


@pytest.mark.full
def test_under_a_hard_cap_training_completes_where_stock_dies(program: Program) -> None:
    """The kernel refuses memory beyond what imports take, the limit, and the device's share."""
    cap = ("--cap-bytes", str(LIMIT_BYTES + DEVICE_BYTES), "--layers", str(LAYERS))
    block = {"host_memory_limit": LIMIT_BYTES, "report": str(program.report)}
    status, output = program(*cap, block=block)
    assert status == 0, output[-6000:]
    trained = losses(output.partition("capped")[2])
    assert len(trained) == 2

    # With what the heap keeps of freed tensors the cap does not even hold the model being built.
    status, output = program(*cap, block=block | {"heap": {"enabled": False}})
    assert status != 0, "the heap was to need more than the cap"
    assert losses(output.partition("capped")[2]) == []

    status, output = program(*cap)
    assert "capped" in output
    assert status != 0, "stock was to need more than the cap"
    assert len(losses(output.partition("capped")[2])) < 2

    status, output = program("--cpu", "--layers", str(LAYERS))
    assert status == 0, output[-6000:]
    assert losses(output) == trained
