"""`engine.save_checkpoint` and `engine.load_checkpoint` of models whose optimizer is on a drive.

Upstream's own functions do what they do for any ZeRO-3 optimizer. Around them a save is atomic, and
the optimizer's tensors go straight from the store into the checkpoint; a load verifies everything
first and takes them straight back. What upstream does for NVMe alone (copying a folder of files) is
skipped: during both, the engine says that its optimizer is not on NVMe.

A model whose optimizer is elsewhere, or without a block, gets upstream's functions unchanged.
"""

from __future__ import annotations

import errno
import functools
import logging
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from deepspeed import comm as dist

from memascend import _core
from memascend.deepspeed.checkpoint_source import (
    CheckpointSource,
    Place,
    Wanted,
    open_source,
    verify,
)
from memascend.deepspeed.checkpoint_writer import write_rank
from memascend.deepspeed.progress import ByteProgress
from memascend.deepspeed.zero_optimizer import ZeroOptimizer
from memascend.errors import CheckpointError, ConfigError, MemAscendError, WriteBudgetError
from memascend.manifest import manifest_name
from memascend.saving_folder import SavingFolder, clean, write_latest

log = logging.getLogger(__name__)

Result = TypeVar("Result")


# -- seams ---------------------------------------------------------------------------------------


def wrap_save_checkpoint(original: Callable[..., bool]) -> Callable[..., bool]:
    """Replaces `DeepSpeedEngine.save_checkpoint`."""

    @functools.wraps(original)
    def save_checkpoint(
        self: Any,
        save_dir: str,
        tag: object = None,
        client_state: dict[str, Any] = {},  # noqa: B006  upstream's signature
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        def save_as(tag: object, save_latest: bool) -> bool:
            return original(
                self,
                save_dir,
                tag=tag,
                client_state=client_state,
                save_latest=save_latest,
                exclude_frozen_parameters=exclude_frozen_parameters,
            )

        if not save_dir or _optimizer_of(self) is None:
            return save_as(tag, save_latest)
        return _save(self, save_as, str(save_dir), tag, save_latest)

    return save_checkpoint


def wrap_load_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces `DeepSpeedEngine.load_checkpoint`."""

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
        def load(tag: object, load_optimizer_states: bool) -> Any:
            return original(
                self,
                load_dir,
                tag=tag,
                load_module_strict=load_module_strict,
                load_optimizer_states=load_optimizer_states,
                load_lr_scheduler_states=load_lr_scheduler_states,
                load_module_only=load_module_only,
                custom_load_fn=custom_load_fn,
            )

        optimizer = _optimizer_of(self)
        latest = Path(load_dir) / "latest"
        if tag is None and latest.is_file() and optimizer is not None:
            tag = latest.read_text(encoding="utf-8").strip()
        if tag is None or optimizer is None:
            return load(tag, load_optimizer_states)
        with_states = load_optimizer_states and not load_module_only
        if with_states and optimizer.use_muon:
            log.warning("memascend: Muon's optimizer state starts anew, as in stock DeepSpeed")
            with_states = False
        with (
            _opened(self, optimizer, str(load_dir), str(tag)) as source,
            optimizer.checkpointing(source, with_states=with_states),
        ):
            # Without optimizer states upstream would gather all weights in fp32 on every rank.
            return load(str(tag), True)

    return load_checkpoint


def wrap_zero_nvme_offload_optimizer(original: Callable[..., bool]) -> Callable[..., bool]:
    """Replaces `DeepSpeedEngine.zero_nvme_offload_optimizer`."""

    @functools.wraps(original)
    def zero_nvme_offload_optimizer(self: Any) -> bool:
        optimizer = _optimizer_of(self)
        if optimizer is not None and optimizer.is_checkpointing:
            return False
        return original(self)

    return zero_nvme_offload_optimizer


def wrap_load_zero_checkpoint(original: Callable[..., bool]) -> Callable[..., bool]:
    """Replaces `DeepSpeedEngine._load_zero_checkpoint`, which reads whole files into memory."""

    @functools.wraps(original)
    def _load_zero_checkpoint(self: Any, *arguments: Any, **keywords: Any) -> bool:
        optimizer = _optimizer_of(self)
        if optimizer is not None and optimizer.is_checkpointing:
            optimizer.restore_checkpoint()
            return True
        return original(self, *arguments, **keywords)

    return _load_zero_checkpoint


def _optimizer_of(engine: Any) -> ZeroOptimizer | None:
    """The optimizer whose states are in our store, None where upstream's way is to be taken."""
    optimizer = engine.optimizer
    if not isinstance(optimizer, ZeroOptimizer) or not optimizer.swap_optimizer:
        return None
    return optimizer if optimizer.attachment.runtime.store is not None else None


# -- saving --------------------------------------------------------------------------------------


def _save(
    engine: Any,
    save_as: Callable[[object, bool], bool],
    save_dir: str,
    tag: object,
    save_latest: bool,
) -> bool:
    optimizer: ZeroOptimizer = engine.optimizer
    _refuse(engine)
    tag = str(tag) if tag is not None else f"global_step{engine.global_steps}"
    rank = _rank_of(engine)
    leads = rank == 0
    folder = SavingFolder(save_dir, tag)
    _check_same_tag(engine, tag)
    with naming(folder):
        _together(engine, lambda: folder.begin() if leads else None)
        try:
            with optimizer.checkpointing():
                save_as(folder.tag, False)
            _together(engine, lambda: write_rank(engine, folder, rank, leads=leads))
            _together(engine, lambda: folder.publish() if leads else None)
        except BaseException:
            if leads:
                folder.abandon()
            raise
    if save_latest:
        is_first = engine.global_rank == 0
        _together(engine, lambda: write_latest(save_dir, tag) if is_first else None)
    if leads:
        log.info("memascend: checkpoint %s is complete", folder.target)
    _stop_over_budget(engine, optimizer, folder)
    return True


@contextmanager
def naming(folder: SavingFolder) -> Iterator[None]:
    """Says of the system's errors what they mean for the checkpoint.

    Raises:
        CheckpointError: Instead of an OSError that is not ours.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, MemAscendError):
            raise
        code = error.errno or errno.EIO
        advice = _core.describe_cause(code=code)
        if code == errno.ENOSPC:
            advice = "\nlikely cause: its file system is full\nfix: free space, then save again"
        raise CheckpointError(
            code,
            f"cannot save to {folder.target}: {error.strerror or error}; what was saved before is "
            f"untouched{advice}",
        ) from error


def _stop_over_budget(engine: Any, optimizer: ZeroOptimizer, folder: SavingFolder) -> None:
    """On every rank alike, after a checkpoint that makes it harmless."""
    attachment = optimizer.attachment
    stops = torch.tensor([attachment.is_to_stop()], dtype=torch.int32, device=engine.device)
    dist.all_reduce(stops, op=dist.ReduceOp.MAX)
    wear = attachment.runtime.read_wear()
    if stops.item() and wear is not None:
        raise WriteBudgetError(
            f"stopped by memascend.wear.write_budget: {wear.describe()}. The checkpoint "
            f"{folder.target} is complete. Raise the budget, or take it out, and resume from there"
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


def _check_same_tag(engine: Any, tag: str) -> None:
    """A folder can be renamed once it is complete on all ranks: so it must be one."""
    own = zlib.crc32(tag.encode())
    sums = torch.tensor([own, -own], dtype=torch.int64, device=engine.device)
    dist.all_reduce(sums, op=dist.ReduceOp.MAX)
    if sums.tolist() != [own, -own]:
        raise CheckpointError(
            f"cannot save: the tag is {tag!r} on rank {engine.global_rank} and another one "
            "elsewhere. Give save_checkpoint the same tag on every rank"
        )


# -- loading -------------------------------------------------------------------------------------


@contextmanager
def _opened(
    engine: Any, optimizer: ZeroOptimizer, load_dir: str, tag: str
) -> Iterator[CheckpointSource]:
    """A checkpoint that every rank found sound; nothing of the model has been changed so far."""
    _refuse(engine)
    if engine.load_universal_checkpoint():
        raise ConfigError(
            "checkpoint.load_universal cannot be combined with offload_optimizer.device nvme: "
            'DeepSpeed would load no optimizer state. Set offload_optimizer.device to "cpu"'
        )
    rank = _rank_of(engine)
    folder = Path(load_dir) / tag
    place = Place(
        folder=folder,
        rank=rank,
        world=dist.get_world_size(group=optimizer.dp_process_group),
        states=_states_path(engine, load_dir, tag),
    )
    parameters = optimizer.fp32_partitioned_groups_flat
    wanted = Wanted(
        names=[parameter.ds_id for parameter in parameters],
        numels=list(optimizer.fp16_partitioned_groups_flat_numel),
        group_count=len(optimizer.optimizer.param_groups),
        kind=type(optimizer.optimizer).__name__,
        master_dtype=optimizer.master_weights_and_grads_dtype,
    )

    def put_back() -> None:
        # Of a save that was killed while it replaced this tag on a simple file system.
        if rank == 0 and not folder.is_dir() and folder.parent.is_dir():
            clean(folder.parent)

    def open_verified() -> CheckpointSource:
        slots = optimizer.attachment.runtime.staging
        sized = [path for path in (place.states, *place.tensors.glob("*")) if path.is_file()]
        nbytes = sum(path.stat().st_size for path in sized)
        title = f"verifying checkpoint {folder}"
        with ByteProgress(title, nbytes, leads=rank == 0) as progress:
            manifest = verify(place, slots, progress.advance)
        if manifest is None and rank == 0:
            log.warning(
                "memascend: %s has no %s: it was saved without memascend, and only the sizes of "
                "its files can be checked",
                folder,
                manifest_name(rank),
            )
        return open_source(place, manifest, wanted)

    _together(engine, put_back)
    source = _together(engine, open_verified)
    try:
        yield source
    finally:
        source.close()


def _states_path(engine: Any, load_dir: str, tag: str) -> Path:
    """This rank's optim_states.pt, also one that was saved in the other 16-bit format."""
    rank = dist.get_rank(group=engine.optimizer.dp_process_group)
    is_bf16 = engine.bfloat16_enabled()
    paths = [
        Path(
            engine._get_rank_zero_ckpt_name(
                load_dir, tag, engine.checkpoint_mp_rank, rank, bf16_mode
            )
        )
        for bf16_mode in (is_bf16, not is_bf16)
    ]
    return next((path for path in paths if path.is_file()), paths[0])


# -- every rank ----------------------------------------------------------------------------------


def _rank_of(engine: Any) -> int:
    """The number under which upstream saves a rank's tensors."""
    return int(engine.local_rank if engine.use_node_local_storage() else engine.global_rank)


def _together(engine: Any, action: Callable[[], Result]) -> Result:
    """Does something on every rank; an error of one is an error of all, and nobody waits forever.

    Raises:
        CheckpointError: It failed on another rank.
    """
    error: BaseException | None = None
    result: Any = None
    try:
        result = action()
    except Exception as raised:
        error = raised
    failed = torch.tensor([error is not None], dtype=torch.int32, device=engine.device)
    dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    if error is not None:
        raise error
    if failed.item():
        raise CheckpointError(
            "the checkpoint failed on another rank, whose own message says why; this rank gave up "
            "with it"
        )
    return result  # type: ignore[no-any-return]
