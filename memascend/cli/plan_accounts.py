"""The accounts that `memascend plan` shows, from its options and a DeepSpeed JSON."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

from memascend.cli.plan_sizes import host_bytes_of
from memascend.cli.plan_time import ranks_of_node
from memascend.config.block import MemAscendConfig, active_config, find_block, parse_block
from memascend.config.deepspeed import DeepSpeedSettings
from memascend.config.environment import is_disabled
from memascend.config.limit import KEY as LIMIT_KEY
from memascend.config.limit import parse_limit
from memascend.config.volumes import VolumeConfig
from memascend.deepspeed.attach.refusals import check_config
from memascend.errors import ConfigError
from memascend.plan.derive import Plan, PlanRequest, derive
from memascend.plan.footprint import Footprint
from memascend.plan.release import check_settings, check_tiles
from memascend.plan.shapes import ModelShapes
from memascend.plan.stock import StockPlan, four_pieces, stock
from memascend.system.memory import memory_total

#: Sizes that the Trainer fills in from the model, and that a loop leaves at DeepSpeed's defaults.
AUTO_SIZES = (
    "reduce_bucket_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
)
#: The values of Hugging Face's example, used without --config.
DEFAULT_CONFIG: dict[str, Any] = {
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "sub_group_size": 10**9,
        "offload_param": {"device": "nvme", "buffer_count": 5, "max_in_cpu": 10**9},
        "offload_optimizer": {"device": "nvme", "buffer_count": 4},
        **dict.fromkeys(AUTO_SIZES, "auto"),
    },
    "optimizer": {"type": "AdamW"},
    "gradient_accumulation_steps": 1,
}
DEFAULT_NOTE = (
    "no --config: Hugging Face's example: bf16, AdamW, sub_group_size 1e9, buffer_count 5 and 4, "
    'max_in_cpu 1e9, pin_memory, gradient_accumulation_steps 1, bucket sizes "auto"'
)
STOCK, TUNED_STOCK, PIECES, OURS = "stock 0.19.8", "tuned stock", "four pieces", "memascend"
#: The largest sub-group of a tuned stock; it also keeps no parameters in memory, and pins nothing.
TUNED_SUB_GROUP_SIZE = 10**8


@dataclasses.dataclass(frozen=True, slots=True)
class Accounts:
    """The accounts of one model, and their inputs."""

    settings: DeepSpeedSettings
    block: MemAscendConfig
    shapes: ModelShapes
    stock: StockPlan
    tuned: StockPlan  # stock with the settings of TUNED, which need the least memory
    four_pieces: StockPlan
    memascend: Plan

    @property
    def is_stock(self) -> bool:
        """Whether memascend is turned off."""
        return is_disabled() or not self.block.enabled

    def columns(self) -> dict[str, Footprint]:
        """Return the accounts by title, in the order of display."""
        return {
            STOCK: self.stock,
            TUNED_STOCK: self.tuned,
            PIECES: self.four_pieces,
            OURS: self.memascend,
        }


def accounts_of(
    shapes: ModelShapes,
    *,
    settings: DeepSpeedSettings,
    block: MemAscendConfig,
    args: argparse.Namespace,
) -> Accounts:
    """Return the accounts of a model for the settings and the options.

    Raises:
        ConfigError: Settings that cannot work together, or a limit too small.
    """
    request = PlanRequest.from_deepspeed(
        settings, block=block, world=args.world, local_world=ranks_of_node(args)
    )
    check_settings(block, settings)
    limit_bytes = limit_of(block, args)
    ours = request
    if args.config is None or limit_bytes is not None:
        # The tutorials set max_in_cpu for stock; a limit overrides it.
        ours = dataclasses.replace(request, max_in_cpu=0)
    memascend = derive(shapes, request=ours, limit_bytes=limit_bytes)
    check_tiles(shapes, memascend, block, settings)
    return Accounts(
        settings,
        block,
        shapes,
        stock(shapes, request=request, settings=settings),
        _tuned(shapes, request, settings),
        four_pieces(shapes, request=request, settings=settings),
        memascend,
    )


def _tuned(shapes: ModelShapes, request: PlanRequest, settings: DeepSpeedSettings) -> StockPlan:
    """Return the account of stock with the settings that need the least host memory."""
    zero = settings.zero_optimization
    size = min(zero.sub_group_size, TUNED_SUB_GROUP_SIZE)
    unpinned = {"pin_memory": False}
    changes = {
        "sub_group_size": size,
        "offload_param": zero.offload_param.model_copy(update=unpinned | {"max_in_cpu": 0}),
        "offload_optimizer": zero.offload_optimizer.model_copy(update=unpinned),
    }
    return stock(
        shapes,
        request=dataclasses.replace(request, sub_group_size=size),
        settings=settings.model_copy(update={"zero_optimization": zero.model_copy(update=changes)}),
    )


def block_of(ds_config: Mapping[str, Any], args: argparse.Namespace) -> MemAscendConfig:
    """Return the block of the JSON, with --limit and --micro-batches in place of its own."""
    raw = dict(find_block(ds_config) or {})
    if args.micro_batches is not None:
        stated = raw.get("micro_batches")
        if isinstance(stated, Mapping) and stated.get("sequences") is not None:
            args.usage_error(
                f"--micro-batches {args.micro_batches} contradicts memascend.micro_batches."
                f"sequences={stated['sequences']} in --config, which already decides the number of "
                "slices. Leave one of them out"
            )
        others = stated if isinstance(stated, Mapping) else {}
        raw["micro_batches"] = {**others, "count": args.micro_batches}
    if args.limit is not None:
        raw["host_memory_limit"] = args.limit
        if "." in args.limit or args.limit == "1":
            with contextlib.suppress(ValueError):  # "1.5GiB" stays text
                raw["host_memory_limit"] = float(args.limit)
        try:
            parse_limit(raw["host_memory_limit"], available=1)
        except ConfigError as error:
            raise ConfigError(str(error).replace(LIMIT_KEY, "--limit")) from error
    return parse_block(raw)


def check_run(ds_config: Mapping[str, Any], settings: DeepSpeedSettings) -> list[str]:
    """Return a warning if the JSON has no block.

    Raises:
        ConfigError: A run would refuse the settings.
    """
    if active_config(ds_config) is not None:
        check_config(settings)
    if is_disabled() or find_block(ds_config) is not None:
        return []
    return ['the JSON of --config has no "memascend": {}: a run would use stock DeepSpeed']


def volumes_of(settings: DeepSpeedSettings, block: MemAscendConfig) -> tuple[VolumeConfig, ...]:
    """Return the volumes that a run would use; empty if the JSON names none."""
    zero = settings.zero_optimization
    fallback = zero.offload_param.nvme_path or zero.offload_optimizer.nvme_path
    return block.volumes or ((VolumeConfig(path=fallback),) if fallback else ())


def limit_of(block: MemAscendConfig, args: argparse.Namespace) -> int | None:
    """Return the limit of a rank in bytes; None without one.

    A fraction is one of --host-memory, else of this machine's memory.
    """
    value, available = block.host_memory_limit, 0
    if isinstance(value, int | float) and value <= 1:
        available = host_bytes_of(args) or memory_total() // ranks_of_node(args)
    return parse_limit(value, available=available)
