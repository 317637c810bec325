"""A training run that does one step at a time, on command: the child of the benches that train.

Started by `trainee.py`, which says how. Reads one command per line ("step", "quit") and answers
with one JSON object on a line that begins with MARK; the lines between them are other people's
logs. It knows nothing of what is compared: the DeepSpeed JSON says what runs.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import deepspeed
import torch
import transformers
from deepspeed.accelerator import get_accelerator
from device_bytes import DeviceBytes
from transformers.integrations import HfDeepSpeedConfig

from memascend.system.memory import process_status

MARK = "@@"
SEED = 42


class HighWater:
    """The most memory this process held since the last reading, as the kernel counts it."""

    def __init__(self) -> None:
        self._reset()

    def take_bytes(self) -> int:
        """Gives the peak and starts a new one; explicit huge pages are in no process's RSS."""
        status = process_status(os.getpid())
        self._reset()
        return status["VmHWM"] + status.get("HugetlbPages", 0)

    @staticmethod
    def _reset() -> None:
        Path("/proc/self/clear_refs").write_text("5")


def answer(event: str, **figures: Any) -> None:
    """Tells the parent."""
    print(MARK, json.dumps({"event": event, **figures}), flush=True)


def join_group() -> None:
    """Joins a group of one; the parent has chosen the port."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    deepspeed.init_distributed(auto_mpi_discovery=False)
    get_accelerator().set_device(0)


def build_model(shape: dict[str, Any]) -> Any:
    """A Llama of random weights; with ZeRO-3 configured, transformers partitions it as it grows."""
    config = transformers.LlamaConfig(**shape, use_cache=False)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def read_io() -> dict[str, int]:
    """Bytes this process moved to and from storage, and those memascend's store says it moved."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    counts = {key: int(value) for key, _, value in (line.partition(": ") for line in lines)}
    return {"read": counts["read_bytes"], "written": counts["write_bytes"]}


def cpu_s() -> float:
    """Seconds of all threads, in user and kernel mode."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def components(engine: Any) -> dict[str, int] | None:
    """Peak bytes of memascend's host memory by component; None in a stock run."""
    attachment = getattr(engine, "memascend", None)
    if attachment is None:
        return None
    ledger = attachment.ledger()
    found = {row.component: row.peak_bytes for row in ledger.rows if row.peak_bytes}
    return dict(sorted(found.items())) | {"all, held": ledger.held_bytes_peak}


def step(engine: Any, ids: torch.Tensor, high_water: HighWater, device: DeviceBytes | None) -> None:
    """One training step: figures of the whole, and of the optimizer step in it."""
    started = (time.perf_counter(), cpu_s(), read_io())
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    stepping = (time.perf_counter(), cpu_s(), read_io())
    engine.step()
    ended = (time.perf_counter(), cpu_s(), read_io())

    def between(begin: tuple[float, float, dict[str, int]]) -> dict[str, float]:
        return {
            "wall_s": ended[0] - begin[0],
            "cpu_s": ended[1] - begin[1],
            "read_bytes": ended[2]["read"] - begin[2]["read"],
            "written_bytes": ended[2]["written"] - begin[2]["written"],
        }

    answer(
        "step",
        loss=repr(loss.item()),
        training=between(started),
        optimizer=between(stepping),
        peak_bytes=high_water.take_bytes(),
        device_bytes=None if device is None else device.take_peaks(),
        components=components(engine),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=json.loads, required=True, help="DeepSpeed's JSON")
    parser.add_argument("--shape", type=json.loads, required=True, help="of LlamaConfig")
    parser.add_argument("--tokens", type=int, required=True, help="of the one sequence per step")
    parser.add_argument("--device-bytes", action="store_true", help="account for device memory")
    options = parser.parse_args()
    # DeepSpeed calls collectives under names that recent torch announces to rename.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    join_group()
    transformers.set_seed(SEED)
    _ = transformers.LlamaForCausalLM  # imported when first named
    baseline_bytes = process_status(os.getpid())["VmRSS"]
    high_water = HighWater()
    answer("baseline", rss_bytes=baseline_bytes)
    # transformers looks this object up while it builds the model, so it has to stay alive.
    hf_config = HfDeepSpeedConfig(options.config)
    model = build_model(options.shape)
    answer("built", peak_bytes=high_water.take_bytes())
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=options.config
    )
    del hf_config
    numel = sum(parameter.ds_numel for parameter in model.parameters())
    answer("initialized", peak_bytes=high_water.take_bytes(), parameters=numel)
    device = DeviceBytes(engine) if options.device_bytes else None
    ids = torch.randint(options.shape["vocab_size"], (1, options.tokens))
    for line in sys.stdin:
        if line.strip() == "quit":
            break
        step(engine, ids, high_water, device)
    engine.destroy()
    deepspeed.comm.destroy_process_group()
    # gloo's threads take the GIL to free the tensors of the last collective; a Python that is
    # finalizing by then kills them, and torch aborts.
    time.sleep(0.5)


if __name__ == "__main__":
    main()
