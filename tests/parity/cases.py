"""What one parity case is, and the DeepSpeed JSON it stands for.

Plain values only: neither torch nor DeepSpeed is imported here, so that pytest can collect the
matrix without paying for either. A case says what is trained and how it is offloaded;
`deepspeed_json` says it again in DeepSpeed's words for one of three backends:

- `oracle`: DeepSpeed's CPU offload, the reference every other backend is compared with;
- `stock`: DeepSpeed's own NVMe offload;
- `memascend`: the JSON of `stock` and one more top-level block.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from tests.support.sections import SECTIONS

Backend = Literal["oracle", "stock", "memascend"]

#: No norm is as large: steps are those without clipping.
CLIPPING_NEVER = 1e12
WHOLE = tuple(name for name in SECTIONS if not name.startswith("streaming."))
# By name: a backend and what differs in its case.
SAVERS: dict[str, tuple[Backend, dict[str, Any]]] = {
    "same": ("memascend", {}),
    "whole": ("memascend", {"sections": WHOLE, "limit_bytes": 0}),
    "streamed": ("memascend", {"sections": SECTIONS}),
    "other tiles": ("memascend", {"tile_bytes": 300_000}),
    "limit": ("memascend", {"limit_bytes": 300 << 20}),
    "clipped": ("memascend", {"clipping": CLIPPING_NEVER}),
    "not clipped": ("memascend", {"clipping": 0.0}),
    "whole masters": ("memascend", {"split_master": False}),
    "halves": ("memascend", {"split_master": True}),
    "stock": ("stock", {"prefetch_numel": 0}),
    "cpu": ("oracle", {"params": "cpu", "optimizer": "cpu"}),
}
#: Activations of these models are small: several kibibytes at most.
SAVED_BYTES_MIN = 2 << 10
SUB_GROUP_SMALL_NUMEL = 1_500_000
ADAM = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
MUON = {"lr": 1e-2, "adam_lr": 1e-3, "momentum": 0.95, "weight_decay": 0.1}
# By name: DeepSpeed's type and its parameters.
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW": ("AdamW", ADAM),
    "TorchAdamW": ("AdamW", ADAM | {"torch_adam": True}),
    "Lion": ("Lion", {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}),
    "Adagrad": ("Adagrad", {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.1}),
    "Muon": ("Muon", MUON),
    "MuonPerHead": ("Muon", MUON | {"per_head_muon": True}),
}
#: Made by the script: see models.py.
CLIENTS = ("client", "schedule-free")
SUB_GROUP_LARGE_NUMEL = 1_000_000_000


@dataclass(frozen=True)
class Case:
    """One training (or inference) run. The defaults are the plain case that every other varies."""

    family: str = "llama"
    world: int = 1
    dtype: str = "bf16"
    accumulation: int = 1
    labelled: bool = False  # the model computes the loss, and takes labels
    by_slice: bool = False  # and ranks reduce each slice
    slices: int = 0  # so many micro-steps are one, whose layers compute them as slices; 0: none
    clipping: float = 0.0
    checkpointing: str = "off"  # off | reentrant | nonreentrant | offload | deepspeed
    saved_bytes: int | None = None  # with activations on the drive: of them, those on the device
    params: str = "nvme"  # nvme | cpu | none
    optimizer: str = "nvme"  # nvme | cpu | none | absent (inference)
    zero_init: bool = True
    pipeline: bool = False
    sub_group_numel: int = SUB_GROUP_SMALL_NUMEL
    persistence_numel: int = 10_000
    prefetch_numel: int = 3_000_000
    live_numel_max: int = 1_000_000_000
    reuse_numel_max: int = 0
    buffer_count: int = 24
    buffer_numel: int = 3_000_000
    resident_numel_max: int = 0  # DeepSpeed's max_in_cpu
    gradients_in_fp32: bool = False
    masters: str = ""  # in 16 bits: master weights | states (Adam's moments as well); "": in fp32
    optimizer_type: str = "AdamW"  # a key of OPTIMIZERS, or made by the script: CLIENTS
    scale_power: int = 18  # fp16: so large a first scale that the first steps overflow
    scale_window: int = 1000  # fp16: steps without overflow after which the scale doubles
    boundary: str = "counted"  # who says where a window ends: counted | stated | stepped
    accessors: str = "none"  # safe_get_* and safe_set_* around a step: none | read | change | set
    modify_weights: bool = False  # gather one tensor and change it in the middle of training
    gather_all: bool = False  # gather every tensor at once in the middle of training
    cast: tuple[str, ...] = ()  # modules of such names are cast to fp32 after zero.Init
    averages: bool = False  # lists of parameters of several models, as an average of weights has
    touched: bool = False  # the head's weight is used outside the head: see training.touch_head
    second_model: bool = False  # train another model on the same path in the middle of training
    limit_bytes: int = 0  # host_memory_limit; 0 leaves the key out
    overlap: bool = True  # of the reduction with the backward pass, on devices
    tells_masters: bool = False  # the facts have master weights, and not digests alone
    compiled: str = ""  # engine.compile() with this backend; "" leaves the model as it is
    scheduler: bool = False  # a learning rate that changes with every step
    cycle: bool = False  # a scheduler that changes Adam's betas as well
    walk: str = "behind"  # the step: behind | late (a walk, see walks.py) | off (over first)
    save_at: int = 0  # save a checkpoint after so many steps, and go on; 0: never
    resume_at: int = 0  # save and load into a new engine after so many steps; 0: never
    saver: str = "same"  # who trains until then: a key of SAVERS
    checkpoint_folder: str = ""  # where both are saved
    load_from: str = ""  # a folder: load the checkpoint in it first; first_step is its next step
    is_universal: bool = False  # that one is a universal checkpoint
    first_step: int = 0
    save_to: str = ""  # a folder: save a checkpoint there at the end
    is_portable: bool = True  # one that DeepSpeed's tools read
    pause_folder: str = ""  # stop in the middle until the test lets go: see training.wait_for_go
    steps: int = 3
    sections: tuple[str, ...] = SECTIONS
    #: The step begins then; with clipping that is a guess. "auto": where it pays, see training.py.
    during_backward: bool | str = False
    split_master: bool = True
    state_dtype: str = ""  # of Adam's moments and Muon's momentum, not exact; "": as DeepSpeed
    tile_bytes: int | None = 1 << 20  # several tiles to a sub-group, also in small models
    engine: str | None = None  # None leaves the key out, which means automatic
    volumes: tuple[str, ...] = ()  # weights of as many directories; () leaves the key out
    verify: str = ""  # "" leaves the key out
    #: Others say nearly the same: only in `make test-device`. No part of the training.
    repeats: bool = dataclasses.field(default=False, compare=False)

    def __post_init__(self) -> None:
        unknown = set(self.sections) - set(SECTIONS)
        if unknown:
            raise ValueError(f"sections {sorted(unknown)} do not exist; known: {SECTIONS}")

    @property
    def is_muon(self) -> bool:
        """Whether DeepSpeed's Muon steps the matrices."""
        return OPTIMIZERS.get(self.optimizer_type, ("",))[0] == "Muon"

    @property
    def name(self) -> str:
        """The fields that differ from the plain case, as pytest shows them."""
        words = [f"{self.family}-{self.dtype}-w{self.world}"]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if (
                field.compare
                and value != field.default
                and field.name not in ("family", "world", "dtype")
            ):
                text = "+".join(value) or "none" if isinstance(value, tuple) else str(value)
                words.append(f"{field.name}={text}")
        return ",".join(words)

    def oracle(self) -> Case:
        """The same training without anything that offloading is allowed to choose.

        Cases that differ only in how they offload share one oracle run, and none of those choices
        may show in the numbers. `sub_group_numel` stays: the norm is summed per sub-group, so it
        rounds differently with other sub-groups. So does `zero_init`: it makes a model's buffers,
        rotary frequencies for one, in 16 bit from the start, which rounds them differently.

        It is never interrupted, but where stale gradients are used: a checkpoint has none.
        """
        kept = {
            "family",
            "world",
            "dtype",
            "labelled",
            "clipping",
            "checkpointing",
            "zero_init",
            "sub_group_numel",
            "gradients_in_fp32",
            "masters",
            "optimizer_type",
            "scale_power",
            "scale_window",
            "boundary",
            "accessors",
            "modify_weights",
            "gather_all",
            "cast",
            "averages",
            "touched",
            "tells_masters",
            "compiled",
            "scheduler",
            "cycle",
            "load_from",
            "is_universal",
            "first_step",
            "save_to",
            "steps",
        }
        values = {name: getattr(self, name) for name in kept}
        values["accumulation"] = self.accumulation * max(1, self.slices)
        if self.resume_at and self.family == "alternating":
            values |= {"resume_at": self.resume_at, "saver": "cpu"}
        if self.checkpointing == "offload":  # asks for a device other than the CPU
            values |= {"checkpointing": "nonreentrant"}
        # Adam on a device rounds in another way; inference has none.
        optimizer = self.optimizer if self.optimizer in ("none", "absent") else "cpu"
        return Case(**values, params="cpu", optimizer=optimizer)

    def saver_case(self) -> tuple[Case, Backend]:
        """What trains until the checkpoint: who saves may offload in another way than who loads."""
        backend, changes = SAVERS[self.saver]
        return dataclasses.replace(self, **changes), backend

    def within_stock(self) -> Case:
        """The same numbers asked of stock in the only way it survives.

        With prefetching on, its swapper is handed a parameter it has already in hand as soon as
        buffers are plentiful ("already assigned swap buffer id"), and it starves when they are few.
        """
        return dataclasses.replace(
            self, prefetch_numel=0, reuse_numel_max=0, buffer_count=Case.buffer_count
        )


