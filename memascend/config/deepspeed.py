"""The DeepSpeed JSON, parsed once: the settings that memascend and its plan depend on.

Does not import DeepSpeed; names and defaults are DeepSpeed's. A dict from Python may hold
DeepSpeed's enums and configuration objects, torch's dtypes and paths instead of text, and text
instead of a number. A key that is missing, or left to the trainer ("auto"), has its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any, Literal, get_args

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from memascend.config.messages import parse
from memascend.config.section import PathText

#: Where a tensor may be offloaded to.
Device = Literal["none", "cpu", "nvme"]
DEVICES = get_args(Device)
_PRECISIONS = {
    **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
    **dict.fromkeys(("fp16", "float16", "half"), "fp16"),
    **dict.fromkeys(("fp32", "float32", "float"), "fp32"),
}


def _read_count(value: object) -> object:
    """Convert text such as "1e9" to a number; refuse true and false, which pydantic would take."""
    if isinstance(value, bool):
        raise ValueError("it is not a number")
    if isinstance(value, str) and not value.isdigit():
        return float(value)
    return value


def _read_precision(value: object) -> object:
    """Return the short name of a dtype, given a torch dtype or any of its names."""
    return _PRECISIONS.get(str(value).lower().removeprefix("torch."), value)


Count = Annotated[int, BeforeValidator(_read_count), Field(ge=0)]
Precision = Annotated[Literal["bf16", "fp16", "fp32"], BeforeValidator(_read_precision)]


class _Part(BaseModel):
    """An object of the JSON; unknown keys are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    #: Keys that the trainer fills in ("auto"); `stated` has the others.
    left_to_trainer: frozenset[str] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _read(cls, content: Any) -> Any:
        if not isinstance(content, cls) and hasattr(content, "model_dump"):  # DeepSpeed's own
            content = content.model_dump(exclude_unset=True, by_alias=True)
        if not isinstance(content, Mapping):
            return content
        values = {
            str(key): value.value if isinstance(value, Enum) else value
            for key, value in content.items()
            if value is not None
        }
        texts = {key: value for key, value in values.items() if isinstance(value, str)}
        auto = frozenset(key for key, text in texts.items() if text == "auto")
        return {key: values[key] for key in values.keys() - auto} | {"left_to_trainer": auto}

    @property
    def stated(self) -> set[str]:
        """The keys that are written out with a value."""
        return self.model_fields_set - {"left_to_trainer"}


def _also(name: str, default: int) -> Any:
    """Return a field that DeepSpeed's own objects and dicts may have without "stage3_"."""
    choices = AliasChoices(f"stage3_{name}", name)
    return Field(default, validation_alias=choices)


class OffloadParam(_Part):
    """`zero_optimization.offload_param`."""

    device: Device = "none"
    nvme_path: PathText | None = None
    pin_memory: bool = True
    buffer_count: Count = 5
    buffer_size: Count = 10**8
    max_in_cpu: Count = 10**9


class OffloadOptimizer(_Part):
    """`zero_optimization.offload_optimizer`."""

    device: Device = "none"
    nvme_path: PathText | None = None
    pin_memory: bool = True
    buffer_count: Count = 4
    pipeline_read: bool = False
    pipeline_write: bool = False
    fast_init: bool = False
    ratio: float = 1.0
    super_offload: bool = False


class ZeroOptimization(_Part):
    """`zero_optimization`: sharding of the states among ranks, and their offload."""

    stage: Count = 0
    sub_group_size: Count = 10**9
    stage3_max_reuse_distance: Count = _also("max_reuse_distance", 10**9)
    stage3_max_live_parameters: Count = _also("max_live_parameters", 10**9)
    stage3_prefetch_bucket_size: Count = _also("prefetch_bucket_size", 5 * 10**7)
    reduce_bucket_size: Count = 5 * 10**8
    contiguous_gradients: bool = True
    zenflow: Any = None
    save_muon_momentum_buffer_in_memory: bool = False
    stage3_gather_16bit_weights_on_model_save: bool = False

    @property
    def shown_stage(self) -> str:
        """The stage for a message."""
        return '"auto"' if "stage" in self.left_to_trainer else str(self.stage)

    offload_param: OffloadParam = OffloadParam()
    offload_optimizer: OffloadOptimizer = OffloadOptimizer()


