"""Starts training programs as a user would: a launcher, a script, a DeepSpeed JSON.

Nothing here imports memascend into the started program: what activates it is the `torch.backends`
entry point of the installed distribution, or nothing.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.ports import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
FINETUNE = REPOSITORY / "scripts" / "finetune.py"
ARMED_LINE = re.compile(r"\bmemascend \S+ armed: ")
#: A block that asks nothing special of the machine.
BLOCK: dict[str, Any] = {"allocator": {"page_lock": False}, "direct_nvme": {"engine": "threads"}}
#: And the inputs of small layers go to the drive.
SAVING = {"activations": {"enabled": True, "min_bytes": 1024}}
TIMEOUT_S = 400.0  # the first run on a machine compiles DeepSpeed's ops


def has_entry_point() -> bool:
    """Whether `import torch` in this environment calls memascend.autoload.install by itself."""
    installed = importlib.metadata.entry_points(group="torch.backends")
    return any(point.value == "memascend.autoload:install" for point in installed)


needs_entry_point = pytest.mark.skipif(
    not has_entry_point(),
    reason='the installed distribution "memascend" has no torch.backends entry point here',
)


def deepspeed_config(folder: Path, *, device: str, block: dict[str, Any] | None) -> dict[str, Any]:
    """The CPU example configuration at the scale of the tiny models."""
    config: dict[str, Any] = json.loads(
        (REPOSITORY / "configs" / "nvme_cpu.json").read_text(encoding="utf-8")
    )
    zero = config["zero_optimization"]
    zero["stage3_prefetch_bucket_size"] = 0
    for section in ("offload_param", "offload_optimizer"):
        zero[section]["device"] = device
        zero[section].pop("nvme_path")
        if device == "nvme":
            zero[section]["nvme_path"] = str(folder)
    if block is not None:
        config["memascend"] = block
    return config


def trainer_config(folder: Path, *, device: str, block: dict[str, Any] | None) -> dict[str, Any]:
    """The same with what Trainer fills in from its own arguments."""
    config = deepspeed_config(folder, device=device, block=block)
    config["bf16"] = {"enabled": "auto"}
    config["train_micro_batch_size_per_gpu"] = "auto"
    config["gradient_accumulation_steps"] = "auto"
    config["gradient_clipping"] = "auto"
    config["optimizer"] = {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    }
    zero = config["zero_optimization"]
    for key in ("reduce_bucket_size", "stage3_prefetch_bucket_size"):
        zero[key] = "auto"
    zero["stage3_param_persistence_threshold"] = "auto"
    return config


def training_config(drive: Path, block: dict[str, Any] | None, world: int) -> dict[str, Any]:
    """Two sub-groups of the model in checkpoint_program.py, all of it on the drive."""
    on_drive = {"device": "nvme", "nvme_path": str(drive)}
    more = {} if block is None else {"memascend": block}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {**on_drive, "buffer_count": 8, "buffer_size": 2_000_000},
            "offload_optimizer": {**on_drive, "buffer_count": 5},
            "sub_group_size": 1_000_000 // world,  # of a rank's shards: two sub-groups
            "stage3_prefetch_bucket_size": 0,
            "stage3_param_persistence_threshold": 100,
        },
        "aio": {"block_size": 1 << 20},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "steps_per_print": 1_000_000,
        **more,
    }


def retried_config(folder: Path, block: dict[str, Any]) -> Path:
    """Write a configuration of retry_program.py: there are gathers in backward."""
    (folder / "drive").mkdir()
    config = training_config(folder / "drive", block, 1)
    config["zero_optimization"] |= {
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 300_000,
        "reduce_bucket_size": 300_000,
    }
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def program_environment() -> dict[str, str]:
    """Return this interpreter's environment without what a launcher or a user has set in it."""
    defaults = {
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(REPOSITORY / ".venv" / "torch_extensions"),
    }
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("MEMASCEND_")}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        inherited.pop(name, None)
    programs = [str(Path(sys.executable).parent), inherited.get("PATH", "")]
    fixed = {"PATH": os.pathsep.join(programs), "MKL_CBWR": "AVX2,STRICT"}
    return defaults | inherited | fixed


def run(
    command: list[str], *, cwd: Path, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs `python COMMAND...` in this interpreter's environment; stdout and stderr together."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=program_environment() | (environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def alone() -> dict[str, str]:
    """The environment of a job's only rank, which then needs no launcher."""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    return ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def importing_tests() -> dict[str, str]:
    """The environment of a program that imports from this folder."""
    search_path = filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": os.pathsep.join(search_path)}


def losses(output: str) -> list[str]:
    """The printed losses, digit by digit."""
    return re.findall(r"^step \d+ loss (\S+)", output, re.MULTILINE)


def armed_lines(output: str) -> list[str]:
    return [line for line in output.splitlines() if ARMED_LINE.search(line)]
