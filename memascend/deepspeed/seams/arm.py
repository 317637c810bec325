"""The only file that assigns to DeepSpeed: what is replaced, why, and by what.

Nothing is replaced until a config with an active `memascend` block is seen; one wrapper around
DeepSpeedConfig's constructor watches for that. Every replacement is a dispatcher, so models without
a block keep running stock code after arming too.

Each row has the fingerprint of the upstream definition it was written for (see fingerprint.py), and
so has each definition that our subclasses override or rely on (`WATCHED`). A release is known by
these, not by its version number.
"""

from __future__ import annotations

import functools
import importlib
import logging
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from memascend.config.block import active_config, find_block, is_disabled
from memascend.deepspeed.seams import fingerprints
from memascend.deepspeed.seams.fingerprint import fingerprint, forget_sources, resolve
from memascend.errors import UnsupportedDeepSpeedError

log = logging.getLogger(__name__)

_ZERO = "deepspeed.runtime.zero"
_SWAP = "deepspeed.runtime.swap_tensor"


@dataclass(frozen=True)
class Seam:
    """One place where DeepSpeed is altered.

    `replace` takes the upstream definition and gives what stands in its place.
    """

    name: str
    module: str
    attribute: str
    reason: str
    replace: Callable[[Any], Any]


@dataclass(frozen=True)
class SeamStatus:
    """A row of status()."""

    name: str
    target: str
    armed: bool
    reason: str


def _replace_param_swapper(original: Any) -> Any:
    from memascend.deepspeed.parameters.build import wrap_param_swapper

    return wrap_param_swapper(original)


def _replace_convert(original: Any) -> Any:
    from memascend.deepspeed.parameters.gather import wrap_convert

    return wrap_convert(original)


def _replace_partition(original: Any) -> Any:
    from memascend.deepspeed.parameters.gather import wrap_partition

    return wrap_partition(original)


def _replace_optimizer(original: Any) -> Any:
    from memascend.deepspeed.optimizer.optimizer import ZeroOptimizer

    return ZeroOptimizer


def _replace_builder(original: Any) -> Any:
    from memascend.deepspeed.stock.aio_handle import wrap_builder

    return wrap_builder(original)


def _replace_consolidate(original: Any) -> Any:
    from memascend.deepspeed.weights.export import wrap_consolidate

    return wrap_consolidate(original)


def _replace_in_checkpoint(name: str) -> Callable[[Any], Any]:
    def replace(original: Any) -> Any:
        from memascend.deepspeed.checkpoint import engine as checkpoint

        return getattr(checkpoint, f"wrap_{name.strip('_')}")(original)

    return replace


def _add_face(original: Any) -> Any:
    from memascend.deepspeed.attach.attach import face_of

    return property(face_of, doc="memascend's attachment of this engine, None without a block.")


SEAMS: tuple[Seam, ...] = (
    Seam(
        "parameter swapper",
        f"{_ZERO}.partition_parameters",
        "AsyncPartitionedParameterSwapper",
        "zero.Init looks the class up here; ours stages in size classes and gives slots back early",
        _replace_param_swapper,
    ),
    Seam(
        "gather",
        f"{_ZERO}.partition_parameters",
        "Init._convert_to_deepspeed_param",
        "gives parameters gather functions that release slots early and work in turns",
        _replace_convert,
    ),
    Seam(
        "partition",
        f"{_ZERO}.partition_parameters",
        "Init._partition_param",
        "a modified parameter gets a slot again; small pinned shards come from the arena",
        _replace_partition,
    ),
    Seam(
        "optimizer",
        f"{_ZERO}.stage3",
        "DeepSpeedZeroOptimizer_Stage3",
        "the engine looks the class up here; ours overrides hook methods of the same class",
        _replace_optimizer,
    ),
    Seam(
        "engine",
        "deepspeed.runtime.engine",
        "DeepSpeedEngine.memascend",
        "added: `engine.memascend.ledger()`",
        _add_face,
    ),
    Seam(
        "consolidated weights",
        "deepspeed.runtime.engine",
        "DeepSpeedEngine._zero3_consolidated_16bit_state_dict",
        "the 16-bit model for saving is a file on the drive instead of host memory on rank 0",
        _replace_consolidate,
    ),
    *(
        Seam(
            name.strip("_"),
            "deepspeed.runtime.engine",
            f"DeepSpeedEngine.{name}",
            reason,
            _replace_in_checkpoint(name),
        )
        for name, reason in (
            ("save_checkpoint", "a save is atomic, and tensors go straight into it"),
            ("load_checkpoint", "a load verifies first, and takes tensors straight back"),
            ("zero_nvme_offload_optimizer", "false during both: no folder is copied"),
            ("_load_zero_checkpoint", "upstream reads whole files into memory"),
            ("_get_all_ckpt_names", "other ranks than there are may have saved"),
        )
    ),
    *(
        Seam(
            f"aio in {module}",
            f"{_SWAP}.{module}",
            "AsyncIOBuilder",
            "gives DeepSpeed's own swapper a handle over our store",
            _replace_builder,
        )
        for module in (
            "partitioned_param_swapper",
            "partitioned_optimizer_swapper",
            "pipelined_optimizer_swapper",
        )
    ),
)

