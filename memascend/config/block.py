"""The `memascend` block of the DeepSpeed JSON: one frozen model per feature.

A key left out means automatic, so the string "auto" is never needed (accelerate refuses it inside
foreign blocks).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from memascend.base.json_text import parse_json, show_json
from memascend.config.environment import CONFIG_VARIABLE, block_text, is_disabled
from memascend.config.limit import parse_limit
from memascend.config.messages import parse
from memascend.config.section import Nbytes, PathText, Section
from memascend.config.volumes import Volumes
from memascend.errors import ConfigError

BLOCK_KEY = "memascend"
#: Slices of a batch, and sequences of a slice.
SLICE_COUNT_MAX = 1 << 20
#: Likeness of a key of the DeepSpeed JSON, from 0 to 1, from which it is meant to be the block's.
NEAR_MIN = 0.85


def _null_is_auto(value: object) -> object:
    return "auto" if value is None else value


class AllocatorConfig(Section):
    """The source of pinned host memory: exact-size blocks from huge-page arenas."""

    enabled: bool = Field(True, description="off: torch's pinned memory, as stock uses it")
    huge_pages: Literal["explicit", "transparent", "off"] | None = Field(
        None, description="left out: explicit where free, else transparent"
    )
    page_lock: bool | None = Field(
        None, description="left out: DeepSpeed's pin_memory, and only where memlock allows"
    )


class BufferPoolConfig(Section):
    """Staging buffers for parameters, in size classes of the model's own shapes."""

    enabled: bool = Field(True, description="off: DeepSpeed's uniform buffers")
    prefetch_bytes: Nbytes | None = Field(
        None,
        ge=0,
        le=1 << 60,
        description="parameters read ahead; left out: twice the largest tensor of a layer",
    )


class DirectNvmeConfig(Section):
    """The I/O path to the drives: extents of one file, O_DIRECT, io_uring."""

    enabled: bool = Field(True, description="off: DeepSpeed's libaio engine, a file per tensor")
    engine: Literal["uring", "libaio", "threads"] | None = Field(
        None, description="left out: io_uring where it works, else libaio or threads"
    )
    queue_depth: int = Field(64, ge=1, le=4096, description="requests in flight on each drive")
    chunk_bytes: Nbytes = Field(
        2 << 20, ge=64 << 10, le=64 << 20, multiple_of=64 << 10, description="bytes of one request"
    )
    eio_retries: int = Field(
        2, ge=0, le=100, description="tries after an I/O error (EIO); no other error is tried again"
    )


class OverflowCheckConfig(Section):
    """The fp16 overflow check: one pass, no temporary."""

    enabled: bool = Field(True, description="off: DeepSpeed's isinf and isnan passes")


class GradientStreamConfig(Section):
    """Gradients go from the device to the drive through fixed slots, without a flat host buffer."""

    enabled: bool = Field(True, description="off: DeepSpeed's flat gradient buffer")
    device_bytes: Nbytes | None = Field(
        None,
        ge=0,
        le=1 << 60,
        description="gradients that wait on the device for the drive during backward; left out: "
        "those of one layer, at most 512 MiB; 0: backward waits",
    )


