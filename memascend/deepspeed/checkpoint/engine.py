"""`engine.save_checkpoint` and `engine.load_checkpoint` of models whose optimizer is on a drive.

Upstream's own functions run as for any ZeRO-3 optimizer. In addition a save is atomic and writes
the optimizer's tensors directly from the store; a load verifies everything first and reads them
directly into the store. Upstream's NVMe code, which copies a folder of files, is skipped: during a
save or load the engine reports that its optimizer is not on NVMe.

A model whose optimizer is elsewhere, or without a block, uses upstream's functions unchanged.
"""

from __future__ import annotations

import errno
import functools
import logging
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist

from memascend import _core
from memascend.checkpoint.folder import SavingFolder, write_latest
from memascend.deepspeed.attach.attachment import attachment_of
from memascend.deepspeed.checkpoint.every_rank import on_every_rank, rank_of
from memascend.deepspeed.checkpoint.frozen import taken_apart
from memascend.deepspeed.checkpoint.load import opened
from memascend.deepspeed.checkpoint.writer import write_rank
from memascend.deepspeed.optimizer.checkpoint import Loads
from memascend.deepspeed.optimizer.optimizer import ZeroOptimizer
from memascend.errors import CheckpointError, ConfigError, MemAscendError, WriteBudgetError

log = logging.getLogger(__name__)

_FORBIDDEN = "\nlikely cause: this user may not write there\nfix: change that, or save elsewhere"
#: Cause and fix of errors that have other causes in a save than in a transfer.
_REFUSALS = {
    errno.ENOSPC: "\nlikely cause: its file system is full\nfix: free space, then save again",
    errno.EACCES: _FORBIDDEN,
    errno.EPERM: _FORBIDDEN,
    errno.ENOENT: "\nlikely cause: another program removed it meanwhile\nfix: save again",
}


# -- seams ---------------------------------------------------------------------------------------