#: Definitions that our subclasses override or whose behaviour they rely on.
WATCHED: tuple[tuple[str, str], ...] = (
    *(
        (f"{_ZERO}.stage3", f"DeepSpeedZeroOptimizer_Stage3.{method}")
        for method in (
            "__init__",
            "_configure_offloading",
            "_configure_tensor_swapping",
            "_create_param_groups_fp16_flat_cpu_memory",
            "_setup_for_real_optimizer",
            "_create_fp32_partitions",
            "_swap_in_sub_group_to_flat_buffer",
            "initialize_optimizer_states",
            "partition_grads",
            "_finalize_offload_gradient_accumulation",
            "_constant_buffered_norm2",
            "complete_grad_norm_calculation_for_cpu_offload",
            "_partitioned_params_swap_out",
            "has_overflow",
            "step",
            "_prepare_sub_group",
            "unscale_and_clip_grads",
            "_optimizer_step",
            "_reassign_or_swap_out_partitioned_parameters",
            "_release_sub_group",
            "_partition_all_parameters",
            "_post_step",
            "reset_swap_buffers",
            "_get_fp32_grad_state_partition",
            "_get_fp32_opt_state_partition",
            "_optimizer_states_and_gradient_swap_out",
            "_writeback_swap_state",
            "set_local_grad_for_param",
            "set_local_hp_param",
            "update_fp32_grad_for_param_vectorized",
            "_restore_from_bit16_weights",
            "_rigid_state_dict",
            "_rigid_load_state_dict",
            "_set_fp32_optimizer_param_groups",
            "_clear_fp32_optimizer_param_groups",
            "destroy",
        )
    ),
    *(
        ("deepspeed.runtime.engine", f"DeepSpeedEngine.{method}")
        for method in (
            "_load_checkpoint",
            "_save_zero_checkpoint",
            "_get_ckpt_name",
            "_get_zero_ckpt_name",
            "_get_rank_zero_ckpt_name",
            "_get_zero_param_shapes",
        )
    ),
    (f"{_ZERO}.partition_parameters", "NoGatherHandle"),
    (f"{_ZERO}.partition_parameters", "NoGatherCoalescedHandle"),
    (f"{_ZERO}.partition_parameters", "Init._ensure_availability_of_partitioned_params"),
    (f"{_ZERO}.partition_parameters", "Init._all_gather"),
    (f"{_SWAP}.optimizer_utils", "OptimizerSwapper"),
    (f"{_SWAP}.optimizer_utils", "OptimizerStateSwapInfo"),
    (f"{_SWAP}.partitioned_optimizer_swapper", "PartitionedOptimizerSwapper"),
    (f"{_SWAP}.pipelined_optimizer_swapper", "PipelinedOptimizerSwapper"),
    ("deepspeed.ops.adam.cpu_adam", "DeepSpeedCPUAdam.step"),
    ("deepspeed.ops.lion.cpu_lion", "DeepSpeedCPULion.step"),
    ("deepspeed.ops.adagrad.cpu_adagrad", "DeepSpeedCPUAdagrad.step"),
)

#: Stands for what upstream does not have.
ABSENT: Any = object()
#: What stood at each seam before it was armed; empty while disarmed.
_originals: dict[str, Any] = {}


# -- watching for a block ------------------------------------------------------------------------