class OptimizerStreamConfig(Section):
    """The optimizer step processes each sub-group in tiles, without whole-sub-group buffers."""

    enabled: bool = Field(True, description="off: DeepSpeed's whole-sub-group buffers")
    overlap: bool = Field(
        True, description="the step overlaps the next forward pass; off: it ends before that pass"
    )
    during_backward: bool | Annotated[Literal["auto"], BeforeValidator(_null_is_auto)] = Field(
        "auto",
        description="the step begins during backward, and takes drive space for a second copy of "
        "all values that it changes. auto (`null` where accelerate refuses the word): if the run's "
        "own times show that it pays, and the drive has room. true: always (Muon: only with one "
        "rank and no clipping); uses gradients up without clipping, guesses with it",
    )
    tile_bytes: Nbytes | None = Field(
        None,
        ge=64 << 10,
        le=1 << 30,
        description="fp32 weights of one tile; left out: from the plan",
    )
    fused: bool = Field(
        True,
        description="off: DeepSpeedCPUAdam steps a tile, with passes before and after; Muon's "
        "updates are written and read again, also without clipping",
    )
    split_master: bool = Field(
        True,
        description="store only the 16 bits of master weights that bf16 parameters lack; exact, "
        "2 bytes less written per parameter. off: in fp32, beside them",
    )
    state_dtype: Literal["fp32", "bf16", "int8", "int8/bf16"] = Field(
        "fp32",
        description="form of Adam's two moments on the drive (int8: of Muon's momentum, too); all "
        "but fp32 change losses. Traffic per parameter and step: bf16 8 bytes less; int8 (codes of "
        "8 bits) 12; int8/bf16 (the second moment in bf16) 10",
    )
    master_dtype: Literal["fp32", "bf16+8"] = Field(
        "fp32",
        description="form of master weights on the drive. bf16+8: 8 bits beside the bf16 "
        "parameter, 2 bytes less traffic per parameter and step; changes losses",
    )


class ParameterStreamConfig(Section):
    """Parameters larger than a slot travel in chunks; every shard is on the drive."""

    enabled: bool = Field(True, description="off: a slot for every size, small shards in RAM")


class StreamingConfig(Section):
    """The three streams that make host memory independent of the model's size."""

    gradients: GradientStreamConfig = GradientStreamConfig()
    optimizer: OptimizerStreamConfig = OptimizerStreamConfig()
    parameters: ParameterStreamConfig = ParameterStreamConfig()


class ActivationConfig(Section):
    """Saved activations go to the drive, and are read back before backward needs them."""

    enabled: bool = Field(False, description="off: activations stay on the device")
    device_bytes: Nbytes = Field(
        0,
        ge=0,
        le=1 << 60,
        description="saved activations that stay on the device, those needed first",
    )
    min_bytes: Nbytes = Field(
        1 << 20, ge=1, le=1 << 60, description="smaller tensors stay on the device"
    )