def wrap_save_checkpoint(original: Callable[..., bool]) -> Callable[..., bool]:
    """Replace `DeepSpeedEngine.save_checkpoint`."""

    @functools.wraps(original)
    def save_checkpoint(
        self: Any,
        save_dir: str,
        tag: object = None,
        client_state: dict[str, Any] = {},  # noqa: B006  upstream's signature
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        save_as = functools.partial(
            original,
            self,
            save_dir,
            client_state=client_state,
            exclude_frozen_parameters=exclude_frozen_parameters,
        )
        if not save_dir or _optimizer_of(self) is None:
            saved = save_as(tag=tag, save_latest=save_latest)
        else:
            saved = _save(self, save_as, str(save_dir), tag, save_latest)
        if saved and save_dir:
            _note(self, save_dir, f"global_step{self.global_steps}" if tag is None else tag)
        return saved

    return save_checkpoint


def wrap_load_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `DeepSpeedEngine.load_checkpoint`."""

    @functools.wraps(original)
    def load_checkpoint(
        self: Any,
        load_dir: str,
        tag: object = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> Any:
        load = functools.partial(
            original,
            self,
            load_dir,
            load_module_strict=load_module_strict,
            load_lr_scheduler_states=load_lr_scheduler_states,
            load_module_only=load_module_only,
            custom_load_fn=custom_load_fn,
        )
        result = _load(self, load, load_dir, tag, load_optimizer_states, load_module_only)
        if result[0] is not None:  # the path that upstream read; None without a checkpoint
            _note(self, load_dir, tag or Path(result[0]).parent.name)
        return result

    return load_checkpoint


def wrap_zero_nvme_offload_optimizer(original: Callable[..., bool]) -> Callable[..., bool]:
    """Replace `DeepSpeedEngine.zero_nvme_offload_optimizer`."""

    @functools.wraps(original)
    def zero_nvme_offload_optimizer(self: Any) -> bool:
        return original(self) if _active_optimizer_of(self) is None else False

    return zero_nvme_offload_optimizer


def wrap_save_part(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `DeepSpeedEngine._save_checkpoint` or `_save_zero_checkpoint`: each writes a file.

    A barrier follows, at which the other ranks would wait for one that failed.
    """

    @functools.wraps(original)
    def save_part(self: Any, *arguments: Any, **keywords: Any) -> Any:
        save = functools.partial(original, self, *arguments, **keywords)
        return save() if _active_optimizer_of(self) is None else on_every_rank(save)

    return save_part


def wrap_load_part(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `DeepSpeedEngine._load_checkpoint`, and load the optimizer behind it.

    A gather follows, at which the other ranks would wait for one that failed.
    """

    @functools.wraps(original)
    def load_part(self: Any, *arguments: Any, **keywords: Any) -> Any:
        load = functools.partial(original, self, *arguments, **keywords)
        optimizer = _active_optimizer_of(self)
        if optimizer is None:
            return load()
        result = on_every_rank(load)
        _replace_values(optimizer, optimizer.checkpoint.restore)
        return result

    return load_part


def wrap_load_zero_checkpoint(original: Callable[..., bool]) -> Callable[..., bool]:
    """Replace `DeepSpeedEngine._load_zero_checkpoint`, which reads whole files into memory."""

    @functools.wraps(original)
    def _load_zero_checkpoint(self: Any, *arguments: Any, **keywords: Any) -> bool:
        if _active_optimizer_of(self) is not None:
            return True  # `wrap_load_part` has loaded it
        return original(self, *arguments, **keywords)

    return _load_zero_checkpoint


def wrap_get_all_ckpt_names(original: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """Replace `DeepSpeedEngine._get_all_ckpt_names`, which names a file for each current rank."""

    @functools.wraps(original)
    def _get_all_ckpt_names(self: Any, *arguments: Any, **keywords: Any) -> list[str]:
        optimizer = _optimizer_of(self)
        path = None if optimizer is None else optimizer.checkpoint.model_states
        return original(self, *arguments, **keywords) if path is None else [str(path)]

    return _get_all_ckpt_names


def _note(engine: Any, folder: str, tag: object) -> None:
    """Note a complete checkpoint: an error about corrupted data names it to resume from."""
    attachment = attachment_of(engine)
    if attachment is not None:
        attachment.runtime.note_checkpoint(str(Path(folder, str(tag)).absolute()))


def _optimizer_of(engine: Any) -> ZeroOptimizer | None:
    """Return the optimizer if its states are in our store, else None."""
    optimizer = engine.optimizer
    if not isinstance(optimizer, ZeroOptimizer) or not optimizer.upstream.states_on_drive:
        return None
    return optimizer if optimizer.attachment.runtime.drive.is_ours else None


def _active_optimizer_of(engine: Any) -> ZeroOptimizer | None:
    """Return that optimizer during a save or load, else None."""
    optimizer = _optimizer_of(engine)
    return optimizer if optimizer is not None and optimizer.checkpoint.is_active else None


# -- saving --------------------------------------------------------------------------------------


def _save(
    engine: Any, save_as: Callable[..., bool], save_dir: str, tag: object, save_latest: bool
) -> bool:
    optimizer: ZeroOptimizer = engine.optimizer
    _refuse(engine)
    tag = str(tag) if tag is not None else f"global_step{engine.global_steps}"
    rank = rank_of(engine)
    leads = rank == 0
    _check_same_tag(engine, tag, "save")
    folder = SavingFolder(save_dir, tag)
    with explained(folder):
        try:
            on_every_rank(lambda: _begin(optimizer, folder, leads=leads))
            on_every_rank(folder.check_is_shared)
            with optimizer.checkpoint.active():
                save_as(tag=folder.tag, save_latest=False)
            on_every_rank(lambda: write_rank(engine, folder, rank, leads=leads))
            on_every_rank(lambda: folder.publish() if leads else None)
        except BaseException:
            if leads:
                folder.abandon()
            raise
    if save_latest:
        with explained(folder):
            on_every_rank(lambda: write_latest(save_dir, tag) if leads else None)
    if leads:
        log.info("memascend: checkpoint %s is complete", folder.target)
    _stop_over_budget(engine, optimizer, folder)
    return True


def _begin(optimizer: ZeroOptimizer, folder: SavingFolder, *, leads: bool) -> None:
    if leads:
        folder.begin()
    optimizer.upstream.partition_parameters()  # upstream does so ahead of a barrier


@contextmanager
def explained(folder: SavingFolder) -> Iterator[None]:
    """Turn an OSError of the system into a CheckpointError with cause and fix."""
    try:
        yield
    except OSError as error:
        if isinstance(error, MemAscendError):
            raise
        code = error.errno or errno.EIO
        advice = _REFUSALS.get(code) or _core.describe_cause(code=code)
        raise CheckpointError(
            code,
            f"cannot save to {folder.target}: {error.strerror or error}; earlier checkpoints are "
            f"untouched{advice}",
        ) from error


def _stop_over_budget(engine: Any, optimizer: ZeroOptimizer, folder: SavingFolder) -> None:
    """Stop all ranks after a checkpoint if one has exceeded its budget and is to stop then."""
    attachment = optimizer.attachment
    stops = torch.tensor([attachment.is_to_stop()], dtype=torch.int32, device=engine.device)
    dist.all_reduce(stops, op=dist.ReduceOp.MAX)
    wear = attachment.runtime.read_wear()
    if stops.item() and wear is not None:
        where = "" if wear.is_over_budget else ", exceeded on another machine. On this one"
        raise WriteBudgetError(
            f"stopped by memascend.wear.write_budget{where}: {wear.describe()}. The checkpoint "
            f"{folder.target} is complete. To go on, resume from there: the run that resumes "
            "counts from 0. A larger write_budget, or none, lets it write more"
        )


def _refuse(engine: Any) -> None:
    if engine.checkpoint_engine.is_decoupled():
        raise ConfigError(
            "checkpoint.writer.decoupled cannot be combined with memascend and "
            "offload_optimizer.device nvme: a checkpoint is complete when save_checkpoint returns. "
            "Remove the key"
        )
    if engine.has_moe_layers:
        raise ConfigError(
            "checkpoints of a mixture of experts cannot be combined with memascend and "
            'offload_optimizer.device nvme. Set offload_optimizer.device to "cpu"'
        )


def _check_same_tag(engine: Any, tag: str | None, action: str) -> None:
    """Check that all ranks save or load the same tag; None: this rank found none."""
    own = zlib.crc32(repr(tag).encode())
    sums = torch.tensor([own, -own], dtype=torch.int64, device=engine.device)
    dist.all_reduce(sums, op=dist.ReduceOp.MAX)
    if sums.tolist() != [own, -own]:
        none = " (None: it sees no `latest`)" if tag is None else ""
        raise CheckpointError(
            f"cannot {action}: the tag is {tag!r} on rank {engine.global_rank}{none} and differs "
            f"on another rank. Give {action}_checkpoint the same tag on every rank"
        )


# -- loading -------------------------------------------------------------------------------------


def _load(
    engine: Any,
    load: Callable[..., Any],
    load_dir: str,
    tag: object,
    load_optimizer_states: bool,
    load_module_only: bool,
) -> Any:
    optimizer = _optimizer_of(engine)
    if optimizer is None:
        return load(tag=tag, load_optimizer_states=load_optimizer_states)
    is_universal = engine.load_universal_checkpoint()
    latest = Path(load_dir) / ("latest_universal" if is_universal else "latest")
    found = on_every_rank(lambda: _read_tag(latest) if tag is None else str(tag))
    _check_same_tag(engine, found, "load")
    if found is None:
        return load(tag=None, load_optimizer_states=load_optimizer_states)
    loads = Loads.ROUNDED_WEIGHTS  # as DeepSpeed, which loads the weights of the module then
    if load_optimizer_states and not load_module_only:
        loads = _loads_with_states(optimizer)
    elif is_universal:  # these have no other
        loads = Loads.WEIGHTS
    _refuse(engine)
    if loads is not Loads.ALL:  # states stay, so they must belong to one step
        on_every_rank(lambda: _check_states(optimizer))
    load_dir, tag = str(load_dir), found
    with opened(engine, optimizer, load_dir, tag) as source, ExitStack() as stack:
        apart = taken_apart(engine, source, load_dir, tag)
        rest, restore_frozen = on_every_rank(lambda: stack.enter_context(apart))
        stack.enter_context(optimizer.checkpoint.active(rest, loads=loads))
        # Without optimizer states upstream would gather all weights in fp32 on every rank.
        path, *others = load(tag=tag, load_optimizer_states=True)
        _replace_values(optimizer, restore_frozen)
    if path is not None and rest is not source:  # not the temporary file without frozen parameters
        path = str(Path(load_dir, tag, Path(path).name))
    return path, *others


def _read_tag(latest: Path) -> str | None:
    return latest.read_text(encoding="utf-8").strip() if latest.is_file() else None


def _replace_values(optimizer: ZeroOptimizer, load: Callable[[], None]) -> None:
    """Load values on every rank; if one fails, they are torn on all, which differ then.

    Raises:
        CheckpointError: It failed on another rank.
        StoreError: The drive failed.
    """
    try:
        on_every_rank(load)
    except BaseException:
        optimizer.steps.current.note_load()
        raise


def _check_states(optimizer: ZeroOptimizer) -> None:
    """Check that the last step has ended.

    Raises:
        TornStepError: A step or a load ended half-way.
    """
    optimizer.finish_walk()
    optimizer.steps.current.check()


def _loads_with_states(optimizer: ZeroOptimizer) -> Loads:
    if optimizer.upstream.uses_muon and not optimizer.steps.is_tiled:
        log.warning("memascend: Muon's optimizer state is reset, as in stock DeepSpeed")
        return Loads.WEIGHTS
    return Loads.ALL
