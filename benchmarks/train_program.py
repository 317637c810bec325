"""A training run that does one step at a time, on command: the child of the benches that train.

Started by `trainee.py`, which says how. Reads one command per line (`obey`, "quit") and answers
with one JSON object on a line that begins with MARK; the lines between them are other people's
logs. It knows nothing of what is compared: the DeepSpeed JSON says what runs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import deepspeed
import kernel_counts
import torch
import transformers
from deepspeed.accelerator import get_accelerator
from device_bytes import DeviceBytes
from device_trace import OPTIMIZER, STEP
from on_device import OnDevice, contexts_of_ranks, crowded, race, traced
from transformers.integrations import HfDeepSpeedConfig

from memascend.deepspeed.optimizer import guess
from memascend.system.memory import process_status

MARK = "@@"
SEED = 42
CHECKPOINTING = ("device", "host", "deepspeed")
#: The model type of a SleepingModel; any other is one of transformers'.
SLEEPING = "sleeping"
SLEEPING_SIZES = ("layers", "width", "rows", "hidden", "forward_s", "backward_s")


def answer(event: str, **figures: Any) -> None:
    """Tells the parent."""
    print(MARK, json.dumps({"event": event, **figures}), flush=True)


def join_group() -> None:
    """Joins the group that the parent describes: one rank unless it says otherwise."""
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        os.environ.setdefault(name, value)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    deepspeed.init_distributed(auto_mpi_discovery=False)
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))


def build_model(shape: dict[str, Any], dtype: torch.dtype, deepspeed_config: Any) -> Any:
    """A model of random weights; with ZeRO-3 configured, transformers partitions it as it grows."""
    if shape.get("model_type") == SLEEPING:
        # Of transformers newer than the oldest that trains here.
        from sleeping_model import SleepingModel

        sizes = {name: size for name, size in shape.items() if name in SLEEPING_SIZES}
        with deepspeed.zero.Init(config_dict_or_path=deepspeed_config):
            return SleepingModel(**sizes)
    config = transformers.AutoConfig.for_model(**{"model_type": "llama", **shape}, use_cache=False)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def save_checkpoints(model: Any, place: str, deepspeed_config: Any) -> None:
    """Has every layer keep its input alone: where it is, in host memory, or as DeepSpeed does."""
    if place == "deepspeed":
        deepspeed.checkpointing.configure(None, deepspeed_config=deepspeed_config)
        model._set_gradient_checkpointing(True, deepspeed.checkpointing.checkpoint)
        return
    # The switch is newer than the oldest transformers that trains here.
    offload = {"offload": True} if place == "host" else {}
    model.gradient_checkpointing_enable(**offload)


class Moment:
    """What this process has used until now: time, CPU of all threads, pages, bytes of storage."""

    def __init__(self) -> None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        self.wall_s = time.perf_counter()
        self._cpu_s = usage.ru_utime + usage.ru_stime
        self._minor_faults = usage.ru_minflt
        self._read_bytes, self._written_bytes = kernel_counts.storage_bytes()

    def since(self, begin: Moment) -> dict[str, float]:
        """What was used since an earlier moment."""
        return {
            "wall_s": self.wall_s - begin.wall_s,
            "cpu_s": self._cpu_s - begin._cpu_s,
            "minor_faults": self._minor_faults - begin._minor_faults,
            "read_bytes": self._read_bytes - begin._read_bytes,
            "written_bytes": self._written_bytes - begin._written_bytes,
        }


def components(engine: Any) -> dict[str, int] | None:
    """Peak bytes of memascend's host memory by component; None in a stock run."""
    attachment = getattr(engine, "memascend", None)
    if attachment is None:
        return None
    ledger = attachment.ledger()
    found = {row.component: row.peak_bytes for row in ledger.rows if row.peak_bytes}
    return dict(sorted(found.items())) | {"all, held": ledger.held_bytes_peak}


def saved_bytes_peak(engine: Any) -> int | None:
    """Most bytes that memascend had on the device of what forward saved; None where it stays."""
    attachment = getattr(engine, "memascend", None)
    traffic = None if attachment is None else attachment.ledger().activations
    return None if traffic is None else int(traffic.device_bytes_peak)


