"""Trains a Llama on more and more tokens; prints how much device memory each step held at most.

Started by test_context.py with a file of JSON: the shape of the model, tokens of a sequence, and
runs, each a DeepSpeed configuration and numbers of sequences. Prints a line of JSON: for each run
and each number the peak of the second step, in bytes.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.device.emulator import torch_device

core = torch_device.install()

import deepspeed  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

from tests.device.emulator import accelerator  # noqa: E402

accelerator.install()

STEPS = 2  # in the first one DeepSpeed records the order of use


def peak_bytes(config: dict[str, Any], shape: dict[str, Any], tokens: int, sequences: int) -> int:
    """What a step holds at most."""
    with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**shape, use_cache=False)
        )
    model.activation_checkpointing_enable()
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[
        0
    ]
    ids = torch.randint(shape["vocab_size"], (sequences, tokens)).to(engine.device)
    for _ in range(STEPS):
        core.synchronize()
        torch.empty(1, device=engine.device)  # what has passed is only found now
        core.reset_peak()
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        core.synchronize()
        found: int = core.memory()["peak"]
        engine.step()
    engine.destroy()
    return found


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text())
    core.set_launches_block(True)
    deepspeed.init_distributed(auto_mpi_discovery=False)
    _ = transformers.LlamaForCausalLM  # imported when first named, and not while zero.Init patches
    found = [
        [peak_bytes(config, asked["shape"], asked["tokens"], count) for count in sequences]
        for config, sequences in asked["runs"]
    ]
    print(json.dumps(found), flush=True)
    os._exit(0)  # the threads of streams never end


if __name__ == "__main__":
    main()