def observe(config_module: types.ModuleType) -> None:
    """Wraps DeepSpeedConfig's constructor so that a block is noticed. Idempotent.

    Args:
        config_module: `deepspeed.runtime.config`.
    """
    config_class = config_module.DeepSpeedConfig
    original = config_class.__init__
    if is_disabled() or hasattr(original, "__memascend__"):
        return

    @functools.wraps(original)
    def construct(self: Any, *arguments: Any, **keywords: Any) -> None:
        original(self, *arguments, **keywords)
        _notice(self._param_dict)

    construct.__memascend__ = True  # type: ignore[attr-defined]
    config_class.__init__ = construct


def _notice(ds_config: Mapping[str, Any]) -> None:
    if find_block(ds_config) is None or active_config(ds_config) is None:
        return
    from memascend.deepspeed.attach.attach import check_config
    from memascend.deepspeed.seams import transformers as transformers_seams

    check_config(ds_config)
    arm()
    transformers_seams.arm()


# -- arming --------------------------------------------------------------------------------------


def arm() -> None:
    """Installs every seam, or none. Idempotent.

    Raises:
        UnsupportedDeepSpeedError: A definition differs from the ones the seams were written for.
    """
    if _originals:
        return
    check_fingerprints()
    # Subclasses the optimizer by name; imported now, it keeps the stock one as its base.
    importlib.import_module("deepspeed.runtime.superoffload.superoffload_stage3")
    replacements = []
    for seam in SEAMS:
        original = find(seam)
        replacements.append((seam, original, seam.replace(original)))
    for seam, original, replacement in replacements:
        _originals[seam.name] = original
        _assign(seam, replacement)


def disarm() -> None:
    """Restores every upstream definition."""
    from memascend.deepspeed.seams import transformers as transformers_seams

    transformers_seams.disarm()
    for seam in SEAMS:
        if seam.name in _originals:
            _assign(seam, _originals.pop(seam.name))


def status() -> list[SeamStatus]:
    """Says of each seam whether it is installed."""
    return [
        SeamStatus(s.name, f"{s.module}.{s.attribute}", s.name in _originals, s.reason)
        for s in SEAMS
    ]


def _assign(seam: Seam, value: Any) -> None:
    owner, name = _place(seam)
    if value is ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def _place(seam: Seam) -> tuple[Any, str]:
    owner_path, _, name = seam.attribute.rpartition(".")
    module = importlib.import_module(seam.module)
    return (resolve(seam.module, owner_path) if owner_path else module), name


def find(seam: Seam) -> Any:
    """What stands at a seam, or ABSENT where upstream has nothing of the name."""
    owner, name = _place(seam)
    return getattr(owner, name, ABSENT)


def relied_on() -> list[tuple[str, str]]:
    """Module and name of every definition whose code must be known.

    Of the optimizer class the methods that matter are in WATCHED one by one, and of AsyncIOBuilder
    only the name is used.
    """
    by_name_only = (
        "AsyncIOBuilder",
        "DeepSpeedZeroOptimizer_Stage3",
        "DeepSpeedEngine.memascend",
    )
    seams = [(seam.module, seam.attribute) for seam in SEAMS if seam.attribute not in by_name_only]
    return [*seams, *WATCHED]


def check_fingerprints() -> None:
    """Compares the installed DeepSpeed with the definitions the seams were written for.

    Raises:
        UnsupportedDeepSpeedError: Names each definition that differs and the versions that work.
    """
    version = importlib.import_module("deepspeed").__version__
    differing = []
    for module, attribute in relied_on():
        name = f"{module}.{attribute}"
        try:
            found = fingerprint(module, attribute)
        except (ImportError, AttributeError):
            found = "missing"
        if found not in fingerprints.KNOWN.get(name, ()):
            differing.append(f"{name} ({found})")
    forget_sources()
    if differing:
        raise UnsupportedDeepSpeedError(
            f"DeepSpeed {version} differs from the releases memascend was written for in: "
            f"{', '.join(differing)}. Likely cause: a newer or patched DeepSpeed. Known to work: "
            f"{', '.join(fingerprints.VERSIONS)}. Install one of them, or turn memascend off with "
            'MEMASCEND_DISABLE=1 or "memascend": {"enabled": false}'
        )
    if version not in fingerprints.VERSIONS:
        log.warning(
            "DeepSpeed %s was not tested with memascend, but what it relies on is the same as in "
            "%s",
            version,
            fingerprints.VERSIONS[-1],
        )