class Training:
    """An engine and its batches: one for each micro-step, the same ones in every step."""

    def __init__(self, engine: Any, options: argparse.Namespace, device: OnDevice) -> None:
        self.engine = engine
        self._kept = options.loss_tokens
        self._counted = DeviceBytes(engine) if options.device_bytes else None
        self._device = device
        count = engine.gradient_accumulation_steps()
        shape = (count, options.sequences, options.tokens)
        generator = torch.Generator().manual_seed(SEED + deepspeed.comm.get_rank())
        ids = torch.randint(options.shape["vocab_size"], shape, generator=generator)
        self._batches = ids.to(engine.device)

    def step(self, count: int = 1, **more: Any) -> None:
        """Steps of the optimizer in a row: figures of the whole, and of its phases, for one step.

        What the last one leaves to be done is waited for, as a part of its optimizer's: it would
        take its time beside somebody else's step. Forward and backward are those of all
        micro-steps, as the device takes them, and the optimizer has the rest of the time. Its other
        figures are those since the last backward pass.
        """
        started = Moment()
        losses: list[torch.Tensor] = []
        phases = dict.fromkeys(("forward", "backward"), 0.0)
        optimizer: dict[str, float] = {}
        for left in reversed(range(count)):
            with torch.profiler.record_function(STEP):
                begin, stepping = Moment(), self._one_step(losses, passes := [])
                if left == 0:
                    with torch.profiler.record_function(OPTIMIZER):
                        getattr(self.engine.optimizer, "finish_walk", lambda: None)()
                get_accelerator().synchronize()
            end = Moment()
            taken = {phase: self._seconds(passes, index) for index, phase in enumerate(phases)}
            rest_s = end.since(begin)["wall_s"] - sum(taken.values())
            for figure, value in (end.since(stepping) | {"wall_s": rest_s}).items():
                optimizer[figure] = optimizer.get(figure, 0.0) + value / count
            for phase, seconds in taken.items():
                phases[phase] += seconds
        training = Moment().since(started)
        answer(
            "step",
            loss=",".join(repr(loss.item()) for loss in losses),
            training={figure: value / count for figure, value in training.items()},
            optimizer=optimizer,
            **{phase: {"wall_s": seconds / count} for phase, seconds in phases.items()},
            peak_bytes=self._device.take_host_peak(),
            device_bytes=None if self._counted is None else self._counted.take_peaks(),
            on_device=self._device.take_peaks(),
            components=components(self.engine),
            saved_bytes_peak=saved_bytes_peak(self.engine),
            **more,
        )

    def _one_step(self, losses: list[torch.Tensor], passes: list[list[Any]]) -> Moment:
        """One step; when its optimizer began. Marks the ends of forward and backward passes."""
        for ids in self._batches:
            marks = [self._device.mark()]
            loss = self._loss(ids)
            marks.append(self._device.mark())
            self.engine.backward(loss)
            marks.append(self._device.mark())
            passes.append(marks)
            stepping = Moment()
            with torch.profiler.record_function(OPTIMIZER):
                self.engine.step()
            losses.append(loss.detach())
        return stepping

    def _seconds(self, passes: list[list[Any]], index: int) -> float:
        """What lies behind a mark of each pass, until the next."""
        return sum(self._device.seconds(marks[index], marks[index + 1]) for marks in passes)

    def one_pass(self) -> None:
        """Forward and backward of the first micro-step."""
        self.engine.backward(self._loss(self._batches[0]))

    def facts(self) -> None:
        """Tells the facts that a run has at any time: its weights, host memory and guesses."""
        answer(
            "facts",
            weights=digest(self.engine.module),
            arena=arena(self.engine),
            guesses=guesses(self.engine),
            cached_bytes=self._device.cached_bytes(),
        )

    def _loss(self, ids: torch.Tensor) -> torch.Tensor:
        labels, kept = ids, {}
        if self._kept:  # the first of these logits is that of the first token with a loss
            labels, kept = ids[:, -self._kept - 1 :], {"logits_to_keep": self._kept + 1}
        loss: torch.Tensor = self.engine(input_ids=ids, labels=labels, **kept).loss
        return loss


