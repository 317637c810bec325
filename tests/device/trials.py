"""What is trained on the emulated device: variants of a training, each in several modes.

A variant changes what is computed, and has an oracle: stock CPU offload on the same device, without
delays. A mode changes how it is offloaded, and must not show in the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tests.parity.cases import WHOLE, Backend, Case
from tests.support.sections import SECTIONS

MIB = 1 << 20

#: Parameters are let go and gathered again within a step, and read ahead by few.
TRAINING = Case(
    accumulation=2,
    clipping=1.0,
    checkpointing="nonreentrant",
    persistence_numel=1_000,
    prefetch_numel=2_500_000,
    live_numel_max=4_000_000,
    reuse_numel_max=3_000_000,
)

VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "bf16 one micro-step": {"accumulation": 1},
    "fp16": {"dtype": "fp16", "scale_power": 12, "scale_window": 2},
    "fp16 overflows": {"dtype": "fp16", "scale_power": 20, "scale_window": 2, "steps": 6},
    "two ranks": {"world": 2},
    "two ranks fp16": {"world": 2, "dtype": "fp16", "accumulation": 1, "scale_power": 12},
    "no overlap": {"overlap": False},
    "odd shapes": {"family": "odd", "checkpointing": "off"},
    "odd shapes, two ranks": {"family": "odd", "checkpointing": "off", "world": 2},
    "a layer now and then": {"family": "alternating", "checkpointing": "off"},
    "sums in fp32": {
        **{"gradients_in_fp32": True, "accumulation": 4},
        **{"family": "alternating", "checkpointing": "off"},
    },
    "changed by hand": {"accessors": "change", "modify_weights": True},
    "changed by hand, two ranks": {"accessors": "change", "modify_weights": True, "world": 2},
    "resumed": {"resume_at": 2, "steps": 4},
    "steps during backward": {"clipping": 0.0, "during_backward": True, "steps": 4},
    "steps during backward as a guess": {
        **{"clipping": 1000.0, "during_backward": True, "steps": 7},
        "modify_weights": True,
    },
    "steps during backward, two ranks fp16": {
        **{"clipping": 0.0, "during_backward": True, "steps": 8, "world": 2},
        **{"dtype": "fp16", "scale_power": 18, "scale_window": 2, "accumulation": 1},
    },
    "steps during backward where it pays": {
        **{"clipping": 1000.0, "during_backward": "auto", "steps": 12},
    },
    "steps during backward where it pays, two ranks": {
        **{"clipping": 0.0, "during_backward": "auto", "steps": 12, "world": 2},
    },
    "parameters on the device": {"params": "none"},
    "parameters in host memory": {"params": "cpu"},
    "optimizer in host memory": {"optimizer": "cpu"},
    "whole model handed over": {"zero_init": False},
    "inference": {"optimizer": "absent"},
    "optimizer on the device": {"optimizer": "none", "optimizer_type": "TorchAdamW"},
    "fp16 optimizer on the device": {
        **{"optimizer": "none", "optimizer_type": "TorchAdamW"},
        **{"dtype": "fp16", "scale_power": 12},
    },
    # Small matrices: a product takes long on the emulated device.
    "Muon": {
        **{"optimizer_type": "Muon", "steps": 3},
        **{"family": "odd", "checkpointing": "off"},
    },
    "Muon, two ranks": {
        **{"optimizer_type": "Muon", "world": 2, "family": "odd", "checkpointing": "off"},
    },
    "one pass in four slices": {"accumulation": 1, "labelled": True, "slices": 4},
    "four ranks": {"world": 4},
    # Three of four have nothing of a tensor.
    "odd shapes, four ranks": {
        **{"family": "odd", "checkpointing": "off", "world": 4},
        "persistence_numel": 0,
    },
}
#: Of what a step behind its caller could get wrong: run in STEP_MODES alone.
STEP_VARIANTS: dict[str, dict[str, Any]] = {
    "four micro-steps": {"accumulation": 4, "steps": 4},
    "eight micro-steps, two ranks": {"accumulation": 8, "steps": 4, "world": 2},
    "overflows, two ranks": {
        **{"dtype": "fp16", "scale_power": 20, "scale_window": 2, "steps": 8},
        **{"world": 2, "accumulation": 1, "family": "unused", "checkpointing": "off"},
    },
    "LoRA": {"family": "lora", "steps": 4},
    "LoRA, two ranks": {"family": "lora", "accumulation": 4, "world": 2, "steps": 4},
    "unused parameters": {"family": "unused", "checkpointing": "off", "steps": 4},
    "unused parameters, two ranks": {
        **{"family": "unused", "checkpointing": "off", "accumulation": 4, "world": 2, "steps": 4},
    },
    "saved in the middle": {"save_at": 2, "steps": 4},
    "saved in the middle, two ranks": {"save_at": 2, "steps": 4, "world": 2},
    "resumed, two ranks": {"resume_at": 2, "steps": 6, "world": 2},
    "during backward, two ranks": {
        **{"clipping": 0.0, "during_backward": True, "steps": 4, "world": 2},
    },
    "during backward as a guess, two ranks": {
        **{"clipping": 1000.0, "during_backward": True, "steps": 7, "world": 2},
    },
    "changed by hand, all in memory": {
        **{"modify_weights": True, "gather_all": True, "limit_bytes": 512 * MIB, "steps": 4},
    },
    "all in memory, two ranks": {"limit_bytes": 512 * MIB, "world": 2, "steps": 4},
}
#: Of what forward saves: run in ACTIVATION_MODES alone.
ACTIVATION_VARIANTS: dict[str, dict[str, Any]] = {
    "checkpoints": {},
    "checkpoints, two ranks fp16": {"world": 2, "dtype": "fp16", "scale_power": 12},
    "DeepSpeed's checkpoints": {"checkpointing": "deepspeed"},
    "one pass in slices": {"accumulation": 1, "labelled": True, "slices": 3},
    "no checkpoints": {"checkpointing": "off"},
    "no checkpoints, two ranks": {"checkpointing": "off", "family": "qwen", "world": 2},
}
#: Muon whose updates are applied as they are made, since nothing is clipped: run in MUON_MODES
#: alone. Small models whose layers the device can compute, one of them of joined projections, one
#: whose embedding is its head. Resumed runs are compared with CPU offload's that never stopped.
MUON_VARIANTS: dict[str, dict[str, Any]] = {
    f"Muon {what}, {family}{', two ranks' * (world - 1)}": {
        **{"optimizer_type": "Muon", "clipping": 0.0, "accumulation": 1, "checkpointing": "off"},
        **{"family": family, "world": world},
        **({"resume_at": 2, "steps": 5} if what == "resumed" else {}),
    }
    for what, families in (
        ("not clipped", ("odd", "llama-untied", "phi3-untied", "qwen3-untied", "gemma-tied")),
        ("resumed", ("odd",)),
    )
    for family in families
    for world in (1, 2)
}
#: Of several ranks, which take longest: parity's cases of two ranks and the same variant of one
#: rank say as much, but for the order of what two devices do.
REPEATED = (
    *("two ranks fp16", "changed by hand, two ranks", "four ranks"),
    *("steps during backward where it pays, two ranks", "during backward as a guess, two ranks"),
    *("eight micro-steps, two ranks", "LoRA, two ranks", "unused parameters, two ranks"),
    *("saved in the middle, two ranks", "all in memory, two ranks", "no checkpoints, two ranks"),
    *("Muon not clipped, llama-untied, two ranks", "Muon not clipped, phi3-untied, two ranks"),
    *("Muon not clipped, phi3-untied", "Muon not clipped, qwen3-untied"),
    *("Muon not clipped, gemma-tied, two ranks", "Muon resumed, odd, two ranks"),
)
#: A limit is refused with these.
WITHOUT_LIMIT = (
    "parameters in host memory",
    "optimizer in host memory",
    "optimizer on the device",
    "fp16 optimizer on the device",
)


@dataclass(frozen=True)
class Mode:
    """A way to offload."""

    changes: dict[str, Any] = field(default_factory=dict)
    backend: Backend = "memascend"
    options: dict[str, Any] = field(default_factory=dict)  # of tests.device.worker.run_case


MODES: dict[str, Mode] = {
    "no limit": Mode(),
    "slots are reused at once": Mode({"limit_bytes": 29 * MIB}),
    "large shards have no slot": Mode({"limit_bytes": 10 * MIB}),
    "roomy": Mode({"limit_bytes": 60 * MIB}),
    "a part stays in memory": Mode({"limit_bytes": 76 * MIB}),
    "all stays in memory": Mode({"limit_bytes": 512 * MIB}),
    "registered by CUDA's driver": Mode(options={"registrar": "driver"}),
    "not registered": Mode(options={"registrar": "nobody"}),
    "stock": Mode(backend="stock"),
}
STEP_MODES: dict[str, Mode] = {
    "steps are over first": Mode({"walk": "off"}),
    "steps begin when they are waited for": Mode({"walk": "late"}),
}
MUON_MODES: dict[str, Mode] = {
    "all is on the drive": Mode(),
    "little memory": Mode({"limit_bytes": 29 * MIB}),
    # With one rank; two step after backward.
    "during backward": Mode({"during_backward": True}),
    "during backward, little memory": Mode({"during_backward": True, "limit_bytes": 29 * MIB}),
}
ACTIVATION_MODES: dict[str, Mode] = {
    "all goes to the drive": Mode({"saved_bytes": 0}),
    "some stays on the device": Mode({"saved_bytes": 20 << 10, "limit_bytes": 29 * MIB}),
}
#: Of four ranks, which take their time, these alone.
MODES_OF_FOUR = ("no limit", "slots are reused at once")
#: Of the plain variant in bf16 and fp16 alone.
SECTION_MODES: dict[str, Mode] = {
    **{f"no {off}": Mode({"sections": tuple(s for s in SECTIONS if s != off)}) for off in SECTIONS},
    # Stock's pool serves then, and dies of reading ahead.
    "no buffer_pool": Mode(
        {"sections": tuple(s for s in SECTIONS if s != "buffer_pool"), "prefetch_numel": 0}
    ),
    "no streams": Mode({"sections": WHOLE}),
    "threads": Mode({"engine": "threads"}),
    "libaio": Mode({"engine": "libaio"}),
    "everything compared": Mode({"verify": "full"}),
}
#: Stock's own swapper dies or errs here: tests/parity/test_stock_parity.py.
NOT_STOCK = (
    "odd shapes",
    "odd shapes, two ranks",
    "Muon",
    "Muon, two ranks",
    "a layer now and then",
    "sums in fp32",
    "changed by hand",
    "changed by hand, two ranks",
    "resumed",
    "one pass in four slices",  # stock has no slices
)


EVERY_VARIANT = VARIANTS | STEP_VARIANTS | ACTIVATION_VARIANTS | MUON_VARIANTS
EVERY_MODE = MODES | SECTION_MODES | STEP_MODES | ACTIVATION_MODES | MUON_MODES
#: Variants, and the modes that each of them is tried in.
FAMILIES = (
    (VARIANTS, MODES),
    (STEP_VARIANTS, STEP_MODES),
    (ACTIVATION_VARIANTS, ACTIVATION_MODES),
    (MUON_VARIANTS, MUON_MODES),
)


@dataclass(frozen=True)
class Trial:
    """One variant in one mode."""

    variant: str
    mode: str

    @property
    def name(self) -> str:
        """What pytest shows."""
        return f"{self.variant} / {self.mode}"

    @property
    def how(self) -> Mode:
        """What the mode stands for."""
        return EVERY_MODE[self.mode]

    @property
    def case(self) -> Case:
        """What parity would run."""
        case = replace(TRAINING, **EVERY_VARIANT[self.variant])
        case = replace(case, **self.how.changes)
        return case.within_stock() if self.how.backend == "stock" else case


def trials() -> list[Trial]:
    found = [
        Trial(variant, mode)
        for variant in VARIANTS
        for mode in MODES
        if not ("limit_bytes" in MODES[mode].changes and variant in WITHOUT_LIMIT)
        if not (mode == "stock" and variant in NOT_STOCK)
        if not (mode not in MODES_OF_FOUR and VARIANTS[variant].get("world") == 4)
    ]
    found += [Trial(variant, mode) for variant in ("bf16", "fp16") for mode in SECTION_MODES]
    return found + [
        Trial(variant, mode)
        for variants, modes in FAMILIES
        if variants is not VARIANTS
        for variant in variants
        for mode in modes
    ]


#: Always run: slots and chunks, the drive and the device, bf16 and fp16.
QUICK = (
    Trial("bf16", "large shards have no slot"),
    Trial("fp16 optimizer on the device", "no limit"),
    Trial("changed by hand, all in memory", "steps begin when they are waited for"),
    Trial("no checkpoints", "all goes to the drive"),
)


def chosen() -> set[Trial]:
    """Return what stands for the rest: variants in one mode or none, the plain one in others."""
    found = set(QUICK)
    for place, variant in enumerate(EVERY_VARIANT):
        modes = next(modes for variants, modes in FAMILIES if variant in variants)
        possible = [t for t in trials() if t.variant == variant and t.mode in modes]
        if variant not in REPEATED:
            found.add(possible[place % len(possible)])
    modes_tried = {trial.mode for trial in found}
    plain = {trial for trial in trials() if trial.variant == "bf16"}
    return found | {trial for trial in plain if trial.mode not in modes_tried}


def parameters() -> list[Any]:
    """Return all trials for pytest, marked by where they run."""
    stand_for_the_rest = chosen()
    found = []
    for trial in trials():
        marks = [] if trial in QUICK else [pytest.mark.full]
        if trial not in stand_for_the_rest:
            marks.append(pytest.mark.matrix)
        found.append(pytest.param(trial, marks=marks, id=trial.name))
    return found
