"""From a DeepSpeed config with a block to a running attachment: refusals, wiring, log line.

Everything that cannot work together is refused here, before a weight is loaded, with the keys
involved.
"""

from __future__ import annotations

import atexit
import logging
import os
import tempfile
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger as deepspeed_logger

from memascend.base.units import format_nbytes
from memascend.config.block import MemAscendConfig, active_config, local_world_size
from memascend.deepspeed.plan.live import building_sizes, check_smallest, stated_limit
from memascend.deepspeed.stock.aio_handle import serving
from memascend.deepspeed.stock.host_buffers import HostBuffers
from memascend.deepspeed.stock.memory import (
    AioFileStore,
    LockedMemory,
    PinnedMemory,
)
from memascend.errors import ConfigError
from memascend.ledger.drives import DriveWatch
from memascend.ledger.ledger import Ledger, describe_plan
from memascend.plan.request import check_limit_can_be_kept
from memascend.runtime import Runtime, StockParts
from memascend.system.memory import memory_total
from memascend.version import __version__
from memascend.volumes.directory import provide_directory
from memascend.volumes.prepare import volume_paths

log = logging.getLogger(__name__)


def check_config(ds_config: Mapping[str, Any]) -> None:
    """Refuses what cannot work together with an active block.

    Raises:
        ConfigError: Names the keys, the values and what to do.
    """
    zero = ds_config.get("zero_optimization")
    zero = zero if isinstance(zero, Mapping) else {}
    stage = zero.get("stage", 0)
    if stage != 3:
        raise ConfigError(
            f"memascend works with ZeRO stage 3, zero_optimization.stage is {stage!r}. Set it "
            'to 3, or turn memascend off with "memascend": {"enabled": false}'
        )
    offload_param = _section(zero, "offload_param")
    offload_optimizer = _section(zero, "offload_optimizer")
    on_drive = [
        name
        for name, section in (
            ("offload_param", offload_param),
            ("offload_optimizer", offload_optimizer),
        )
        if section.get("device") == "nvme"
    ]
    if not on_drive:
        raise ConfigError(
            "memascend has nothing to do: neither zero_optimization.offload_param.device nor "
            'zero_optimization.offload_optimizer.device is "nvme". Set at least one of them, or '
            'turn memascend off with "memascend": {"enabled": false}'
        )
    for name in on_drive:
        if not zero[name].get("nvme_path"):
            raise ConfigError(
                f"zero_optimization.{name}.nvme_path is missing: name a directory on the drive"
            )
    refused = {
        "zero_optimization.zenflow": bool(zero.get("zenflow")),
        "zero_optimization.offload_optimizer.super_offload": bool(
            offload_optimizer.get("super_offload")
        ),
        "aio.use_gds": bool(_section(ds_config, "aio").get("use_gds")),
        "checkpoint.writer.decoupled": "offload_optimizer" in on_drive
        and bool(_section(_section(ds_config, "checkpoint"), "writer").get("decoupled")),
        "compile.deepcompile": bool(_section(ds_config, "compile").get("deepcompile")),
    }
    for key, is_set in refused.items():
        if is_set:
            raise ConfigError(
                f"{key} cannot be combined with memascend: both replace the same parts. "
                f'Remove {key}, or turn memascend off with "memascend": {{"enabled": false}}'
            )


