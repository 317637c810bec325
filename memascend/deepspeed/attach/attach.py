"""Builds a model's attachment from a DeepSpeed config with a block: checks, wiring, log lines."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger as deepspeed_logger

from memascend.base.units import format_nbytes
from memascend.config.block import MemAscendConfig
from memascend.config.deepspeed import DeepSpeedSettings
from memascend.config.environment import local_world_size, malloc_settings, trace_folder
from memascend.deepspeed.attach import process
from memascend.deepspeed.attach.agreement import all_or_none, check_agreement
from memascend.deepspeed.attach.attachment import Attachment, speaks_for_machine
from memascend.deepspeed.attach.device import device_of
from memascend.deepspeed.attach.refusals import check_report
from memascend.deepspeed.plan.from_optimizer import building_sizes, check_smallest, stated_limit
from memascend.deepspeed.stock.memory import AioFileStore, LockedMemory, PinnedMemory
from memascend.errors import MemAscendError
from memascend.ledger.drives import DriveWatch
from memascend.ledger.trace import Measures, Trace
from memascend.monitor.runs import default_root, run_name
from memascend.monitor.status_file import RankPlace
from memascend.plan.release import check_settings
from memascend.runtime import Runtime, StockParts
from memascend.system.heap import Heap, examine_heap, give_back_freed
from memascend.system.memory import memory_total
from memascend.version import __version__
from memascend.volumes.directory import provide_directory
from memascend.volumes.prepare import volume_paths

log = logging.getLogger(__name__)


def attach(config: MemAscendConfig, settings: DeepSpeedSettings, nvme_path: object) -> Attachment:
    """Build the runtime of a model, and log in one line what was obtained. All ranks call this.

    Raises:
        MemAscendError: The block cannot be served on this rank or another one.
    """
    check_agreement(config)
    limit_bytes = stated_limit(config)
    sizes = building_sizes(limit_bytes)
    with all_or_none(_cannot_begin):  # no other collective inside
        check_settings(config, settings)
        if dist.get_rank() == 0:  # which writes it, perhaps elsewhere
            check_report(config)
        check_smallest(config, settings, limit_bytes)
        parts = _build(config, settings, os.path.abspath(str(nvme_path)), limit_bytes, sizes)
    return Attachment(*parts, place=_rank_place(config))


def _cannot_begin(ranks: str) -> MemAscendError:
    return MemAscendError(f"{ranks} cannot begin, so no rank does; see the errors of these ranks")


def _build(
    config: MemAscendConfig,
    settings: DeepSpeedSettings,
    directory: str,
    limit_bytes: int | None,
    sizes: Mapping[str, int],
) -> tuple[Runtime, DriveWatch | None, Heap, Trace | None]:
    provide_directory(directory)
    _show_log_lines()
    _warn_of_memory(config, limit_bytes)
    heap = _set_heap(config)
    folder = trace_folder() if dist.get_rank() == 0 else None
    runtime = Runtime(
        config=config,
        directory=directory,
        page_lock=_wants_pinning(settings),
        stock=_stock_parts(config, settings, directory),
        device=device_of(get_accelerator()),
        limit_bytes=limit_bytes,
        **sizes,
    )
    _log_armed(config, settings, runtime, heap)
    drives = _watch_drives(config, directory) if speaks_for_machine(dist.get_rank()) else None
    trace = None if folder is None else Trace(folder, partial(_measure, runtime))
    return runtime, drives, heap, trace


def _measure(runtime: Runtime) -> Measures:
    drive = runtime.drive.stats()
    return Measures(
        components={name: one.live_bytes for name, one in runtime.host.components().items()},
        read_bytes=int(drive.get("bytes_read", 0)),
        written_bytes=int(drive.get("bytes_written", 0)),
        drive_wait_s=drive.get("wait_seconds", 0.0),
        device_wait_s=0.0 if runtime.new_event is None else runtime.new_event.waited_s,
        optimizer_wait_s=runtime.background.waited_s,
    )


def _rank_place(config: MemAscendConfig) -> RankPlace | None:
    """Return the place of this rank's status file; all ranks use the same name of the run."""
    if config.status is False:
        return None
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    began = torch.tensor([int(1000 * time.time()), os.getpid()], dtype=torch.int64)
    if world_size > 1:
        began = began.to(get_accelerator().current_device_name())
        dist.broadcast(began, src=0)
    is_shared = isinstance(config.status, str)
    return RankPlace(
        root=Path(str(config.status)).absolute() if is_shared else default_root(),
        is_shared=is_shared,
        run=run_name(*began.tolist()),
        rank=dist.get_rank(),
        world_size=world_size,
        program=os.path.basename(sys.argv[0]),
    )


