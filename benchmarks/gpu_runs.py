"""Which training runs the GPU bench has, what each needs, and what keeps one from a machine.

Knows shapes, DeepSpeed's JSON and the arithmetic of `memascend plan`; neither torch nor devices.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_machine import Machine
from trainee import Trainee

from memascend.base.units import format_nbytes
from memascend.config.deepspeed import parse_deepspeed
from memascend.plan.derive import derive
from memascend.plan.request import PlanRequest
from memascend.plan.shapes import ModelShapes, from_config
from memascend.plan.stock import stock

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "nvme_gpu.json"
#: One sequence of so many tokens: what its layers save is most of the memory.
CONTEXTS = {"context-32k": 32768, "context-64k": 65536, "context-128k": 131072}
STEP_TOKENS = {"4k": 4096, "64k": 65536, **CONTEXTS}
ACCUMULATIONS = (1, 8)
#: Where the step is not one sequence.
SEQUENCE_TOKENS_MAX = 4096
#: The logits of a whole sequence would take more device memory than all the rest: its last tokens
#: have a loss, as those of an answer have.
LOSS_TOKENS = 256
#: Bytes on the drive for each parameter: stock keeps gradients in fp32.
STOCK_DRIVE_BYTES, OUR_DRIVE_BYTES = 18, 16
#: Of what is free, the part that a run may plan with.
USABLE = 0.9
#: For guesses of a run's duration: its start, bytes that a step moves for each parameter, and the
#: rate of a drive that is not fast.
START_S, STEP_DRIVE_BYTES, DRIVE_BYTES_S = 60.0, 34, 2e9


def _decoder(model_type: str, **numbers: Any) -> dict[str, Any]:
    return {"model_type": model_type, "max_position_embeddings": max(CONTEXTS.values()), **numbers}


def _numbers(
    vocab: int, hidden: int, ffn: int, layers: int, heads: int, kv: int, *, tied: bool
) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "tie_word_embeddings": tied,
    }


@dataclass(frozen=True, slots=True)
class Public:
    """A model in the shape of a public one."""

    shape: dict[str, Any]

    @property
    def shapes(self) -> ModelShapes:
        """Its tensors."""
        return from_config(self.shape)


MODELS = {
    "qwen2.5-0.5b": Public(_decoder("qwen2", **_numbers(151936, 896, 4864, 24, 14, 2, tied=True))),
    "llama-3.2-1b": Public(_decoder("llama", **_numbers(128256, 2048, 8192, 16, 32, 8, tied=True))),
    "llama-3.2-3b": Public(_decoder("llama", **_numbers(128256, 3072, 8192, 28, 24, 8, tied=True))),
    "llama-3.1-8b": Public(
        _decoder("llama", **_numbers(128256, 4096, 14336, 32, 32, 8, tied=False))
    ),
}

STOCK, TUNED, LEAN, HALF = "stock", "stock-tuned", "memascend", "memascend-half"
CONTENDERS = (STOCK, TUNED, LEAN, HALF)
#: The micro-steps of a step as slices of one batch: where there are several.
SLICES = "memascend-slices"
#: Checkpoints in page-locked memory by transformers' own switch, and on the drive.
STOCK_OFFLOAD, OFFLOAD, ACTIVATIONS = "stock-offload", "memascend-offload", "memascend-activations"
CONTEXT_CONTENDERS = (STOCK_OFFLOAD, LEAN, OFFLOAD, ACTIVATIONS)
#: Page-locked memory without rounding, which DeepSpeed and torch have behind variables.
TUNED_VARIABLES = {
    "DS_PIN_MEMORY_BACKEND": "native",
    "PYTORCH_ALLOC_CONF": "pinned_max_round_threshold_mb:1",
}


@dataclass(frozen=True, slots=True)
class Run:
    """One row: a model, tokens of a step on one device, micro-steps they make, and who trains."""

    model: str
    tokens: str
    accumulation: int
    contender: str

    @property
    def name(self) -> str:
        """Of the case."""
        return f"{self.model}/{self.tokens}/x{self.accumulation}/{self.contender}"

    @property
    def micro_tokens(self) -> int:
        """Tokens of a micro-step."""
        return STEP_TOKENS[self.tokens] // self.accumulation

    @property
    def sequence_tokens(self) -> int:
        """Tokens of one of its sequences."""
        longest = self.micro_tokens if self.tokens in CONTEXTS else SEQUENCE_TOKENS_MAX
        return min(self.micro_tokens, longest)

    @property
    def sequences(self) -> int:
        """Sequences of a micro-step."""
        return self.micro_tokens // self.sequence_tokens

    @property
    def batch(self) -> int:
        """Sequences of a pass."""
        return self.sequences * self.accumulation // self.passes

    @property
    def passes(self) -> int:
        """Forward and backward passes of a step: slices make all micro-steps one."""
        return 1 if self.contender == SLICES else self.accumulation

    @property
    def is_stock(self) -> bool:
        """Whether memascend has no part in it."""
        return self.contender in (STOCK, TUNED, STOCK_OFFLOAD)

    @property
    def offloads_checkpoints(self) -> bool:
        """Whether transformers puts the checkpoints into page-locked memory."""
        return self.contender in (STOCK_OFFLOAD, OFFLOAD)


def contenders(tokens: str, accumulation: int) -> tuple[str, ...]:
    """Return who trains steps of so many tokens in so many micro-steps."""
    if tokens in CONTEXTS:
        return CONTEXT_CONTENDERS
    return CONTENDERS if accumulation == 1 else (*CONTENDERS, SLICES)


RUNS = [
    Run(model, tokens, accumulation, contender)
    for model in MODELS
    for tokens in STEP_TOKENS
    for accumulation in (ACCUMULATIONS if tokens not in CONTEXTS else (1,))
    for contender in contenders(tokens, accumulation)
]


# -- what a run needs ---------------------------------------------------------------------------


def config_of(run: Run, machine: Machine) -> dict[str, Any]:
    """DeepSpeed's JSON of a run: the repository's own for one GPU, but for what the run states."""
    config: dict[str, Any] = json.loads(CONFIG.read_text(encoding="utf-8"))
    zero = config["zero_optimization"]
    shapes = MODELS[run.model].shapes
    largest_numel = max(tensor.numel for tensor in shapes.tensors)
    config["gradient_accumulation_steps"] = run.passes
    config["train_micro_batch_size_per_gpu"] = run.batch
    parameters = zero["offload_param"]
    # Else stock keeps a model in its buffers, which are five, as soon as it is small enough.
    zero["stage3_max_reuse_distance"] = 0
    parameters["buffer_size"] = max(largest_numel, parameters["buffer_size"])
    if run.contender == TUNED:
        # The least that runs: buffers of the largest tensor, small sub-groups, nothing kept.
        parameters |= {"buffer_size": largest_numel, "max_in_cpu": 0}
        zero["sub_group_size"] = 100_000_000
    if not run.is_stock:
        del parameters["max_in_cpu"]
        config["memascend"] = {}
    if run.contender == ACTIVATIONS:
        config["memascend"]["activations"] = {"enabled": True}
    if run.contender == SLICES:
        config["memascend"]["micro_batches"] = {"count": run.accumulation}
    if run.contender == HALF:
        config["memascend"]["host_memory_limit"] = machine.total_bytes // 2 // max(1, machine.gpus)
    return config


def trainee_of(run: Run, machine: Machine, folder: Path, *, accelerator: str) -> Trainee:
    """The training run, which is not started yet."""
    where = "host" if run.offloads_checkpoints else "device"
    options = ["--sequences", str(run.batch), "--checkpointing", where]
    options += ["--loss-tokens", str(min(LOSS_TOKENS, run.sequence_tokens - 1))]
    return Trainee(
        run.name,
        config_of(run, machine),
        MODELS[run.model],
        folder,
        tokens=run.sequence_tokens,
        options=options,
        accelerator=accelerator,
        world=machine.gpus,
        environment=TUNED_VARIABLES if run.contender == TUNED else {},
    )


def host_bytes(run: Run, machine: Machine) -> int:
    """Host memory that a run's ranks plan with at their peak, without Python and torch."""
    config, world = config_of(run, machine), max(1, machine.gpus)
    shapes = MODELS[run.model].shapes
    request = PlanRequest.from_deepspeed(config, world=world, local_world=world)
    if run.is_stock:
        plan = stock(
            shapes,
            request=request,
            settings=parse_deepspeed(config),
            rounds_pinned=run.contender == STOCK,
        )
    else:
        limit = config["memascend"].get("host_memory_limit")
        plan = derive(shapes, request=request, limit_bytes=limit)
    in_memory = checkpoint_bytes(run) if run.offloads_checkpoints else 0
    return world * (in_memory + max(plan.initialization_bytes, plan.step_bytes))


