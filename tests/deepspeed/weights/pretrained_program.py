"""Loads checkpoints of every kind into ZeRO-3 models on the drive, by stock and with memascend.

Usage: pretrained_program.py FOLDER WORLD. Started as rank 0, it starts the other ranks itself. Its
last line of output is JSON: what each way of loading gave for each case, as digests.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import transformers
from transformers.integrations import HfDeepSpeedConfig

import memascend  # noqa: F401  what the torch.backends entry point does in an installed copy
from memascend.deepspeed.seams import arm as seams
from memascend.deepspeed.seams import transformers as transformers_seams
from memascend.deepspeed.weights import pretrained
from tests.parity import models
from tests.support.process_group import leave

FAMILIES = ("llama", "qwen", "gpt2", "mixtral")
DTYPE = torch.bfloat16


def save_sharded(model: Any, folder: Path) -> None:
    model.to(DTYPE).save_pretrained(folder, max_shard_size="5MB")
    assert len(list(folder.glob("*.safetensors"))) > 1


def save_single(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    assert len(list(folder.glob("*.safetensors"))) == 1


def save_pickled(model: Any, folder: Path) -> None:
    model.config.save_pretrained(folder)
    torch.save(model.to(DTYPE).state_dict(), folder / "pytorch_model.bin")


def save_incomplete(model: Any, folder: Path) -> None:
    """Two tensors are missing, one is of nobody."""
    model.config.save_pretrained(folder)
    weights = {name: weight.clone() for name, weight in model.to(DTYPE).state_dict().items()}
    del weights["model.layers.1.mlp.up_proj.weight"], weights["model.norm.weight"]
    weights["model.layers.7.mlp.up_proj.weight"] = torch.ones(3, dtype=DTYPE)
    from safetensors.torch import save_file

    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


CASES: dict[str, tuple[str, Callable[[Any, Path], None]]] = {
    **{f"{family}, sharded": (family, save_sharded) for family in FAMILIES},
    "qwen, one file, in fp32": ("qwen", save_single),
    "llama, pickled": ("llama", save_pickled),
    "llama, incomplete": ("llama", save_incomplete),
}
#: Those of them that say something about several ranks.
CASES_OF_MANY_RANKS = ("qwen, sharded", "mixtral, sharded", "llama, incomplete")


def save_all(folder: Path, cases: list[str]) -> None:
    """Ordinary models with weights that depend on their names alone."""
    for case in cases:
        family, save = CASES[case]
        model = models.maker(family)()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                models.set_weights(name, weight, seed=5)
        save(model, folder / case)


def config_of(drive: Path, block: dict[str, Any]) -> dict[str, Any]:
    on_drive = {"device": "nvme", "nvme_path": str(drive)}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_param": on_drive | {"buffer_count": 6, "buffer_size": 4 << 20},
            "offload_optimizer": on_drive,
            "stage3_param_persistence_threshold": 0,
        },
        "memascend": block,
    }


def load(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Digests of what was loaded, and what was reported."""
    hf_config = HfDeepSpeedConfig(config)
    torch.manual_seed(3)  # of what is missing
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=DTYPE, output_loading_info=True
    )
    digests = {}
    for name, weight in model.state_dict(keep_vars=True).items():
        with deepspeed.zero.GatheredParameters([weight] if hasattr(weight, "ds_id") else []):
            flat = weight.detach().contiguous().view(-1).view(torch.uint8)
            digests[name] = hashlib.sha256(flat.numpy().data).hexdigest()
    swappers = {getattr(weight, "nvme_swapper", None) for weight in model.parameters()} - {None}
    classes = sorted({type(swapper).__module__.split(".")[0] for swapper in swappers})
    hooks = sum(len(module._load_state_dict_pre_hooks) for module in model.modules())
    del hf_config, model
    gc.collect()
    return {
        "digests": digests,
        "report": {key: sorted(map(str, found)) for key, found in report.items()},
        "swappers": classes,
        "hooks": hooks,
    }


def main() -> None:
    folder, world = Path(sys.argv[1]), int(sys.argv[2])
    rank = int(os.environ["RANK"])
    cases = list(CASES if world == 1 else CASES_OF_MANY_RANKS)
    others = []
    if rank == 0:
        save_all(folder, cases)
        os.environ["WORLD_SIZE"] = str(world)
        for other in range(1, world):
            environment = os.environ | {"RANK": str(other), "LOCAL_RANK": str(other)}
            others.append(subprocess.Popen([sys.executable, *sys.argv], env=environment))
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    drive = folder / "drive"
    stock = {case: load(folder / case, config_of(drive, {"enabled": False})) for case in cases}
    assert not seams.is_armed()
    # Let go after every module, not after every 64 MiB: these models are small.
    pretrained.FLUSH_BYTES = 1
    dropped = 0
    drop = pretrained.MappedFiles.drop

    def counted(files: Any) -> None:
        nonlocal dropped
        dropped += len(files.mappings)
        drop(files)

    pretrained.MappedFiles.drop = counted  # type: ignore[method-assign]
    ours: dict[str, Any] = {}
    drops: dict[str, int] = {}
    for case in cases:
        dropped = 0
        ours[case] = load(folder / case, config_of(drive, {}))
        drops[case] = dropped
    facts = {"stock": stock, "ours": ours, "drops": drops, "armed": transformers_seams.is_armed()}
    deepspeed.comm.barrier()
    leave()
    for process in others:
        assert process.wait() == 0
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