def slices_of(batch: int, sequences: int) -> int:
    """Return the number of slices of at most so many sequences that a batch has."""
    return max(1, -(-batch // sequences))


class MicroBatchConfig(Section):
    """One pass per step: a layer computes the batch in slices while its weights stay gathered."""

    count: Literal["auto"] | Annotated[int, Field(ge=1, le=SLICE_COUNT_MAX)] | None = Field(
        None,
        description="slices of a batch, each at least one sequence; without `sequences` left out "
        'or `"auto"` (accelerate refuses the word): the fewest that fit the device',
    )
    sequences: int | None = Field(
        None, ge=1, le=SLICE_COUNT_MAX, description="sequences of a slice, instead of `count`"
    )
    reduction: Literal["pass", "slice"] = Field(
        "pass",
        description="pass: ranks reduce gradients once; slice: after each slice, with the bits of "
        "as many micro-steps",
    )
    head: bool = Field(
        True, description="off: the head computes the whole batch; its logits can be read"
    )

    @model_validator(mode="after")
    def _check_one(self) -> MicroBatchConfig:
        if self.count is not None and self.sequences is not None:
            raise ValueError(
                f"{BLOCK_KEY}.micro_batches takes either count or sequences, got count="
                f"{show_json(self.count)} and sequences={self.sequences}. Leave one of them out"
            )
        return self

    @property
    def is_auto(self) -> bool:
        """Whether the number of slices is chosen at run time."""
        return self.sequences is None and self.count in (None, "auto")

    def slices_of(self, batch: int) -> int:
        """Return the stated number of slices of a batch of so many sequences."""
        if isinstance(self.count, int):
            return max(1, min(self.count, batch))
        assert self.sequences is not None, "the number is chosen at run time"
        return slices_of(batch, self.sequences)


class HeapConfig(Section):
    """With glibc, memory that torch and DeepSpeed have freed goes back to the system."""

    enabled: bool = Field(True, description="off: malloc keeps freed memory as usual")
    mapped_bytes_min: Nbytes = Field(
        256 << 10,
        ge=16 << 10,
        le=32 << 20,
        description="freed allocations of at least this size go back to the system",
    )


class WearConfig(Section):
    """Limits on the bytes that all ranks of a machine write to the drives."""

    endurance: Nbytes | None = Field(
        None,
        ge=1,
        le=1 << 60,
        description="bytes that the drives may still be written",
    )
    write_budget: Nbytes | None = Field(
        None, ge=1, le=1 << 60, description="bytes this run may write; left out: no limit"
    )
    over_budget: Literal["warn", "stop"] = Field(
        "warn", description="stop: once the next checkpoint is complete"
    )


class CheckpointConfig(Section):
    """Contents of a checkpoint beside stock's files."""

    portable: bool = Field(
        True,
        description="optimizer states in `*_optim_states.pt` too, for `ds_to_universal.py` and CPU "
        "offload; with Adam 8 more bytes per parameter",
    )


class MemAscendConfig(Section):
    """The whole block. `{}` turns everything on."""

    enabled: bool = Field(True, description="off: stock DeepSpeed, untouched")
    host_memory_limit: int | float | str | None = Field(
        None,
        description='per rank: bytes, "6GiB", or a fraction of total memory; left out: as the plan '
        "needs, at most half of free memory",
    )
    report: PathText | None = Field(
        None,
        description="file for the ledger as JSON, written by rank 0 at the end; other machines' "
        "first ranks write one beside it, such as `report.rank8.json`",
    )
    status: bool | Annotated[PathText, Field(min_length=1)] = Field(
        True,
        description="folder of the status for `memascend monitor`; true: `/tmp/memascend-UID`; "
        "false: none",
    )
    allocator: AllocatorConfig = AllocatorConfig()
    buffer_pool: BufferPoolConfig = BufferPoolConfig()
    direct_nvme: DirectNvmeConfig = DirectNvmeConfig()
    volumes: Volumes | None = Field(
        None, description="the drives that tensors are striped over; left out: `nvme_path`"
    )
    overflow_check: OverflowCheckConfig = OverflowCheckConfig()
    streaming: StreamingConfig = StreamingConfig()
    activations: ActivationConfig = ActivationConfig()
    micro_batches: MicroBatchConfig | None = Field(
        None, description="left out: a layer computes the whole batch at once"
    )
    heap: HeapConfig = HeapConfig()
    wear: WearConfig = WearConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    verify: Literal["off", "reads", "full"] = Field(
        "off",
        description="reads: compare checksums of all data read; full: also read back every write",
    )

    @field_validator("host_memory_limit", mode="before")
    @classmethod
    def _check_limit(cls, value: object) -> object:
        parse_limit(value, available=1)  # checks the value; the memory is not known here
        return value

    @model_validator(mode="after")
    def _check_direct_nvme(self) -> MemAscendConfig:
        needs = {
            "volumes": (self.volumes is not None, "knows one directory"),
            "verify": (self.verify != "off", "keeps no checksums"),
            "activations": (self.activations.enabled, "moves whole tensors only"),
        }
        for key, (is_set, reason) in needs.items():
            if is_set and not self.direct_nvme.enabled:
                raise ValueError(
                    f"{BLOCK_KEY}.{key} needs {BLOCK_KEY}.direct_nvme, which is off: DeepSpeed's "
                    f"own engine {reason}. Turn it on, or leave {key} out"
                )
        return self

    @model_validator(mode="after")
    def _check_fewer_bits(self) -> MemAscendConfig:
        optimizer = self.streaming.optimizer
        needed = {
            "state_dtype": ("enabled", "fused"),
            "master_dtype": ("enabled", "fused", "split_master"),
        }
        for dtype, keys in needed.items():
            for key in keys:
                if getattr(optimizer, dtype) != "fp32" and not getattr(optimizer, key):
                    name = f"{BLOCK_KEY}.streaming.optimizer"
                    raise ValueError(
                        f'{name}.{dtype}="{getattr(optimizer, dtype)}" needs {name}.{key}, which '
                        "is off: the one pass over a tile rounds the values. Turn it on, or leave "
                        f"{dtype} out"
                    )
        return self

    @property
    def sums_slices(self) -> bool:
        """Whether slices are added up behind the reduction, in the dtype of accumulation."""
        return self.micro_batches is not None and self.micro_batches.reduction == "slice"

    @property
    def sections_enabled(self) -> tuple[str, ...]:
        """The names of the sections that are on, in the order of the block."""
        names = ("allocator", "buffer_pool", "direct_nvme", "overflow_check")
        streams = ("gradients", "optimizer", "parameters")
        return (
            *(name for name in names if getattr(self, name).enabled),
            *(f"streaming.{name}" for name in streams if getattr(self.streaming, name).enabled),
            *(("activations",) if self.activations.enabled else ()),
        )


def find_block(ds_config: object) -> Mapping[str, Any] | None:
    """Return the raw block of a DeepSpeed config, or the one in MEMASCEND_CONFIG, or None.

    Raises:
        ConfigError: The block, or MEMASCEND_CONFIG, is not a JSON object; or the block is misspelt,
            or in a section of the config.
    """
    if is_disabled():
        return None
    block, name = None, f'"{BLOCK_KEY}"'
    if isinstance(ds_config, Mapping):
        block = ds_config.get(BLOCK_KEY)
        if block is None:
            _refuse_lost_block(ds_config)
    if block is None:
        text, name = block_text(), CONFIG_VARIABLE
        if not text:
            return None
        try:
            block = parse_json(text)
        except ValueError as error:
            raise ConfigError(
                f"{CONFIG_VARIABLE} is not JSON: {error}. Got {text[:200]!r}; write an object "
                f"such as {CONFIG_VARIABLE}='{{}}'"
            ) from error
    if not isinstance(block, Mapping):
        raise ConfigError(
            f"{name} must be a JSON object such as {{}}, got {type(block).__name__}: "
            f"{show_json(block)}"
        )
    return block


def _refuse_lost_block(ds_config: Mapping[str, Any]) -> None:
    """Raise ConfigError for a block that DeepSpeed would ignore.

    A key that begins with no letter is a comment.
    """
    for key, section in ds_config.items():
        name = str(key)
        is_near = difflib.get_close_matches(name.lower(), [BLOCK_KEY], cutoff=NEAR_MIN)
        if name != BLOCK_KEY and name[:1].isalpha() and is_near:
            raise ConfigError(
                f'{show_json(name)} is no key of a DeepSpeed JSON. Did you mean "{BLOCK_KEY}"? '
                f'"{BLOCK_KEY}": {{"enabled": false}} turns a block off'
            )
        if isinstance(section, Mapping) and BLOCK_KEY in section:
            raise ConfigError(
                f'"{BLOCK_KEY}" is in the section {show_json(name)}. It belongs at the top of the '
                "DeepSpeed JSON, beside that section"
            )


def parse_block(block: Mapping[str, Any]) -> MemAscendConfig:
    """Return the validated block.

    Raises:
        ConfigError: Names every wrong key with its value, the allowed values and the nearest key.
    """
    return parse(MemAscendConfig, block, root=BLOCK_KEY)


def active_config(ds_config: object) -> MemAscendConfig | None:
    """Return the validated block when there is one and it is enabled, else None."""
    block = find_block(ds_config)
    if block is None:
        return None
    config = parse_block(block)
    return config if config.enabled and config.sections_enabled else None