def _section(parent: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = parent.get(name)
    return section if isinstance(section, Mapping) else {}


class Attachment:
    """A runtime together with the DeepSpeed side it serves. Parameters and optimizer share one."""

    def __init__(self, runtime: Runtime, drives: DriveWatch | None = None) -> None:
        self.runtime = runtime
        self._drives = drives
        self._rank = dist.get_rank()
        self._is_finished = False
        # Scripts that end without engine.destroy() get their report all the same.
        atexit.register(_finish, weakref.ref(self))
        self._host_buffers = HostBuffers(runtime.memory) if runtime.arena is not None else None

    def ledger(self) -> Ledger:
        """Every host byte of ours by component, planned and measured."""
        found = self.runtime.ledger()
        return found if self._drives is None else replace(found, drives=self._drives.drives)

    def log_plan(self) -> None:
        """Prints what is planned, on rank 0."""
        plan = self.runtime.plan
        if plan is not None and dist.get_rank() == 0:
            log.info("memascend: host memory of this rank:\n%s", describe_plan(plan))

    def note_step(self) -> None:
        """Counts an optimizer step, and says on rank 0 when the write budget is first exceeded."""
        wear = self.runtime.note_step()
        if wear is not None and self._rank == 0:
            stops = self.runtime.config.wear.over_budget == "stop"
            after = "Training stops after the next checkpoint" if stops else "Training goes on"
            log.warning(
                "memascend: over memascend.wear.write_budget: %s. %s", wear.describe(), after
            )

    def is_to_stop(self) -> bool:
        """Whether more was written than allowed, and the user wants to stop then."""
        wear = self.runtime.read_wear()
        stops = self.runtime.config.wear.over_budget == "stop"
        return stops and wear is not None and wear.is_over_budget

    def finish(self) -> None:
        """Prints and writes what was measured, on rank 0, once."""
        if self._is_finished or self._rank != 0:
            return
        self._is_finished = True
        if self._drives is not None:
            self._drives.end()
        ledger = self.ledger()
        log.info("memascend: host memory of this rank, measured:\n%s", ledger.describe())
        if self.runtime.config.report is not None:
            try:
                ledger.write(self.runtime.config.report)
            except OSError as error:
                log.error(
                    "memascend: cannot write memascend.report=%r: %s. The table above has it all",
                    self.runtime.config.report,
                    error.strerror or error,
                )

    def host_buffers(self, component: str | None) -> AbstractContextManager[None]:
        """Inside, host buffers that DeepSpeed creates come from the arena; not with None."""
        return nullcontext() if self._host_buffers is None else self._host_buffers(component)

    def serving_aio(self, component: str) -> AbstractContextManager[None]:
        """Inside, DeepSpeed's swappers get handles over our store."""
        if self.runtime.store is None:
            return nullcontext()
        return serving(store=self.runtime.store, memory=self.runtime.memory, component=component)

    def staging_folder(self, nvme_path: str) -> str:
        """A folder for DeepSpeed's optimizer files; this run's own when our store has the data."""
        if self.runtime.store is None:
            return os.path.join(nvme_path, "zero_stage_3")
        # As stock, which makes its folders where there are none; it need not be the store's.
        provide_directory(nvme_path)
        return tempfile.mkdtemp(prefix=f"memascend-{os.getpid()}-", dir=nvme_path)


def face_of(engine: Any) -> Attachment | None:
    """The attachment of a DeepSpeed engine; None when its model has none."""
    optimizer = getattr(engine, "optimizer", None)
    found = getattr(optimizer, "attachment", None)
    if isinstance(found, Attachment):
        return found
    for param in engine.module.parameters():
        found = getattr(getattr(param, "nvme_swapper", None), "memascend_attachment", None)
        if isinstance(found, Attachment):
            return found
    return None


def _finish(attachment: weakref.ref[Attachment]) -> None:
    found = attachment()
    if found is not None:
        found.finish()


def attach(ds_config: Mapping[str, Any], nvme_path: object) -> Attachment:
    """Builds the runtime for a model and says in one line what it got.

    Args:
        ds_config: The raw DeepSpeed config with an active block.
        nvme_path: Directory on the drive.
    """
    config = active_config(ds_config)
    if config is None:
        raise AssertionError("attach needs an active block")
    check_limit_can_be_kept(config, ds_config)
    _check_report(config)
    limit_bytes = stated_limit(config)
    check_smallest(ds_config, limit_bytes)
    directory = os.path.abspath(str(nvme_path))
    provide_directory(directory)
    _show_log_lines()
    _warn_of_memory(config, limit_bytes)
    accelerator = get_accelerator()
    on_cuda = accelerator.device_name() == "cuda"
    runtime = Runtime(
        config=config,
        directory=directory,
        page_lock=_wants_pinning(ds_config),
        register_device=on_cuda and _wants_pinning(ds_config),
        pci_address=_pci_address() if on_cuda else None,
        stock=_stock_parts(config, ds_config, directory),
        new_event=None if accelerator.is_synchronized_device() else accelerator.Event,
        limit_bytes=limit_bytes,
        **building_sizes(limit_bytes),
    )
    _log_armed(config, ds_config, runtime)
    return Attachment(runtime, _watch_drives(config, directory) if dist.get_rank() == 0 else None)


def _watch_drives(config: MemAscendConfig, directory: str) -> DriveWatch:
    drives = DriveWatch(volume_paths(config, directory))
    if drives.start.silent:
        log.info("memascend: no SMART data of %s", drives.start.why_silent())
    return drives


def _check_report(config: MemAscendConfig) -> None:
    """Before hours of training, not after them."""
    if config.report is None or dist.get_rank() != 0:  # rank 0 writes it, maybe on another machine
        return
    path = Path(config.report)
    if (
        path.is_dir()
        or not path.parent.is_dir()
        or not os.access(path.parent, os.W_OK, effective_ids=True)
    ):
        raise ConfigError(
            f"memascend.report={config.report!r} cannot be written: {path.absolute().parent} is no "
            "folder that this user can write, or a folder has that name. Make it, or name another "
            "file"
        )


def _warn_of_memory(config: MemAscendConfig, limit_bytes: int | None) -> None:
    total = memory_total() if limit_bytes is not None else 0
    if limit_bytes is None or limit_bytes * local_world_size() <= total or dist.get_rank() != 0:
        return
    log.warning(
        "memascend: memascend.host_memory_limit=%r for each of %d rank(s) is more than the %s that "
        "this machine or control group has. A large model will use all of it; lower the limit",
        config.host_memory_limit,
        local_world_size(),
        format_nbytes(total),
    )


def _pci_address() -> str | None:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    if not hasattr(properties, "pci_bus_id"):
        return None  # an older torch does not tell
    domain, bus, device = (
        int(getattr(properties, f"pci_{name}_id")) for name in ("domain", "bus", "device")
    )
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def _wants_pinning(ds_config: Mapping[str, Any]) -> bool:
    zero = _section(ds_config, "zero_optimization")
    sections = (_section(zero, "offload_param"), _section(zero, "offload_optimizer"))
    # True is DeepSpeed's own default since 0.19.6.
    return any(section.get("pin_memory", True) for section in sections if section)


def _stock_parts(
    config: MemAscendConfig, ds_config: Mapping[str, Any], directory: str
) -> StockParts:
    """Make the parts that serve for the sections that are off."""
    memory = None if config.allocator.enabled else PinnedMemory()
    if config.direct_nvme.enabled or not config.buffer_pool.enabled:
        return StockParts(memory=memory)  # without both, stock swappers do it all
    handle = _stock_aio_handle(ds_config)
    folder = tempfile.mkdtemp(prefix=f"memascend-{os.getpid()}-", dir=directory)
    # DeepSpeed's engine copies through a buffer of its own unless it allocated the memory itself.
    store, slot_memory = AioFileStore(handle, folder), LockedMemory(handle)
    return StockParts(memory=memory, store=store, slot_memory=slot_memory)


def _stock_aio_handle(ds_config: Mapping[str, Any]) -> Any:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    aio = _section(ds_config, "aio")
    return (
        AsyncIOBuilder()
        .load(verbose=False)
        .aio_handle(
            block_size=aio.get("block_size", 1 << 20),
            queue_depth=aio.get("queue_depth", 8),
            single_submit=aio.get("single_submit", False),
            overlap_events=aio.get("overlap_events", True),
            intra_op_parallelism=aio.get("intra_op_parallelism", 1),
        )
    )


def _show_log_lines() -> None:
    """Makes our INFO lines visible on rank 0, unless the application set our logger up itself.

    DeepSpeed's own handler lets nothing below WARNING pass; only its format is borrowed.
    """
    ours = logging.getLogger("memascend")
    if ours.level != logging.NOTSET or ours.handlers:
        return
    ours.setLevel(logging.INFO if dist.get_rank() == 0 else logging.WARNING)
    if not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        if deepspeed_logger.handlers:
            handler.setFormatter(deepspeed_logger.handlers[0].formatter)
        ours.addHandler(handler)
        ours.propagate = False


#: DeepSpeed keys that a section takes the meaning from.
_IDLE_KEYS = {
    "buffer_pool": (("offload_param", "buffer_count"), ("offload_param", "buffer_size")),
    "streaming.optimizer": tuple(
        ("offload_optimizer", key) for key in ("buffer_count", "pipeline_read", "pipeline_write")
    ),
}


def _log_armed(config: MemAscendConfig, ds_config: Mapping[str, Any], runtime: Runtime) -> None:
    if dist.get_rank() != 0:
        return
    from memascend.deepspeed.seams.arm import status

    log.info(
        "memascend %s armed: %s; %s; %d seams; torch %s",
        __version__,
        ", ".join(config.sections_enabled),
        runtime.describe(),
        sum(row.armed for row in status()),
        torch.__version__,
    )
    zero = _section(ds_config, "zero_optimization")
    idle = [
        f"zero_optimization.{section}.{key}"
        for name in config.sections_enabled
        for section, key in _IDLE_KEYS.get(name, ())
        if key in _section(zero, section)
    ]
    if config.direct_nvme.enabled and "aio" in ds_config:
        idle.append("aio")
    if idle:
        log.info("memascend: these keys have no meaning here and are ignored: %s", ", ".join(idle))
