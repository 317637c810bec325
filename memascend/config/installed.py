"""Abilities of the installed DeepSpeed that a run may need, and their refusal by name.

DeepSpeed is not imported.

An ability is known by a name in DeepSpeed's files, not by the version: a patched release has the
abilities of its code. Without DeepSpeed on this machine nothing is refused.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from memascend.errors import ConfigError

#: Supported releases, as in pyproject.toml.
RANGE = ">=0.18.4,<0.20"


@dataclass(frozen=True, slots=True)
class Ability:
    """One thing that older supported releases of DeepSpeed cannot do.

    Attributes:
        what: Its name in messages.
        file: The file of DeepSpeed that shows it.
        sign: Text that only a release with the ability has there.
        since: The first release with it.
    """

    what: str
    file: str
    sign: str
    since: str


#: A value of another sub-group stays defined while whole ones are swapped.
WHOLE_STEPS = Ability(
    "swapping whole sub-groups and parameters with every value kept",
    "runtime/swap_tensor/optimizer_utils.py",
    "def _writeback_gradients(",
    "0.19.8",
)
CHECKPOINT_INPUTS = Ability(
    "an engine for cpu_checkpointing",
    "runtime/activation_checkpointing/checkpointing.py",
    "def _get_cpu_offload_engine(",
    "0.19.6",
)
MUON = Ability("Muon in ZeRO stage 3", "runtime/zero/stage3.py", "self.use_muon =", "0.18.9")
MUON_BY_MATRIX = Ability(
    "updates of matrices before the step of an offloaded optimizer",
    "runtime/zero/stage3.py",
    "def _apply_muon_updates_cpu_offload(",
    "0.19.8",
)
INNER_PASSES = Ability(
    "counting a backward pass inside another one",
    "runtime/zero/stage3.py",
    "def clear_backward_seen_flag(",
    "0.18.5",
)
#: Without it what a reduction in fp32 gives is rounded to the dtype of the weights.
SUMS_IN_FP32 = Ability(
    "gradients that stay in fp32 behind their reduction",
    "runtime/zero/stage3.py",
    "[g.to(self.gradient_accumulation_dtype) for g in grad_partitions_for_rank]",
    "0.19.2",
)
#: Without it every call of the operator but the first of a step computes them anew.
KEPT_POWERS = Ability(
    "keeping the powers of Adam's betas from one tile to the next",
    "ops/csrc/includes/cpu_adam.h",
    "if (step == _step + 1)",
    "0.19.0",
)
HOST_BUILDERS = Ability(
    "building its CPU optimizers on a machine with a GPU without the CUDA toolkit",
    "accelerator/cuda_accelerator.py",
    "cpu_op_builder_module =",
    "0.19.8",
)
ABILITIES = (
    *(INNER_PASSES, MUON, KEPT_POWERS, SUMS_IN_FP32),
    *(CHECKPOINT_INPUTS, WHOLE_STEPS, MUON_BY_MATRIX),
)


def is_able(ability: Ability) -> bool:
    """Return whether the installed DeepSpeed has an ability; True without DeepSpeed."""
    folder = _folder()
    return folder is None or _has(folder / ability.file, ability.sign)


def require_whole_steps(reason: str) -> None:
    """Refuse steps in whole sub-groups on a drive if the installed DeepSpeed cannot make them.

    Args:
        reason: Why they are necessary.

    Raises:
        ConfigError: The installed release cannot.
    """
    require(WHOLE_STEPS, f"a step in DeepSpeed's own buffers, since {reason},")


def require(ability: Ability, what: str, remedy: str = "change that") -> None:
    """Refuse a setting if the installed DeepSpeed lacks an ability.

    Args:
        ability: The ability that the setting needs.
        what: The setting.
        remedy: What helps besides another release.

    Raises:
        ConfigError: The installed release lacks it.
    """
    if not is_able(ability):
        raise refusal(ability, what, remedy)


def refusal(ability: Ability, what: str, remedy: str = "change that") -> ConfigError:
    """Return the error for a setting that needs an ability; arguments as of `require`."""
    return ConfigError(
        f"{what} needs DeepSpeed {ability.since} or later, and DeepSpeed {installed_version()} is "
        f"installed, which lacks {ability.what}. Run: pip install "
        f"'deepspeed>={ability.since},{RANGE.partition(',')[2]}', or {remedy}"
    )


def installed_version() -> str:
    """Return the version of the installed DeepSpeed; empty without it."""
    try:
        return importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def _has(file: Path, sign: str) -> bool:
    try:
        return sign in file.read_text(encoding="utf-8")
    except OSError:
        return False


def _folder() -> Path | None:
    """Return the folder of DeepSpeed."""
    try:
        spec = importlib.util.find_spec("deepspeed")
    except ValueError:  # a module without a specification stands in its place
        spec = None
    return None if spec is None or spec.origin is None else Path(spec.origin).parent
