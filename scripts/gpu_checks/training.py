"""Whole training runs on the device: the program of the benchmarks, each run in fresh processes.

What is compared is what the program tells: the losses of every micro-step with all their digits,
and a digest of the final weights. The model is small, in the production path all the same: ZeRO-3
from zero.Init on, parameters, gradients and optimizer on the drive, two micro-steps for each step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import device_trace
import gpu_lacks
from cases import Lack
from trainee import Model, Trainee, deepspeed_config

from . import Check, Figures
from .memory import require_registration

STEPS = 4
MODEL, TOKENS = Model(2), 64
#: Large enough that kernels last, so that copies could run beside them.
LONG_MODEL, LONG_TOKENS = Model(8, vocabulary=32768), 4096
#: 4096 tokens are computed in a tenth of a step on an H100: nothing would be beside most copies.
LONG_SEQUENCES = 4
#: Of the time of copies, the part in which kernels run.
OVERLAP_MIN = 0.1
LEARNING_RATE = 1e-4
#: Of the learning rate; a step that is wrong by so little has to be seen.
MISTAKE = 1e-2
ACCELERATOR = "cuda"
#: How torch's sanitizer begins a report, and a line before the kernel of each of two accesses.
RACE, KERNEL = "CSAN detected", "during kernel:"
#: One run of the small model, from its start to its end; a first guess.
RUN_S = 28.0
CHECKPOINTS = ("--checkpointing", "device")
#: A batch of so many sequences, computed in as many slices, beside as many micro-steps.
SLICES = 4
#: Slices add to the gradient of a tied weight in another order than micro-steps do.
UNTIED = Model(2, is_tied=False)
#: Of a sum of losses in another order.
LOSS_TOLERANCE = 1e-6
#: Both threads of memascend that use the device on their own work in this run.
THREADS = {
    "activations": {"enabled": True, "min_bytes": 1 << 14},
    "streaming": {"optimizer": {"during_backward": True}},
}


# -- runs ----------------------------------------------------------------------------------------


def start(
    folder: Path,
    *,
    offload: str = "nvme",
    dtype: str = "bf16",
    world: int = 1,
    model: Model = MODEL,
    tokens: int = TOKENS,
    mistake: float = 0.0,
    pinned: bool = True,
    overlap: bool = True,
    block: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    accumulation: int = 2,
    clipping: float = 1.0,
    options: Sequence[str] = (),
) -> Trainee:
    """A run that is not started yet: DeepSpeed's CPU offload, or memascend on the drive."""
    on_drive = offload == "nvme"
    config = deepspeed_config(
        directory=folder,
        zero={
            "stage3_param_persistence_threshold": 7680,
            "stage3_prefetch_bucket_size": 1 << 20,
            "overlap_comm": overlap,
        },
        parameters={"device": offload, "pin_memory": pinned},
        optimizer={"device": offload, "pin_memory": pinned},
    )
    config["gradient_accumulation_steps"] = accumulation
    config["gradient_clipping"] = clipping
    config["optimizer"]["params"]["lr"] = LEARNING_RATE * (1 + mistake)
    if dtype == "fp16":
        config["bf16"] = {"enabled": False}
        config["fp16"] = {"enabled": True, "initial_scale_power": 8}
    return Trainee(
        f"{offload} {dtype}",
        config,
        model,
        folder,
        block=block or {} if on_drive else None,
        tokens=tokens,
        options=["--deterministic", *options],
        accelerator=ACCELERATOR,
        world=world,
        environment={"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **(environment or {})},
    )


def result(run: Trainee, commands: Sequence[str] = ("step",) * STEPS) -> dict[str, Any]:
    """Losses and facts of a run, from its start to its end."""
    with run:
        answers = [run.ask(command, "step") for command in commands]
        facts = run.ask("facts", "facts")
    return {
        "losses": [one["loss"] for one in answers],
        "refusals": sum(one.get("refusals", 0) for one in answers),
        **{name: facts[name] for name in ("weights", "arena", "cached_bytes", "guesses")},
    }


# -- the same numbers ----------------------------------------------------------------------------


def measure_parity(folder: Path, broken: bool, *, dtype: str, world: int = 1) -> dict[str, Any]:
    """The numbers of CPU offload, of memascend, and whether CPU offload repeats its own."""
    oracle = partial(start, folder, offload="cpu", dtype=dtype, world=world)
    ours = start(folder, dtype=dtype, world=world, mistake=MISTAKE if broken else 0.0)
    return {"oracle": result(oracle()), "again": result(oracle()), "ours": result(ours)}


def measure_streams(folder: Path, broken: bool) -> dict[str, Any]:
    """The numbers of CPU offload, and of memascend with all of its streams at once."""
    unclipped = partial(start, folder, clipping=0.0, options=CHECKPOINTS)
    oracle = partial(unclipped, offload="cpu")
    ours = unclipped(block=THREADS, mistake=MISTAKE if broken else 0.0)
    return {"oracle": result(oracle()), "again": result(oracle()), "ours": result(ours)}


def measure_slices(folder: Path, broken: bool) -> dict[str, Any]:
    """The numbers of CPU offload's micro-steps, and of memascend's slices of one batch."""
    untied = partial(start, folder, model=UNTIED)
    oracle = untied(offload="cpu", accumulation=SLICES, options=CHECKPOINTS)
    ours = untied(
        mistake=MISTAKE if broken else 0.0,
        accumulation=1,
        block={"micro_batches": {"count": SLICES}},
        options=[*CHECKPOINTS, "--sequences", str(SLICES)],
    )
    return {"oracle": result(oracle), "ours": result(ours)}


def judge_slices(figures: Figures) -> list[str]:
    """Wants equal weights, and losses that are the means of the micro-steps'."""
    oracle, ours = figures["oracle"], figures["ours"]
    problems = [] if ours["arena"] else ["memascend had no part in its run"]
    means = [statistics.fmean(map(float, losses.split(","))) for losses in oracle["losses"]]
    found = [float(loss) for loss in ours["losses"]]
    if len(means) < STEPS or not all(
        math.isclose(one, other, rel_tol=LOSS_TOLERANCE)
        for one, other in zip(means, found, strict=True)
    ):
        problems.append(f"slices differ: losses {means} and {found}")
    if oracle["weights"] != ours["weights"]:
        problems.append("slices differ: other final weights")
    return problems


def judge_parity(figures: Figures) -> list[str]:
    """Wants equal losses and weights of an oracle that repeats, and memascend at work."""
    return [
        *differences("CPU offload does not repeat", figures["oracle"], figures["again"]),
        *differences("memascend differs", figures["oracle"], figures["ours"]),
        *([] if figures["ours"]["arena"] else ["memascend had no part in its run"]),
    ]


def differences(what: str, one: Figures, other: Figures) -> list[str]:
    """Return the differences between two runs, and losses that are none."""
    losses = [[float(loss) for loss in ",".join(run["losses"]).split(",")] for run in (one, other)]
    problems = []
    if len(losses[0]) < STEPS or not all(math.isfinite(loss) for loss in losses[0]):
        problems.append(f"no {STEPS} steps of finite losses: {one['losses']}")
    if one["losses"] != other["losses"]:
        problems.append(f"{what}: losses {one['losses']} and {other['losses']}")
    if one["weights"] != other["weights"]:
        problems.append(f"{what}: other final weights")
    return problems


# -- registration --------------------------------------------------------------------------------


def measure_registration(folder: Path, broken: bool) -> dict[str, Any]:
    """The arena of a fresh process in which zero.Init is the first to use the device."""
    require_registration()
    return result(start(folder, pinned=not broken))


def judge_registration(figures: Figures) -> list[str]:
    """Wants every byte registered, and torch to know it."""
    arena = figures["arena"]
    if not arena:
        return ["memascend had no part in its run"]
    problems = []
    if not 0 < arena["reserved_bytes"] == arena["registered_bytes"]:
        problems.append(f"not all of the arena is registered: {arena}")
    if not arena["is_pinned"]:
        problems.append("torch does not take a tensor of the arena for pinned memory")
    return problems


# -- races ---------------------------------------------------------------------------------------


def measure_sanitizer(folder: Path, broken: bool) -> dict[str, Any]:
    """Races of memascend's run under torch's sanitizer of streams, and those of CPU offload's.

    The sanitizer ends a run at its first race. It sees the kernels of the thread that trains, those
    of DeepSpeed among them: a race that CPU offload has as well is not memascend's.

    Raises:
        Lack: Both runs end at the same race, so that nothing after it was seen.
    """
    ours = races(start(folder, environment=SANITIZER), is_racing=broken)
    theirs = [] if broken else races(start(folder, offload="cpu", environment=SANITIZER))
    if ours and ours == theirs:
        raise Lack(f"CPU offload without memascend ends at the same race: {ours[0]}")
    return {"races": ours, "of CPU offload": theirs}


SANITIZER = {"TORCH_CUDA_SANITIZER": "1"}


def races(run: Trainee, *, is_racing: bool = False) -> list[str]:
    """Train until the sanitizer ends the run; return each race by its two kernels.

    Args:
        run: Not started yet.
        is_racing: Let the run end with a deliberate race.

    Raises:
        RuntimeError: The run ended for another reason.
    """
    try:
        with run:
            for _ in range(STEPS):
                run.step()
            if is_racing:
                run.ask("race", "race")
    except RuntimeError:
        if not races_in(run.printed):
            raise
    return races_in(run.printed)


def races_in(lines: Sequence[str]) -> list[str]:
    """Return the races in a log, each once: without addresses, which differ from run to run."""
    found: list[list[str]] = []
    for line, following in zip(lines, [*lines, ""][1:], strict=True):
        if RACE in line:
            found.append([])
        elif KERNEL in line and found:
            found[-1].append(following.strip())
    return list(dict.fromkeys(f"{RACE} a race of " + " and ".join(pair) for pair in found))


def judge_sanitizer(figures: Figures) -> list[str]:
    """Wants no race that CPU offload does not have."""
    return [race for race in figures["races"] if race not in figures["of CPU offload"]]


# -- contexts ------------------------------------------------------------------------------------


def measure_contexts(folder: Path, broken: bool, *, world: int = 2) -> dict[str, Any]:
    """The devices on which each rank has a context after steps that use all of our threads."""
    # With clipping no step begins during backward.
    run = start(folder, world=world, block=THREADS, clipping=0.0)
    with run:
        for _ in range(STEPS):
            run.step()
        answer = run.ask("contexts everywhere" if broken else "contexts", "contexts")
    return {"devices": answer["devices"]}


def judge_contexts(figures: Figures) -> list[str]:
    """Wants a context of each rank on its own device alone: each takes some 0.5 GB of a device."""
    return [
        f"rank {rank} has contexts on the devices {devices}"
        for rank, devices in enumerate(figures["devices"])
        if devices != [rank]
    ]


# -- torch's own switches ------------------------------------------------------------------------


def measure_uncached(folder: Path, broken: bool) -> dict[str, Any]:
    """A run in which device memory that is freed is gone at once, and one in which it is kept."""
    variable = {} if broken else {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return {"ours": result(start(folder, environment=variable)), "oracle": result(start(folder))}


def judge_uncached(figures: Figures) -> list[str]:
    """Wants the same numbers, and nothing cached."""
    problems = differences("without the cache", figures["oracle"], figures["ours"])
    if figures["ours"]["cached_bytes"]:
        problems.append(f"{figures['ours']['cached_bytes']} bytes were cached: it was not off")
    return problems


def measure_oom(folder: Path, broken: bool) -> dict[str, Any]:
    """A run with a pass that finds a full device in the middle, and a run without."""
    second = "step" if broken else "crowded"
    ours = result(start(folder), ["step", "step", second, "step"])
    return {"ours": ours, "oracle": result(start(folder))}


def judge_oom(figures: Figures) -> list[str]:
    """Wants a refusal, and the numbers of a run without one."""
    problems = differences("after a full device", figures["oracle"], figures["ours"])
    if figures["ours"]["refusals"] < 1:
        problems.append("no pass was refused device memory")
    return problems


# -- a trace at steady state ---------------------------------------------------------------------


def measure_profile(folder: Path, broken: bool, *, breaks_pinning: bool = False) -> dict[str, Any]:
    """The profiler's account of a step, after some.

    Args:
        folder: On the drive.
        broken: Whether something is broken.
        breaks_pinning: It is page-locked memory; else streams: all work is on one. Then parameters
            stay in host memory, as no kernel runs while a drive is waited for.

    Raises:
        Lack: The profiler sees no device.
    """
    require_registration()
    trace = folder.absolute() / "trace.json"
    run = start(
        folder,
        model=LONG_MODEL,
        tokens=LONG_TOKENS,
        pinned=not (broken and breaks_pinning),
        overlap=not broken or breaks_pinning,
        options=[*CHECKPOINTS, "--sequences", str(LONG_SEQUENCES)],
    )
    if not breaks_pinning:
        run.config["zero_optimization"]["offload_param"]["max_in_cpu"] = LONG_MODEL.numel
    with run:
        for _ in range(STEPS):
            run.step()
        run.ask(f"trace {trace}", "step")
    try:
        return {"least_bytes": LONG_MODEL.numel, **device_trace.read(trace)}
    except device_trace.NoKernels as error:
        raise Lack(f"the profiler sees no device here: {error}") from error


def judge_copies(figures: Figures) -> list[str]:
    """Wants parameters to be copied, and nothing of pageable memory."""
    problems = [f"{name} of {nbytes} bytes" for name, nbytes in figures["pageable"]]
    if figures["copied_bytes"]["HtoD"] < figures["least_bytes"]:
        problems.append(f"less than half of the parameters was copied: {figures['copied_bytes']}")
    return problems


def judge_overlap(figures: Figures) -> list[str]:
    """Wants kernels to run beside copies."""
    share = figures["overlap_share"]
    return [f"kernels run during {share:.0%} of the copies' time"] if share < OVERLAP_MIN else []


def _parity(name: str, promise: str, gpus: int = 1, *, dtype: str = "bf16") -> Check:
    return Check(
        name,
        promise,
        partial(measure_parity, dtype=dtype, world=gpus),
        judge_parity,
        f"a learning rate that is wrong by {MISTAKE:.0%}",
        noticed_min=2,
        gpus=gpus,
        needs=gpu_lacks.training,
        seconds=6 * RUN_S,
    )


def trained(*described: Any, runs: int, **more: Any) -> Check:
    """A check of so many runs, those of its control among them."""
    return Check(*described, needs=gpu_lacks.training, seconds=runs * RUN_S, **more)


#: Those that teach more for their time come first.
CHECKS = (
    trained(
        "registration",
        "the arena of a fresh process is registered, with zero.Init first",
        measure_registration,
        judge_registration,
        "pin_memory is off, so that nothing is registered",
        noticed_min=2,
        runs=2,
    ),
    trained(
        "contexts",
        "each rank has a context on its own device alone, whichever thread uses the device",
        measure_contexts,
        judge_contexts,
        "each rank makes a context on every device",
        noticed_min=2,
        gpus=2,
        runs=2,
    ),
    _parity("parity-bf16", "losses and weights are those of CPU offload, in bf16"),
    trained(
        "parity-slices",
        "a batch in slices has the weights and losses of CPU offload's micro-steps",
        measure_slices,
        judge_slices,
        f"a learning rate that is wrong by {MISTAKE:.0%}",
        noticed_min=2,
        runs=4,
    ),
    trained(
        "parity-streams",
        "losses and weights are those of CPU offload with activations and steps during backward",
        measure_streams,
        judge_parity,
        f"a learning rate that is wrong by {MISTAKE:.0%}",
        noticed_min=2,
        runs=6,
    ),
    trained(
        "profile",
        "no copy of a step is of pageable memory",
        partial(measure_profile, breaks_pinning=True),
        judge_copies,
        "pin_memory is off, so that copies are of pageable memory",
        runs=3,
    ),
    trained(
        "overlap",
        f"kernels run during {OVERLAP_MIN:.0%} of the time of copies, and more",
        measure_profile,
        judge_overlap,
        "overlap_comm is off, so that copies and kernels are on one stream",
        runs=3,
    ),
    _parity("nccl", "the same with 2 devices and NCCL", gpus=2),
    trained(
        "sanitizer",
        "TORCH_CUDA_SANITIZER=1 finds no race of streams but those of CPU offload",
        measure_sanitizer,
        judge_sanitizer,
        "a tensor is used on two streams without order",
        runs=3,
    ),
    trained(
        "oom",
        "a pass that finds the device full can be made again, with the same numbers",
        measure_oom,
        judge_oom,
        "the device is not full",
        runs=4,
    ),
    trained(
        "no-caching",
        "PYTORCH_NO_CUDA_MEMORY_CACHING=1: the same numbers when freed memory is gone",
        measure_uncached,
        judge_uncached,
        "the variable is not set",
        runs=4,
    ),
    _parity("parity-fp16", "losses and weights are those of CPU offload, in fp16", dtype="fp16"),
)
