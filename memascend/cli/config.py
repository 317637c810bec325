"""`memascend config`: a DeepSpeed JSON for this machine, with the recommended limit of host memory.

Prints the JSON alone on standard output, and its sources on standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from memascend.base.units import GIB, format_nbytes
from memascend.cli.arguments import folder, whole_number
from memascend.cli.plan_accounts import AUTO_SIZES
from memascend.config.block import SLICE_COUNT_MAX
from memascend.errors import ConfigError
from memascend.plan.context import HOST_RESERVE_BYTES
from memascend.system.gpus import list_gpus
from memascend.system.memory import memory_total
from memascend.system.mounts import IN_MEMORY, filesystem_of

#: Part of the host memory for memascend; the rest is for the script, its data and the page cache.
LIMIT_SHARE = 0.5
#: Part of a GPU's memory for checkpoints of one pass; a layer, its slice and the loss need more.
CHECKPOINTS_SHARE = 1 / 3
TRAINER, LOOP = "trainer", "loop"
#: Stands for the folder that a job makes on the drive of each node (deploy/launch_node.sh).
JOB_FOLDER = "@SWAP@"


def config_command_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "config",
        help="print a DeepSpeed JSON for this machine",
        description="Print a DeepSpeed JSON for this machine: memascend config --nvme-path "
        "/mnt/ssd > ds.json",
    )
    parser.add_argument(
        "--nvme-path",
        type=folder,
        required=True,
        help=f"an existing folder on the drive; {JOB_FOLDER}: one that a job of deploy/ makes on "
        "each node, with half of the node's memory",
    )
    parser.add_argument(
        "--for",
        dest="caller",
        choices=(TRAINER, LOOP),
        default=TRAINER,
        help="the Hugging Face Trainer, or a training loop of your own (default: trainer)",
    )
    parser.add_argument(
        "--ranks", type=whole_number, help="ranks on this machine (default: its GPUs, at least 1)"
    )
    parser.add_argument(
        "--one-pass",
        type=partial(whole_number, most=SLICE_COUNT_MAX),
        metavar="SEQUENCES",
        help="compute a large batch in slices of so many sequences: a third of the GPU's memory "
        "keeps their checkpoints, the drive the others (needs gradient checkpointing)",
    )
    parser.set_defaults(run=config_command)


def config_command(args: argparse.Namespace) -> int:
    """Print the JSON and return the exit status.

    Raises:
        ConfigError: The path is no folder that may be written, or in memory; or the machine has
            too little memory.
    """
    path: Path = args.nvme_path
    if str(path) == JOB_FOLDER:
        sections = one_pass_sections(args.one_pass, None)
        found = config_for(JOB_FOLDER, LIMIT_SHARE, caller=args.caller, sections=sections)
        print(json.dumps(found, indent=2))
        return 0
    _check_folder(path)
    if (kind := filesystem_of(path)) in IN_MEMORY:
        raise ConfigError(
            f"--nvme-path {path} is on {kind}, which is host memory. Name a folder on an SSD"
        )
    gpus = list_gpus()
    ranks = args.ranks or max(1, len(gpus))
    total_bytes = memory_total()
    limit_bytes = recommended_limit(total_bytes, ranks)
    gibibytes, rest = divmod(limit_bytes, GIB)
    limit = limit_bytes if rest else f"{gibibytes}GiB"
    device_bytes = min((gpu.memory_bytes for gpu in gpus), default=None)
    sections = one_pass_sections(args.one_pass, device_bytes)
    found = config_for(str(path.resolve()), limit, caller=args.caller, sections=sections)
    print(json.dumps(found, indent=2))
    print(
        f"host_memory_limit {format_nbytes(limit_bytes)} for each of {ranks} rank(s): "
        f"{ranks * limit_bytes / total_bytes:.0%} of {format_nbytes(total_bytes)}; less is slower, "
        "see memascend plan --config",
        file=sys.stderr,
    )
    if sections and device_bytes is None:
        print(
            "one pass: no GPU here, so that all checkpoints go to the drive. On a machine with one "
            "set memascend.activations.device_bytes to a third of its memory",
            file=sys.stderr,
        )
    return 0


def _check_folder(path: Path) -> None:
    """Write a file without a name, as a run does, where permissions and mounts may not let it."""
    if not os.path.exists(path):
        raise ConfigError(f"--nvme-path {path} does not exist. Create it: mkdir -p {path}")
    if not os.path.isdir(path):
        raise ConfigError(f"--nvme-path {path} is not a folder. Name a folder on an SSD")
    try:
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(
            f"--nvme-path {path}: no file can be made there: {error.strerror}. Name a folder on an "
            f"SSD that this user may write to, or give it this one: chown $USER {path}"
        ) from error


def recommended_limit(total_bytes: int, ranks: int) -> int:
    """Return the limit of each rank in bytes, in whole GiB where there is one.

    Half of the memory is left to the script, and at least that of Python and torch on each rank.

    Raises:
        ConfigError: Python and torch alone take all of it.
    """
    room_bytes = total_bytes - ranks * HOST_RESERVE_BYTES
    limit_bytes = min(int(total_bytes * LIMIT_SHARE), room_bytes) // ranks
    if limit_bytes <= 0:
        raise ConfigError(
            f"{format_nbytes(total_bytes)} of host memory are too little for {ranks} rank(s), "
            f"each of which takes {format_nbytes(HOST_RESERVE_BYTES)} for Python and torch"
        )
    return limit_bytes // GIB * GIB or limit_bytes


def one_pass_sections(sequences: int | None, device_bytes: int | None) -> dict[str, Any]:
    """Return the sections of one pass for a GPU of so many bytes; empty without `sequences`."""
    if sequences is None:
        return {}
    activations: dict[str, Any] = {"enabled": True}
    if device_bytes is not None:
        activations["device_bytes"] = f"{round(device_bytes * CHECKPOINTS_SHARE / GIB)}GiB"
    return {"micro_batches": {"sequences": sequences}, "activations": activations}


def config_for(
    nvme_path: str,
    limit: str | float | None,
    *,
    caller: str,
    sections: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the DeepSpeed JSON: with "auto" for the Trainer, with numbers for a loop.

    `limit` is host memory of a rank: bytes, a size, or a fraction of that of the machine; without
    one memascend chooses. `sections` are more of its block.
    """
    is_trainer = caller == TRAINER
    offload = {"device": "nvme", "nvme_path": nvme_path}
    zero: dict[str, Any] = {
        "stage": 3,
        "offload_param": dict(offload),
        "offload_optimizer": dict(offload),
        "overlap_comm": True,
        "contiguous_gradients": True,
    }
    if is_trainer:
        zero |= dict.fromkeys(AUTO_SIZES, "auto")
    zero["stage3_gather_16bit_weights_on_model_save"] = True
    adam: dict[str, Any] = {"lr": 1e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
    batch: dict[str, Any] = {
        "gradient_clipping": 1.0,
        "gradient_accumulation_steps": 1,
        "train_micro_batch_size_per_gpu": 1,
    }
    if is_trainer:
        adam = dict.fromkeys(adam, "auto")
        batch = dict.fromkeys([*batch, "train_batch_size"], "auto")
    return {
        "bf16": {"enabled": "auto" if is_trainer else True},
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": adam},
        **batch,
        "memascend": ({} if limit is None else {"host_memory_limit": limit}) | (sections or {}),
    }