def memascend_block(case: Case, nvme_path: str) -> dict[str, Any]:
    block: dict[str, Any] = {"streaming": {}}
    for name in SECTIONS:
        parent, _, child = name.rpartition(".")
        (block[parent] if parent else block)[child] = {"enabled": name in case.sections}
    if case.engine is not None:
        block["direct_nvme"]["engine"] = case.engine
    if not case.is_portable:
        block["checkpoint"] = {"portable": False}
    if case.volumes:
        block["volumes"] = [
            {"path": f"{nvme_path}/volume{index}", "weight": float(weight)}
            for index, weight in enumerate(case.volumes)
        ]
    if case.verify:
        block["verify"] = case.verify
    if case.limit_bytes:
        block["host_memory_limit"] = case.limit_bytes
        block["streaming"]["optimizer"] = {}  # the plan's tiles, not the case's
    elif case.tile_bytes is not None:
        block["streaming"]["optimizer"]["tile_bytes"] = case.tile_bytes
    if case.saved_bytes is not None:
        block["activations"] = {
            "enabled": True,
            "device_bytes": case.saved_bytes,
            "min_bytes": SAVED_BYTES_MIN,
        }
    if case.slices:
        block["micro_batches"] = {"count": case.slices}
        if case.by_slice:
            block["micro_batches"]["reduction"] = "slice"
    if case.during_backward != "auto":  # the default
        block["streaming"]["optimizer"]["during_backward"] = case.during_backward
    if not case.split_master:
        block["streaming"]["optimizer"]["split_master"] = False
    if case.state_dtype:
        block["streaming"]["optimizer"]["state_dtype"] = case.state_dtype
    if case.walk == "off":
        block["streaming"]["optimizer"]["overlap"] = False
    return block


