"""Trains with fewer bits in the optimizer, goes on from checkpoints, and prints what it found.

Started by test_states.py with the dtypes of moments and of master weights, and a folder for all
ranks; prints JSON.
Every engine has a name; of each there are the losses, and digests of master weights and moments as
accessors give them.
"""

from __future__ import annotations

import gc
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed import utils

import memascend  # noqa: F401  what the torch.backends entry point does in an installed copy
from memascend.checkpoint.to_universal import write_universal
from tests.integration.checkpoint_program import WIDTH, Model
from tests.integration.programs import BLOCK, training_config
from tests.support.process_group import leave

STEPS, SAVED_AT = 6, 3
MOMENTS = ("exp_avg", "exp_avg_sq")


class Trainer:
    """Makes one engine after the other in a folder, and keeps what was found of each."""

    def __init__(self, folder: Path, form: dict[str, str]) -> None:
        self.folder, self.form = folder, form
        self.found: dict[str, Any] = {}

    def run(
        self,
        name: str,
        first: int,
        last: int,
        *,
        load: str = "",
        universal: bool = False,
        save: bool = False,
        is_stock: bool = False,
        is_fp32: bool = False,
        optimizer_keys: dict[str, Any] | None = None,
    ) -> None:
        """Train from one step to another, after a load if told so; save under the own name.

        Args:
            name: Of the engine.
            first: Step that it begins with.
            last: Step before which it ends.
            load: Name of a checkpoint.
            universal: Whether that is a universal one.
            save: Whether it saves one.
            is_stock: Whether it is DeepSpeed's own CPU offload.
            is_fp32: Whether all is in fp32.
            optimizer_keys: Further keys of `streaming.optimizer`.
        """
        drive = self.folder / name
        drive.mkdir(exist_ok=True)  # of another rank
        keys = ({} if is_fp32 else self.form) | (optimizer_keys or {})
        block = BLOCK | {"streaming": {"optimizer": keys}}
        config = training_config(drive, block, 1) | {"gradient_clipping": 0.0}
        if universal:
            config["checkpoint"] = {"load_universal": True}
        if is_stock:
            del config["memascend"]
            config["zero_optimization"]["offload_param"] = {"device": "cpu"}
            config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        torch.manual_seed(2 if load else 1)
        with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16):
            model = Model()
        engine = deepspeed.initialize(model=model, config=config)[0]
        found = self.found[name] = {"losses": [], "start": {}}
        if load:
            path, _ = engine.load_checkpoint(str(self.folder / "checkpoints"), tag=load)
            assert path is not None
            found["start"] = digests(engine)
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            rows = torch.randn(4, WIDTH, generator=generator).to(torch.bfloat16)
            loss = engine(rows)
            engine.backward(loss)
            engine.step()
            found["losses"].append(loss.item())
        if save:
            engine.save_checkpoint(str(self.folder / "checkpoints"), tag=name)
        found["end"] = digests(engine)
        if not is_stock:
            found["stored"] = stored(engine)
            found["early tiles"] = engine.optimizer.steps.early_tile_count
        engine.destroy()
        del engine, model
        gc.collect()


def stored(engine: Any) -> list[tuple[str, str]]:
    """States and their dtypes, as they lie on the drive."""
    kinds = {
        (str(state), str(dtype))
        for flat in engine.optimizer.fp32_partitioned_groups_flat
        for state, dtype, _ in engine.optimizer.steps.stored(flat.ds_id)
    }
    return sorted(kinds)


def digests(engine: Any) -> dict[str, str]:
    """Of every value that an accessor gives, and of each moment rounded to bf16 and back."""
    found = {}
    for name, parameter in engine.module.named_parameters():
        values = {"master": utils.safe_get_full_fp32_param(parameter)}
        for state in MOMENTS:
            values[state] = utils.safe_get_full_optimizer_state(parameter, state)
            values[f"{state} rounded"] = values[state].bfloat16().float()
        for what, value in values.items():
            raw = value.contiguous().numpy().tobytes()
            found[f"{name} {what}"] = f"{value.dtype} {hashlib.sha256(raw).hexdigest()}"
    return found


def main() -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    state_dtype, master_dtype, folder = sys.argv[1:]
    trainer = Trainer(Path(folder), {"state_dtype": state_dtype, "master_dtype": master_dtype})
    checkpoints = trainer.folder / "checkpoints"
    trainer.run("fp32", 0, SAVED_AT, save=True, is_fp32=True)
    trainer.run("whole", 0, STEPS)
    small_tiles = {"tile_bytes": 64 << 10, "during_backward": True}
    trainer.run("small tiles", 0, STEPS, optimizer_keys=small_tiles)
    trainer.run("half", 0, SAVED_AT, save=True)
    trainer.run("resumed", SAVED_AT, STEPS, load="half")
    trainer.run("widened", SAVED_AT, STEPS, load="half", is_fp32=True)
    trainer.run("rounded", SAVED_AT, STEPS, load="fp32")
    trainer.run("stock", SAVED_AT, STEPS, load="half", is_stock=True)
    if dist.get_rank() == 0:
        write_universal(checkpoints / "half", checkpoints / "universal")
    dist.barrier()
    files = (checkpoints / "universal" / "zero").glob("*/exp_avg*.pt")
    dtypes = {str(torch.load(path, weights_only=False).dtype) for path in files}
    trainer.found["universal dtypes"] = sorted(dtypes)
    trainer.run("universal run", SAVED_AT, STEPS, load="universal", universal=True)
    print(json.dumps(trainer.found))
    leave()


if __name__ == "__main__":
    main()