def digest(module: torch.nn.Module) -> str:
    """A SHA-256 of all weights, gathered one at a time."""
    total = hashlib.sha256()
    for parameter in module.parameters():
        with deepspeed.zero.GatheredParameters(parameter):
            total.update(parameter.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def arena(engine: Any) -> dict[str, Any] | None:
    """What memascend's host memory is; None in a stock run."""
    attachment = getattr(engine, "memascend", None)
    if attachment is None:
        return None
    allocator = attachment.runtime.arena
    report = allocator.core.report()
    return {
        "reserved_bytes": report.reserved_bytes,
        "registered_bytes": report.registered_bytes,
        "is_pinned": allocator.tensor(1024, torch.uint8, component="probe").is_pinned(),
        "notes": list(allocator.core.notes()),
    }


def guesses(engine: Any) -> dict[str, int] | None:
    """Steps begun during backward as a guess, by what came of them; None where none is one."""
    attachment = getattr(engine, "memascend", None)
    counts = None if attachment is None else attachment.ledger().guesses
    return None if counts is None else {"right": counts.right, "wrong": counts.wrong}


def be_emulated() -> None:
    """Makes the emulated device DeepSpeed's, without what looks for mistakes and takes time."""
    from tests.device.emulator import accelerator, build

    if reason := build.why_not():
        raise SystemExit(reason)
    accelerator.install().set_poisons_and_sums(False)


def be_deterministic() -> None:
    """Switches every source of chance off that torch has, so that runs can be compared."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # would hide reads of garbage
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=json.loads, required=True, help="DeepSpeed's JSON")
    parser.add_argument("--shape", type=json.loads, required=True, help="of the model's config")
    parser.add_argument("--tokens", type=int, required=True, help="of a sequence")
    parser.add_argument("--sequences", type=int, default=1, help="of a micro-step")
    parser.add_argument("--loss-tokens", type=int, help="last ones of a sequence that have a loss")
    parser.add_argument(
        "--checkpointing",
        choices=CHECKPOINTING,
        help="of activations, and where they stay: host by transformers, deepspeed by its JSON",
    )
    parser.add_argument("--emulated", action="store_true", help="on the device of tests/device")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument(
        "--always-guess", action="store_true", help="that no norm is above gradient_clipping"
    )
    parser.add_argument("--device-bytes", action="store_true", help="account for device memory")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    # DeepSpeed calls collectives under names that recent torch announces to rename.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    if options.emulated:
        be_emulated()
    if options.deterministic:
        be_deterministic()
    if options.always_guess:
        guess.Guess.wants = lambda self: True  # type: ignore[method-assign]
    join_group()
    transformers.set_seed(SEED)
    _ = transformers.LlamaForCausalLM  # imported when first named
    baseline_bytes = process_status(os.getpid())["VmRSS"]
    device = OnDevice()
    device.take_host_peak()
    answer("baseline", rss_bytes=baseline_bytes)
    # transformers looks this object up while it builds the model, so it has to stay alive.
    hf_config = HfDeepSpeedConfig(options.config)
    is_fp16 = options.config.get("fp16", {}).get("enabled", False)
    dtype = torch.float16 if is_fp16 else torch.bfloat16
    model = build_model(options.shape, dtype, options.config)
    if options.checkpointing:
        save_checkpoints(model, options.checkpointing, options.config)
    answer("built", peak_bytes=device.take_host_peak())
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=options.config
    )
    del hf_config
    numel = sum(parameter.ds_numel for parameter in model.parameters())
    answer("initialized", peak_bytes=device.take_host_peak(), parameters=numel)
    training = Training(engine, options, device)
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        if command == "quit":
            break
        obey(training, command, argument)
    engine.destroy()
    deepspeed.comm.destroy_process_group()
    # gloo's threads take the GIL to free the tensors of the last collective; a Python that is
    # finalizing by then kills them, and torch aborts.
    time.sleep(0.5)
    if options.emulated:
        os._exit(0)  # the threads of streams never end


def obey(training: Training, command: str, argument: str) -> None:
    """One line of the parent's: each is answered once."""
    if command == "step":
        training.step(int(argument or 1))
    elif command == "trace":  # a step, and its trace in a file
        traced(training.step, Path(argument), stock=components(training.engine) is None)
    elif command == "crowded":  # a step after a pass that found no device memory
        training.step(refusals=crowded(training.one_pass))
    elif command == "race":
        answer("race", value=race())
    elif command == "contexts":
        answer("contexts", devices=contexts_of_ranks(everywhere=argument == "everywhere"))
    elif command == "facts":
        training.facts()
    else:
        raise ValueError(f"{command!r} is no command of this program")


if __name__ == "__main__":
    main()