class Aio(_Part):
    """`aio`: DeepSpeed's own engine for drives."""

    block_size: Count = 1 << 20
    queue_depth: Count = 8
    single_submit: bool = False
    overlap_events: bool = True
    intra_op_parallelism: Count = 1
    use_gds: bool = False


class HalfPrecision(_Part):
    """`bf16`, `bfloat16` or `fp16`."""

    enabled: bool = False
    bf16_master_weights_and_grads: bool = False
    fp16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False


class ActivationCheckpointing(_Part):
    """`activation_checkpointing`."""

    cpu_checkpointing: bool = False


class TorchAutocast(_Part):
    """`torch_autocast`."""

    enabled: bool = False


class Compile(_Part):
    """`compile`."""

    deepcompile: bool = False


class CheckpointWriter(_Part):
    """`checkpoint.writer`."""

    decoupled: bool = False


class Checkpoint(_Part):
    """`checkpoint`."""

    writer: CheckpointWriter = CheckpointWriter()


class Optimizer(_Part):
    """`optimizer`; without a type, the one of Hugging Face's Trainer."""

    type: str = "AdamW"
    params: dict[str, Any] = {}


class AdamSwitches(_Part):
    """The switches in `optimizer.params` that select the kind of Adam and its states."""

    torch_adam: bool = False
    fp32_optimizer_states: bool = True


class DataTypes(_Part):
    """`data_types`."""

    grad_accum_dtype: Precision | None = None


class DeepSpeedSettings(_Part):
    """All of the JSON that memascend depends on."""

    zero_optimization: ZeroOptimization = ZeroOptimization()
    aio: Aio = Aio()
    bf16: HalfPrecision = HalfPrecision()
    bfloat16: HalfPrecision = HalfPrecision()
    fp16: HalfPrecision = HalfPrecision()
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing()
    torch_autocast: TorchAutocast = TorchAutocast()
    compile: Compile = Compile()
    checkpoint: Checkpoint = Checkpoint()
    optimizer: Optimizer = Optimizer()
    data_types: DataTypes = DataTypes()
    communication_data_type: Precision | None = None
    gradient_clipping: float = 1.0
    gradient_accumulation_steps: Count = 0
    train_batch_size: Count = 0
    train_micro_batch_size_per_gpu: Count = 0

    @property
    def adam(self) -> AdamSwitches:
        """The switches of Adam among the optimizer's parameters."""
        return parse(AdamSwitches, self.optimizer.params, root="optimizer.params")

    @property
    def halves(self) -> Mapping[str, HalfPrecision]:
        """The sections of 16-bit precisions by name, in order of precedence."""
        return {"bf16": self.bf16, "bfloat16": self.bfloat16, "fp16": self.fp16}

    @property
    def precision(self) -> str:
        """The enabled precision; else the first that is left to the trainer; else "fp32"."""
        on = [name for name, half in self.halves.items() if half.enabled]
        auto = [name for name, half in self.halves.items() if "enabled" in half.left_to_trainer]
        return next((_PRECISIONS[name] for name in (*on, *auto)), "fp32")

    def accumulation_steps(self, world: int) -> int:
        """Return the micro-steps of a step, from the batch sizes if they are not stated."""
        if self.gradient_accumulation_steps:
            return self.gradient_accumulation_steps
        batch, micro = self.train_batch_size, self.train_micro_batch_size_per_gpu
        return max(1, batch // (micro * world)) if batch and micro else 1

    def micro_batch(self, world: int) -> int:
        """Return the sequences of a micro-step, from the other sizes if not stated; 0: unknown."""
        if self.train_micro_batch_size_per_gpu or not self.train_batch_size:
            return self.train_micro_batch_size_per_gpu
        return self.train_batch_size // (max(1, self.gradient_accumulation_steps) * world)


def parse_deepspeed(ds_config: object) -> DeepSpeedSettings:
    """Return the settings of a DeepSpeed configuration; defaults if it is not a mapping."""
    return parse(DeepSpeedSettings, ds_config if isinstance(ds_config, Mapping) else {}, root="")
