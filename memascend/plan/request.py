"""The input of a plan: ranks, precisions, optimizer and devices, read from a DeepSpeed JSON.

Neither torch nor DeepSpeed. A key that is missing in the JSON, or left to the trainer ("auto"),
gets the default of DeepSpeed or of the trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memascend.base.sizes import SCALE_NUMEL
from memascend.config.block import MemAscendConfig, find_block, parse_block
from memascend.config.deepspeed import (
    DEVICES,
    DeepSpeedSettings,
    Optimizer,
    ZeroOptimization,
    parse_deepspeed,
)
from memascend.errors import ConfigError
from memascend.plan.optimizer_dtypes import (
    BF16,
    BF16_8,
    FP16,
    FP32,
    INT8,
    INT8_BF16,
    master_dtype,
    narrow_key,
    state_dtype,
    why_not_cpu_adam,
)
from memascend.plan.optimizers import is_muon, kind_of, state_count_of
from memascend.plan.window import WindowBytes

#: Bytes of an element, by the names of dtypes. Only a live model is in fp64.
ITEMSIZES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
#: Bytes of the scale of a moment in codes (`kernels.codes`).
SCALE_BYTES = 4
#: Bytes of both of Adam's moments in codes, without scales, and number of those with scales.
_CODED = {INT8: (1 + 1, 2), INT8_BF16: (1 + 2, 1)}
#: Why an optimizer is stepped in whole sub-groups, in DeepSpeed's own buffers.
NEEDS_WHOLE_GRADIENTS = "Muon needs whole gradients"
KEEPS_MOMENTUM = (
    "zero_optimization.save_muon_momentum_buffer_in_memory keeps Muon's momentum in host memory, "
    "which grows with the model"
)
HAS_OTHER_ADAM = "Muon's other parameters are stepped by another optimizer than DeepSpeedCPUAdam"
LEAVES_A_PART = "offload_optimizer.ratio leaves a part of it on the device"
SCALES_IN_EVERY_CALL = "torch_autocast updates its loss scale with every call of the optimizer"
_ZERO = ZeroOptimization()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """All inputs of the plan except the model.

    Dtypes have the names of ITEMSIZES; `state_dtype` may be a form with codes, too.
    """

    world: int = 1  # ranks that share the model
    gradient_accumulation_steps: int = 1  # micro-steps of one optimizer step
    precision: str = "bf16"  # dtype of parameters
    arriving_dtype: str | None = None  # dtype of a gradient as it is reduced; None: of parameters
    accumulation_dtype: str | None = None  # dtype of an accumulated gradient; None: of parameters
    sums_slices: bool = False  # whether slices are added up, in that dtype, behind the reduction
    master_dtype: str = FP32  # dtype of master weights
    state_dtype: str = FP32  # dtype of each state
    #: Whether a master weight is stored as what its bf16 parameter lacks, if there is one on the
    #: drive. Only optimizers that are stepped in one pass can.
    wants_split_master: bool = True
    low_itemsize: int = 2  # bytes of that
    optimizer: str = Optimizer().type  # its name in the DeepSpeed JSON, or the name of its class
    state_count: int | None = None  # tensors of state per parameter; None: from the table, by name
    #: Whether a sub-group may be stepped in tiles; None: from the table, by name.
    is_elementwise: bool | None = None
    sub_group_size: int = _ZERO.sub_group_size  # DeepSpeed's unit of the step, elements of a rank
    #: Whether parameters with and without weight decay form two groups, as in Hugging Face's
    #: Trainer; a sub-group never spans two groups.
    has_decay_groups: bool = True
    parameters_device: str = "nvme"  # "nvme", "cpu" or "none" (the accelerator)
    optimizer_device: str = "nvme"  # the same for master weights, states and gradients
    #: DeepSpeed keeps a gathered parameter on the device if it is used again within this many
    #: elements (stage3_max_reuse_distance).
    reuse_numel: int = _ZERO.stage3_max_reuse_distance
    tile_bytes: int | None = None  # bytes of fp32 weights of one tile, if the user fixed them
    prefetch_bytes: int | None = None  # bytes of parameters to read ahead, if the user fixed them
    gradient_room_bytes: int | None = (
        None  # device bytes of waiting gradients, if the user fixed them
    )
    max_in_cpu: int = 0  # trainable elements that stay in host memory because the JSON asks for it
    #: Elements of one rank's part of each sub-group, if known exactly; None: from the shapes.
    sub_group_numels: tuple[int, ...] | None = None
    verify: str = "off"  # "off", "reads" or "full": whether there are checksums of data on drives
    volume_count: int = 1  # drives that the tensors are striped over
    drive_count: int = 1  # drives for each rank of a machine, all of whose ranks use its drives
    during_backward: bool = False  # whether the step begins during backward, writing second values
    #: Whether that is a guess, for which gradients go to the drive, too. Traffic and time are those
    #: of right guesses.
    guesses: bool = False
    #: Whether a run finds out by itself whether steps during backward pay. Traffic, time and drive
    #: bytes are those of steps after backward; host memory has what either needs.
    tries_during_backward: bool = False
    #: Whether Muon's updates are applied as they are made, where all values are on the drive.
    applies_updates: bool = False
    overlaps: bool = True  # whether the step overlaps the next forward pass, in part or as a whole
    has_activations: bool = False  # whether saved activations go to the drive

    def __post_init__(self) -> None:
        """Raise ConfigError for values that are out of range."""
        for name in ("world", "gradient_accumulation_steps", "volume_count", "drive_count"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in (
            "sub_group_size",
            "state_count",
            "tile_bytes",
            "prefetch_bytes",
            "gradient_room_bytes",
        ):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"{name} cannot be negative, got {getattr(self, name)}")
        dtypes = ("arriving", "accumulation", "master", "state")
        for name in ("precision", *(f"{kind}_dtype" for kind in dtypes)):
            allowed = [*ITEMSIZES, *(_CODED if name == "state_dtype" else ())]
            if (getattr(self, name) or self.precision) not in allowed:
                raise ConfigError(
                    f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}"
                )
        for name in ("parameters_device", "optimizer_device"):
            if getattr(self, name) not in DEVICES:
                raise ConfigError(
                    f"{name} must be one of {', '.join(DEVICES)}, got {getattr(self, name)!r}"
                )

    @property
    def param_itemsize(self) -> int:
        """Bytes of a parameter."""
        return ITEMSIZES[self.precision]

    @property
    def gradient_dtype(self) -> str:
        """The dtype of an accumulated gradient."""
        return self.accumulation_dtype or self.precision

    @property
    def gradient_itemsize(self) -> int:
        """Bytes of an accumulated gradient."""
        return ITEMSIZES[self.gradient_dtype]

    @property
    def master_itemsize(self) -> int:
        """Bytes of a master weight."""
        return ITEMSIZES[self.master_dtype]

    @property
    def splits_master(self) -> bool:
        """Whether a master weight is stored as what its bf16 parameter lacks."""
        is_bf16 = self.precision == BF16 and self.master_dtype == FP32
        devices = {self.parameters_device, self.optimizer_device}
        # A script may change parameters in host memory unseen.
        is_on_drive = devices == {"nvme"} and not self.max_in_cpu
        return self.wants_split_master and is_bf16 and is_on_drive

    @property
    def stored_master_itemsize(self) -> int:
        """Bytes of a master weight on the drive, without those of a parameter."""
        return self.low_itemsize if self.splits_master else self.master_itemsize

    @property
    def flag_itemsize(self) -> float:
        """Bytes of a flag of Muon's matrices, whose master weights are in halves; exact."""
        return 1 / 8 if self.splits_master and self.state_dtype != INT8 else 0

    @property
    def window(self) -> WindowBytes:
        """Bytes that the micro-steps of one optimizer step store and move."""
        return WindowBytes(
            steps=self.gradient_accumulation_steps,
            arriving_itemsize=(
                self.gradient_itemsize
                if self.sums_slices
                else ITEMSIZES[self.arriving_dtype or self.precision]
            ),
            sum_itemsize=self.gradient_itemsize,
        )

    @property
    def may_begin_early(self) -> bool:
        """Whether steps may begin during backward, so that there may be second values."""
        return self.during_backward or self.tries_during_backward

    @property
    def second_values_bytes(self) -> float:
        """Drive bytes of second values for each trainable parameter."""
        return self.param_itemsize + self.stored_master_itemsize + self.states_bytes

    @property
    def states(self) -> int:
        """Tensors of state per parameter."""
        return state_count_of(self.optimizer) if self.state_count is None else self.state_count

    @property
    def states_bytes(self) -> float:
        """Bytes of all states for each parameter, those of scales included; exact."""
        if self.state_dtype in _CODED:
            codes_bytes, scales = _CODED[self.state_dtype]
            return codes_bytes + scales * SCALE_BYTES / SCALE_NUMEL
        return self.states * ITEMSIZES[self.state_dtype]

    def states_keys(self, numel: int) -> list[int]:
        """Return the bytes of each key of the states of so many elements."""
        if self.state_dtype not in _CODED:
            return [numel * ITEMSIZES[self.state_dtype]] * self.states
        codes_bytes, scales = _CODED[self.state_dtype]
        scales_bytes = -(-numel // SCALE_NUMEL) * SCALE_BYTES * scales
        return [numel, numel * (codes_bytes - 1), scales_bytes]

    @property
    def is_muon(self) -> bool:
        """Whether the optimizer is DeepSpeed's Muon."""
        return is_muon(self.optimizer)

    @property
    def momentum_itemsize(self) -> float:
        """Bytes of an element of Muon's momentum, with its part of a scale; exact."""
        if self.state_dtype in _CODED:
            return 1 + SCALE_BYTES / SCALE_NUMEL
        return min(ITEMSIZES[self.arriving_dtype or self.precision], self.gradient_itemsize)

    @property
    def is_tiled(self) -> bool:
        """Whether sub-groups are stepped in tiles; else each is stepped whole."""
        known = kind_of(self.optimizer).is_elementwise
        return known if self.is_elementwise is None else self.is_elementwise

    @property
    def has_known_start(self) -> bool:
        """Whether memascend creates the states, in the tiles; else the optimizer allocates them."""
        return self.is_tiled and bool(kind_of(self.optimizer).start)

    def passes_bytes(self, nbytes: int, numel: int) -> int:
        """Return the bytes that forward and backward read, with `nbytes` of a rank on the drive.

        A layer that backward recomputes is still in its slots when its gradient is computed.
        Parameters that forward used last stay on the device if backward uses them soon.
        """
        kept_numel = min(numel, self.reuse_numel // 2)
        return 2 * nbytes - nbytes * kept_numel // max(1, numel)

    @classmethod
    def from_deepspeed(
        cls,
        ds_config: Mapping[str, Any] | DeepSpeedSettings,
        *,
        block: MemAscendConfig | None = None,
        world: int = 1,
        local_world: int = 1,
        has_decay_groups: bool = True,
    ) -> PlanRequest:
        """Build a request from a DeepSpeed JSON, or its settings, and its `memascend` block.

        The JSON does not state `world`, `local_world` (ranks on one machine, which share its
        drives) or `has_decay_groups`.

        Raises:
            ConfigError: Not ZeRO stage 3, or an invalid value.
        """
        if block is None:
            if isinstance(ds_config, DeepSpeedSettings):
                raise TypeError("parsed settings hold no block: give it as `block`")
            block = parse_block(find_block(ds_config) or {})
        settings = (
            ds_config if isinstance(ds_config, DeepSpeedSettings) else parse_deepspeed(ds_config)
        )
        zero = settings.zero_optimization
        if zero.stage != 3:
            raise ConfigError(
                f"zero_optimization.stage is {zero.shown_stage}: offload to a drive needs stage 3"
            )
        optimizer, steps = settings.optimizer, block.streaming.optimizer
        volume_count = len(block.volumes) if block.volumes else 1
        may_be_early = not why_not_during_backward(block, settings, world=world)
        return cls(
            world=world,
            gradient_accumulation_steps=settings.accumulation_steps(world),
            precision=settings.precision,
            arriving_dtype=settings.communication_data_type or settings.precision,
            accumulation_dtype=settings.data_types.grad_accum_dtype or settings.precision,
            sums_slices=block.sums_slices,
            optimizer=optimizer.type,
            state_count=state_count_of(optimizer.type, optimizer.params),
            is_elementwise=False if is_muon(optimizer.type) and why_whole_steps(settings) else None,
            sub_group_size=zero.sub_group_size,
            has_decay_groups=has_decay_groups,
            parameters_device=zero.offload_param.device,
            max_in_cpu=_stated_max_in_cpu(block, zero),
            optimizer_device=zero.offload_optimizer.device,
            reuse_numel=zero.stage3_max_reuse_distance,
            master_dtype=master_dtype(settings),
            state_dtype=state_dtype(block, settings),
            wants_split_master=_wants_split_master(block, settings),
            low_itemsize=1 if steps.master_dtype == BF16_8 else 2,
            tile_bytes=steps.tile_bytes,
            prefetch_bytes=block.buffer_pool.prefetch_bytes,
            gradient_room_bytes=block.streaming.gradients.device_bytes,
            verify=block.verify,
            volume_count=volume_count,
            drive_count=-(-volume_count // local_world),
            during_backward=steps.during_backward is True and may_be_early,
            tries_during_backward=steps.during_backward == "auto" and may_be_early,
            guesses=_may_clip(settings),
            applies_updates=_applies_updates(block, settings),
            overlaps=steps.overlap and _steps_in_one_pass(block, settings),
            has_activations=block.activations.enabled,
        )


def _stated_max_in_cpu(block: MemAscendConfig, zero: ZeroOptimization) -> int:
    """Return `max_in_cpu` in elements if the JSON states it, else 0.

    Under a limit the plan decides, and DeepSpeed's own default does not count.
    """
    param = zero.offload_param
    counts = param.device == "nvme" and block.host_memory_limit is None
    return param.max_in_cpu if counts and "max_in_cpu" in param.stated else 0


def check_limit_can_be_kept(block: MemAscendConfig, settings: DeepSpeedSettings) -> None:
    """Raise ConfigError for a limit beside settings whose buffers grow with the model."""
    if block.host_memory_limit is None:
        return
    refusal = f"memascend.host_memory_limit={block.host_memory_limit!r} cannot be kept: "
    off = sections_off(block)
    if set(off) - {"overflow_check"}:
        raise ConfigError(
            f"{refusal}{', '.join(off)} is off, so that DeepSpeed's own buffers are used, which "
            "grow with the model. Turn it on, or leave the limit out"
        )
    for name in ("offload_param", "offload_optimizer"):
        if getattr(settings.zero_optimization, name).device == "cpu":
            raise ConfigError(
                f'{refusal}zero_optimization.{name}.device is "cpu", which holds it all in host '
                'memory. Set it to "nvme", or leave the limit out'
            )
    if reason := why_whole_steps(settings):
        raise ConfigError(
            f"{refusal}streaming.optimizer cannot serve, since {reason}. Change that, or leave the "
            "limit out"
        )


def sections_off(block: MemAscendConfig) -> list[str]:
    """Return the names of the block's sections that are turned off."""
    every = MemAscendConfig().sections_enabled
    return [name for name in every if name not in block.sections_enabled]


def why_whole_steps(settings: DeepSpeedSettings) -> str:
    """Return the reason in the JSON to step sub-groups whole; empty if there is none."""
    offload = settings.zero_optimization.offload_optimizer
    if is_muon(settings.optimizer.type):
        if settings.zero_optimization.save_muon_momentum_buffer_in_memory:
            return KEEPS_MOMENTUM
        if settings.adam.torch_adam:
            return HAS_OTHER_ADAM
    if offload.device == "nvme" and offload.ratio != 1.0:
        return LEAVES_A_PART
    if settings.torch_autocast.enabled:
        return SCALES_IN_EVERY_CALL
    return ""


def _applies_updates(block: MemAscendConfig, settings: DeepSpeedSettings) -> bool:
    """Return whether Muon's updates are applied as they are made: nothing scales them later."""
    zero = settings.zero_optimization
    return (
        is_muon(settings.optimizer.type)
        and not _may_clip(settings)
        and settings.precision != FP16
        and block.streaming.optimizer.fused
        and block.streaming.optimizer.state_dtype not in _CODED
        and {zero.offload_param.device, zero.offload_optimizer.device} == {"nvme"}
        and not _stated_max_in_cpu(block, zero)
    )


def why_muon_is_after_backward(
    *, world: int, may_clip: bool, state_dtype: str, is_demanded: bool
) -> str:
    """Return why Muon's steps do not begin during backward; empty if there is no reason.

    Args:
        world: Ranks that share the model.
        may_clip: Whether there is a limit for the norm.
        state_dtype: The block's form of states.
        is_demanded: Whether `during_backward` is true.
    """
    if not is_demanded:
        return "Muon's updates are made when all gradients are there, unless it is true"
    if may_clip:
        return "with gradient_clipping Muon's updates are made when all gradients are there"
    if world > 1:
        return "several ranks make Muon's updates together, when all gradients are there"
    if state_dtype in _CODED:
        return f'with state_dtype "{state_dtype}" Muon\'s updates are made after backward'
    return ""


def _may_clip(settings: DeepSpeedSettings) -> bool:
    return bool(settings.gradient_clipping) or "gradient_clipping" in settings.left_to_trainer


def why_not_during_backward(
    block: MemAscendConfig, settings: DeepSpeedSettings, *, world: int = 1
) -> str:
    """Return why `during_backward` is not false but has no effect, as far as the JSON shows it."""
    if not block.streaming.optimizer.during_backward:
        return ""
    reason = why_muon_is_after_backward(
        world=world,
        may_clip=_may_clip(settings),
        state_dtype=block.streaming.optimizer.state_dtype,
        is_demanded=block.streaming.optimizer.during_backward is True,
    )
    if is_muon(settings.optimizer.type) and reason:
        return reason
    if not _steps_in_one_pass(block, settings):
        return (
            "it needs parameters and optimizer on the drive, all streams on, and DeepSpeedCPUAdam "
            "stepped in one pass"
        )
    return ""


def _wants_split_master(block: MemAscendConfig, settings: DeepSpeedSettings) -> bool:
    """Return whether master weights are stored beside parameters, if these are bf16 on a drive.

    Without the stream small parameters stay in memory, one in nearly every sub-group.
    """
    is_wanted = block.streaming.optimizer.split_master and block.streaming.parameters.enabled
    return is_wanted and _steps_in_one_pass(block, settings)


def _steps_in_one_pass(block: MemAscendConfig, settings: DeepSpeedSettings) -> bool:
    """Return whether parameters and optimizer are on a drive, stepped in the fused pass."""
    zero = settings.zero_optimization
    places = {zero.offload_param.device, zero.offload_optimizer.device}
    needed = {"buffer_pool", "direct_nvme", "streaming.gradients", "streaming.optimizer"}
    return (
        block.streaming.optimizer.fused
        and not needed & set(sections_off(block))
        and places == {"nvme"}
        and not narrow_key(settings)
        and why_not_cpu_adam(settings) == ("", "")
        and not why_whole_steps(settings)
    )
