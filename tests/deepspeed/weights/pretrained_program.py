"""Loads checkpoints of every kind into ZeRO-3 models on the drive, by stock and with memascend.

Usage: pretrained_program.py FOLDER WORLD. Started as rank 0, it starts the other ranks itself. Its
last line of output is JSON: what each way of loading gave for each case, as digests.
"""

from __future__ import annotations

import array
import gc
import hashlib
import inspect
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
import transformers
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations import deepspeed as integration

import memascend  # noqa: F401  what the torch.backends entry point does in an installed copy
from memascend.deepspeed.seams import arm as seams
from memascend.deepspeed.seams import transformers as transformers_seams
from memascend.deepspeed.weights import pretrained
from tests.parity import models
from tests.support.process_group import leave

FAMILIES = ("llama", "qwen", "gpt2", "mixtral")
DTYPE = torch.bfloat16
#: The argument of `from_pretrained` was renamed in transformers 4.56.
DTYPE_ARGUMENT = "dtype" if transformers.__version__ >= "4.56" else "torch_dtype"
CONVERT = "_apply_weight_conversions_to_state_dict"


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
        folder, output_loading_info=True, **{DTYPE_ARGUMENT: DTYPE}
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


class Watch:
    """What is in memory while weights are loaded our way, at most.

    Attributes:
        dropped: How many mappings were dropped.
        resident_bytes: Pages of the checkpoint's files in memory, as they are dropped.
        made_bytes: Tensors of a state dict that are in no file, as a module's are copied.
    """

    def __init__(self) -> None:
        self.dropped = self.resident_bytes = self.made_bytes = 0

    @contextmanager
    def watching(self, folder: Path) -> Iterator[None]:
        """Watch the loader, which begins with no page of the folder's checkpoint in memory.

        It drops pages after every module, not after every 64 MiB.
        """
        replaced: Any = pretrained
        drop, before_copy = pretrained.MappedFiles.drop, pretrained._Behind._before_copy

        def dropping(files: pretrained.MappedFiles) -> None:
            self.dropped += len(files.mappings)
            self.resident_bytes = max(self.resident_bytes, sum(map(resident, files.mappings)))
            drop(files)

        def copying(behind: Any, module: Any, state_dict: Mapping[str, Any], *rest: Any) -> None:
            mappings = behind._files.mappings
            made = sum(t.nbytes for t in state_dict.values() if not is_mapped(t, mappings))
            self.made_bytes = max(self.made_bytes, made)
            before_copy(behind, module, state_dict, *rest)

        for path in checkpoint_files(folder):
            with path.open("rb") as file:
                os.fsync(file.fileno())  # pages that are not written yet stay
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        flush_bytes, replaced.FLUSH_BYTES = pretrained.FLUSH_BYTES, 1
        replaced.MappedFiles.drop, replaced._Behind._before_copy = dropping, copying
        yield
        replaced.FLUSH_BYTES = flush_bytes
        replaced.MappedFiles.drop, replaced._Behind._before_copy = drop, before_copy


def is_mapped(tensor: torch.Tensor, mappings: list[Any]) -> bool:
    return any(mapping.begin <= tensor.data_ptr() < mapping.end for mapping in mappings)


def resident(mapping: Any) -> int:
    """Return the bytes of a mapping that are in memory."""
    with open("/proc/self/pagemap", "rb", buffering=0) as pages:
        pages.seek(mapping.begin // mmap.PAGESIZE * 8)
        words = array.array("Q", pages.read((mapping.end - mapping.begin) // mmap.PAGESIZE * 8))
    return sum(word >> 63 for word in words) * mmap.PAGESIZE


@contextmanager
def merging_at_once() -> Iterator[None]:
    """Merge as transformers before 5.23 does: every tensor before the first is loaded."""
    convert = getattr(integration, CONVERT, None)

    def at_once(*arguments: Any) -> list[dict[str, Any]]:
        return [{name: one for part in convert(*arguments) for name, one in part.items()}]

    if inspect.isgeneratorfunction(convert):
        setattr(integration, CONVERT, at_once)
    yield
    if convert is not None:
        setattr(integration, CONVERT, convert)


def checkpoint_files(folder: Path) -> list[Path]:
    return [*folder.glob("*.safetensors"), *folder.glob("*.bin")]


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
    ours: dict[str, Any] = {}
    memory: dict[str, Any] = {}
    for case in cases:
        watch = Watch()
        with watch.watching(folder / case):
            ours[case] = load(folder / case, config_of(drive, {}))
        memory[case] = vars(watch)
    # The same kind of checkpoint, merged as by other releases.
    case, again = "mixtral, sharded", "mixtral, merged at once"
    watch = Watch()
    with watch.watching(folder / case), merging_at_once():
        ours[again] = load(folder / case, config_of(drive, {}))
    stock[again], memory[again] = stock[case], vars(watch)
    file_bytes = {
        case: sum(path.stat().st_size for path in checkpoint_files(folder / case)) for case in cases
    }
    facts = {
        "stock": stock,
        "ours": ours,
        "memory": memory,
        "armed": transformers_seams.is_armed(),
        "transformers": transformers.__version__,
        "file_bytes": file_bytes | {again: file_bytes[case]},
    }
    deepspeed.comm.barrier()
    leave()
    for process in others:
        assert process.wait() == 0
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