def _set_heap(config: MemAscendConfig) -> Heap:
    if not config.heap.enabled:
        return replace(examine_heap(), why_left="memascend.heap.enabled is false")
    return give_back_freed(
        mapped_bytes_min=config.heap.mapped_bytes_min, settings=malloc_settings()
    )


def _watch_drives(config: MemAscendConfig, directory: str) -> DriveWatch:
    drives = DriveWatch(volume_paths(config, directory))
    if drives.start.silent:
        log.info("memascend: no SMART data of %s", drives.start.why_silent())
    return drives


def _warn_of_memory(config: MemAscendConfig, limit_bytes: int | None) -> None:
    if limit_bytes is None or dist.get_rank() != 0:
        return
    others_bytes, total = process.limits_bytes(), memory_total()
    if others_bytes:
        log.info(
            "memascend: memascend.host_memory_limit is for each model: %s for this one, %s for the "
            "others of this process",
            format_nbytes(limit_bytes),
            format_nbytes(others_bytes),
        )
    together_bytes = (limit_bytes + others_bytes) * local_world_size()
    if together_bytes <= total:
        return
    log.warning(
        "memascend: memascend.host_memory_limit=%r comes to %s for %d rank(s) and all models of "
        "each, which is more than the %s that this machine or control group has. A large model "
        "will use all of it; lower the limit",
        config.host_memory_limit,
        format_nbytes(together_bytes),
        local_world_size(),
        format_nbytes(total),
    )


def _wants_pinning(settings: DeepSpeedSettings) -> bool:
    zero = settings.zero_optimization
    # DeepSpeed's default is True since 0.19.6.
    offload = (zero.offload_param, zero.offload_optimizer)
    return any(part.pin_memory for part in offload if part.stated)


def _stock_parts(
    config: MemAscendConfig, settings: DeepSpeedSettings, directory: str
) -> StockParts:
    """Return stock parts for the sections that are off."""
    memory = None if config.allocator.enabled else PinnedMemory()
    if config.direct_nvme.enabled or not config.buffer_pool.enabled:
        return StockParts(memory=memory)  # if both are off the stock swappers need no parts
    handle = _stock_aio_handle(settings)
    folder = tempfile.mkdtemp(prefix=f"memascend-{os.getpid()}-", dir=directory)
    # DeepSpeed's engine copies through its own buffer unless it allocated the memory itself.
    store, slot_memory = AioFileStore(handle, folder), LockedMemory(handle)
    return StockParts(memory=memory, store=store, slot_memory=slot_memory)


def _stock_aio_handle(settings: DeepSpeedSettings) -> Any:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return (
        AsyncIOBuilder()
        .load(verbose=False)
        .aio_handle(**settings.aio.model_dump(exclude={"use_gds", "left_to_trainer"}))
    )


def _show_log_lines() -> None:
    """Make our INFO lines visible once on each machine, unless the application set our logger up.

    DeepSpeed's own handler drops lines below WARNING, so only its format is used.
    """
    ours = logging.getLogger("memascend")
    if ours.level != logging.NOTSET or ours.handlers:
        return
    ours.setLevel(logging.INFO if speaks_for_machine(dist.get_rank()) else logging.WARNING)
    if not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        if deepspeed_logger.handlers:
            handler.setFormatter(deepspeed_logger.handlers[0].formatter)
        ours.addHandler(handler)
        ours.propagate = False


#: DeepSpeed keys that have no effect while a section is on.
_IDLE_KEYS = {
    "buffer_pool": (("offload_param", "buffer_count"), ("offload_param", "buffer_size")),
    "streaming.optimizer": tuple(
        ("offload_optimizer", key) for key in ("buffer_count", "pipeline_read", "pipeline_write")
    ),
}


def _log_armed(
    config: MemAscendConfig, settings: DeepSpeedSettings, runtime: Runtime, heap: Heap
) -> None:
    if dist.get_rank() != 0:
        return
    sections = [*config.sections_enabled, *(["micro_batches"] if config.micro_batches else [])]
    log.log(
        logging.WARNING if runtime.unregistered_bytes else logging.INFO,
        "memascend %s armed: %s; %s; %s; torch %s",
        __version__,
        ", ".join(sections),
        runtime.describe(),
        heap.describe(),
        torch.__version__,
    )
    idle = [
        f"zero_optimization.{part}.{key}"
        for name in config.sections_enabled
        for part, key in _IDLE_KEYS.get(name, ())
        if key in getattr(settings.zero_optimization, part).stated
    ]
    if config.direct_nvme.enabled and "aio" in settings.stated:
        idle.append("aio")
    if idle:
        log.info("memascend: these keys have no effect and are ignored: %s", ", ".join(idle))
