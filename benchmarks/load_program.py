"""One rank that loads a checkpoint of Hugging Face's: the child of the bench that watches it.

Started by `bench_loading.py`, which says how. It answers with JSON on lines that begin with MARK;
the lines between them are other people's logs. It knows nothing of what is compared: the DeepSpeed
JSON says how parameters are kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
import warnings
from typing import Any

import deepspeed
import kernel_counts
import torch
import transformers
from deepspeed.accelerator import get_accelerator
from transformers.integrations import HfDeepSpeedConfig

import memascend  # noqa: F401  what the torch.backends entry point does in an installed copy

MARK = "@@"


def answer(event: str, **figures: Any) -> None:
    """Tells the parent."""
    print(MARK, json.dumps({"event": event, **figures}), flush=True)


def read_bytes() -> int:
    """Read from drives by this process so far; what the page cache held costs nothing."""
    return kernel_counts.storage_bytes()[0]


def digest(model: torch.nn.Module) -> str:
    """Of every parameter and buffer, gathered one after the other."""
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            found.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
            found.update(parameter.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    for name, buffer in model.named_buffers():
        found.update(name.encode() + buffer.contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=json.loads, required=True, help="DeepSpeed's JSON")
    parser.add_argument("--checkpoint", required=True, help="folder of save_pretrained")
    options = parser.parse_args()
    # DeepSpeed calls collectives under names that recent torch announces to rename.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    get_accelerator().set_device(0)
    # transformers looks this object up while it loads the model, so it has to stay alive.
    hf_config = HfDeepSpeedConfig(options.config)
    _ = transformers.LlamaForCausalLM  # imported when first named
    deepspeed.comm.barrier()
    answer("baseline")
    began_s, read_before_bytes = time.perf_counter(), read_bytes()
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        options.checkpoint, dtype=torch.bfloat16, output_loading_info=True
    )
    loaded_s = time.perf_counter() - began_s
    keys = {name: sorted(map(str, found)) for name, found in report.items() if found}
    answer("loaded", seconds=loaded_s, read=read_bytes() - read_before_bytes, report=keys)
    answer("digest", sha256=digest(model))
    deepspeed.comm.barrier()
    del hf_config, model
    deepspeed.comm.destroy_process_group()
    # gloo's threads take the GIL to free the tensors of the last collective; a Python that is
    # finalizing by then kills them, and torch aborts.
    time.sleep(0.5)


if __name__ == "__main__":
    main()