def deepspeed_json(case: Case, backend: Backend, nvme_path: str) -> dict[str, Any]:
    if backend == "oracle":
        case = case.oracle()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2 * max(1, case.slices),
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": case.clipping,
        "steps_per_print": 1_000_000,
        "zero_optimization": _zero_optimization(case, nvme_path),
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 8,
            "single_submit": False,
            "overlap_events": True,
        },
    }
    if case.optimizer != "absent":
        config |= _optimizer(case)
    if case.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    elif case.dtype == "fp16":
        # Skipped steps are part of the promise.
        config["fp16"] = {
            "enabled": True,
            "initial_scale_power": case.scale_power,
            "loss_scale_window": case.scale_window,
            "hysteresis": 1,
        }
    if case.masters:
        config[case.dtype][f"{case.dtype}_master_weights_and_grads"] = True
    if case.masters == "states":
        config[case.dtype]["bf16_optimizer_states"] = True
    if case.is_universal:
        config["checkpoint"] = {"load_universal": True}
    if case.scheduler:
        config["scheduler"] = {
            "type": "WarmupLR",
            "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 20, "warmup_type": "linear"},
        }
    if case.cycle:
        rates = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2, "cycle_first_step_size": 4}
        momentum = {"cycle_momentum": True, "cycle_min_mom": 0.8, "cycle_max_mom": 0.95}
        config["scheduler"] = {"type": "OneCycle", "params": rates | momentum}
    if case.boundary == "stepped":
        config["managed_gradient_accumulation"] = False
    if case.gradients_in_fp32:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if backend == "memascend":
        config["memascend"] = memascend_block(case, nvme_path)
        if case.checkpointing == "deepspeed":
            config["activation_checkpointing"] = {"cpu_checkpointing": True}
    return config


def _optimizer(case: Case) -> dict[str, Any]:
    if case.optimizer_type in CLIENTS:
        return {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
    name, parameters = OPTIMIZERS[case.optimizer_type]
    return {"optimizer": {"type": name, "params": parameters}}


def _zero_optimization(case: Case, nvme_path: str) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": 3,
        "contiguous_gradients": True,
        "overlap_comm": case.overlap,
        "reduce_bucket_size": 2_000_000,
        "sub_group_size": case.sub_group_numel,
        "stage3_param_persistence_threshold": case.persistence_numel,
        "stage3_prefetch_bucket_size": case.prefetch_numel,
        "stage3_max_live_parameters": case.live_numel_max,
        "stage3_max_reuse_distance": case.reuse_numel_max,
    }
    if case.is_muon:  # refuses it
        zero["reduce_scatter"] = False
    if case.params == "nvme":
        zero["offload_param"] = {
            "device": "nvme",
            "nvme_path": nvme_path,
            "buffer_count": case.buffer_count,
            "buffer_size": case.buffer_numel,
            "max_in_cpu": case.resident_numel_max,
        }
    elif case.params == "cpu":
        zero["offload_param"] = {"device": "cpu"}
    if case.optimizer == "nvme":
        zero["offload_optimizer"] = {
            "device": "nvme",
            "nvme_path": nvme_path,
            "buffer_count": 12 if case.pipeline else 5,
            "pipeline_read": case.pipeline,
            "pipeline_write": case.pipeline,
        }
    elif case.optimizer == "cpu":
        zero["offload_optimizer"] = {"device": "cpu"}
    return zero