def checkpoint_bytes(run: Run) -> int:
    """What the layers of a micro-step save: a hidden state each, as large as torch's pins it."""
    shape = MODELS[run.model].shape
    saved_bytes = 2 * run.micro_tokens * shape["hidden_size"]
    return shape["num_hidden_layers"] * (1 << (saved_bytes - 1).bit_length())


def device_bytes(run: Run) -> int:
    """Device memory that a run is likely to take: an estimate, from which a case may be left out.

    Kept activations (one of each layer, where they stay), those of the layer that is computed
    again, logits of the tokens with a loss in four forms, parameters that stay
    (stage3_max_live_parameters), and the largest tensor with its gradient.
    """
    shape = MODELS[run.model].shape
    hidden, ffn = shape["hidden_size"], shape["intermediate_size"]
    stay = not run.offloads_checkpoints and run.contender != ACTIVATIONS
    layers = shape["num_hidden_layers"] if stay else 3
    of_token = 2 * (layers * hidden + 12 * hidden + 5 * ffn)
    logits = run.sequences * (LOSS_TOKENS + 1) * shape["vocab_size"] * (2 + 4 + 4 + 4)
    shapes = MODELS[run.model].shapes
    live = 2 * min(shapes.numel, 10**9)
    largest = 3 * 2 * max(tensor.numel for tensor in shapes.tensors)
    return run.micro_tokens * of_token + logits + live + largest


def drive_bytes(run: Run) -> int:
    """Bytes that a run holds on the drive."""
    of_parameter = STOCK_DRIVE_BYTES if run.is_stock else OUR_DRIVE_BYTES
    held = of_parameter * MODELS[run.model].shapes.numel
    return held + (checkpoint_bytes(run) if run.contender == ACTIVATIONS else 0)


def seconds(run: Run, steps: int) -> float:
    """A guess of a run's duration, from which it is left for another call that has more time."""
    moved = STEP_DRIVE_BYTES * MODELS[run.model].shapes.numel
    return START_S + steps * moved / DRIVE_BYTES_S


def why_not(run: Run, machine: Machine) -> str:
    """What the machine lacks for a run; empty when it has all."""
    needed = {
        "on the drive": (drive_bytes(run), machine.drive_bytes),
        "of a device's memory": (device_bytes(run), machine.device_bytes),
        "of host memory": (host_bytes(run, machine), machine.host_bytes),
    }
    return "; ".join(
        f"needs {format_nbytes(wanted)} {where}, {format_nbytes(there)} is there"
        for where, (wanted, there) in needed.items()
        if wanted > USABLE * there
    )
