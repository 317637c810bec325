"""Saves and loads frozen parameters that are on the drive.

DeepSpeed saves each rank's part of every parameter without an optimizer in `model_states.pt`, from
host memory. For a parameter on the drive that is a placeholder. Here the parts are streamed between
the store and that file, and none is ever in memory as a whole. Any dtype is allowed.
"""

from __future__ import annotations

import functools
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS

from memascend.checkpoint.source import CheckpointSource, read_torch_file
from memascend.checkpoint.torch_file import StreamedTensor, Write
from memascend.deepspeed.checkpoint.every_rank import rank_of
from memascend.deepspeed.parameters.gather import swapper_of
from memascend.transfer.staging import StagingSlots

log = logging.getLogger(__name__)


def frozen_parameters(engine: Any) -> dict[str, Any]:
    """Return all frozen parameters by name; an empty dict if none of them is on the drive.

    Without a budget small ones are in host memory, others on the drive.
    """
    every = engine._get_zero_frozen_param_attributes(lambda param: param)
    every = {name: param for name, param in every.items() if param.ds_numel > 0}
    return every if any(map(_is_on_drive, every.values())) else {}


def _is_on_drive(param: Any) -> bool:
    return swapper_of(param) is not None and param.ds_tensor.final_location == "nvme"


# -- saving --------------------------------------------------------------------------------------


def put_in(content: dict[str, Any], frozen: dict[str, Any], slots: StagingSlots) -> int:
    """Replace placeholders of frozen parameters by streamed tensors; return the added bytes.

    The content of model_states.pt is unchanged if it leaves frozen parameters out.
    """
    fragments = content.get(FROZEN_PARAM_FRAGMENTS)
    if not fragments:
        return 0
    nbytes = 0
    for name, param in frozen.items():
        if not _is_on_drive(param):
            continue
        swapper = swapper_of(param)
        assert swapper is not None
        count, dtype = param.ds_tensor.ds_numel, param.ds_tensor.dtype
        write = functools.partial(_copy, slots, swapper.key(param), count * dtype.itemsize)
        fragments[name] = StreamedTensor(numel=count, dtype=dtype, write=write)
        nbytes += fragments[name].nbytes
    return nbytes


def _copy(slots: StagingSlots, key: str, nbytes: int, append: Write) -> None:
    for staged in slots.stream(key=key, nbytes=nbytes):
        append(staged.numpy())


# -- loading -------------------------------------------------------------------------------------


@contextmanager
def taken_apart(
    engine: Any, source: CheckpointSource, load_dir: str, tag: str
) -> Iterator[tuple[CheckpointSource, Callable[[], None]]]:
    """Separate a checkpoint's frozen parameters from the rest, if some are on the drive.

    Yields the source that upstream loads, and a function that then restores the frozen parameters.

    Raises:
        CheckpointError: A file cannot be read.
    """
    frozen = frozen_parameters(engine)
    files = list(_files(engine, load_dir, tag)) if frozen else []
    if not files:
        yield source, lambda: None
        return
    # The file that upstream would load.
    number = 0 if engine.load_universal_checkpoint() else rank_of(engine) % len(files)
    own = source.model_states or files[number]
    content = read_torch_file(own)
    if not content.get(FROZEN_PARAM_FRAGMENTS):
        yield source, lambda: None
        return
    with tempfile.TemporaryDirectory(prefix="memascend-") as folder:
        rest = Path(folder) / own.name
        torch.save({**content, FROZEN_PARAM_FRAGMENTS: None}, rest)
        del content
        yield (
            replace(source, model_states=rest),
            functools.partial(_restore, engine, frozen, files),
        )


def _files(engine: Any, load_dir: str, tag: str) -> Iterator[Path]:
    """Yield the model_states.pt of every saved rank; with node-local storage only this rank's."""
    if engine.use_node_local_storage():
        yield Path(engine._get_ckpt_name(load_dir, tag))
        return
    rank = 0
    while (path := Path(engine._get_ckpt_name(load_dir, tag, pp_placeholder=str(rank)))).is_file():
        yield path
        rank += 1


def _restore(engine: Any, frozen: dict[str, Any], files: Sequence[Path]) -> None:
    """Store the values of frozen parameters, from the parts of all saved ranks."""
    saved = [read_torch_file(path)[FROZEN_PARAM_FRAGMENTS] or {} for path in files]
    optimizer = engine.optimizer
    optimizer.upstream.partition_parameters()  # gathered parameters have the old values
    optimizer.steps.current.note_load()
    rank = dist.get_rank(group=optimizer.upstream.process_group)
    is_own = engine.use_node_local_storage()
    missing = []
    for name, param in frozen.items():
        count, dtype = param.ds_tensor.ds_numel, param.ds_tensor.dtype
        # Placeholders, as saved by stock, have another size.
        part_numel = count if is_own else -(-param.ds_numel // len(saved))
        parts = [fragments[name] for fragments in saved if name in fragments]
        if [part.numel() for part in parts] != [part_numel] * len(saved):
            missing.append(name)
            continue
        begin = 0 if is_own else rank * count
        if not _is_on_drive(param):
            shard = param.ds_tensor.data
            _fill(parts, shard.dtype, begin, 0, shard.view(torch.uint8))
            continue
        swapper = swapper_of(param)
        assert swapper is not None
        runtime = optimizer.attachment.runtime
        with runtime.lock:
            runtime.staging.fill(
                key=swapper.key(param),
                nbytes=count * dtype.itemsize,
                source=functools.partial(_fill, parts, dtype, begin),
            )
    optimizer.steps.mend()
    if missing and rank == 0:
        log.warning(
            "memascend: the checkpoint does not have %d of %d frozen parameters (%s), which keep "
            "the values of this run: it was saved without them",
            len(missing),
            len(frozen),
            ", ".join(missing[:3]),
        )


def _fill(
    parts: Sequence[torch.Tensor],
    dtype: torch.dtype,
    begin: int,
    offset_bytes: int,
    target: torch.Tensor,
) -> None:
    """Fill `target` from the concatenation of all parts, which are equally long; then with zeros.

    It begins `offset_bytes` behind this rank's first element, which is `begin`.
    """
    values = target.view(dtype)
    position, numel = begin + offset_bytes // dtype.itemsize, parts[0].numel()
    done = 0
    while done < values.numel():
        number, at = divmod(position + done, numel)
        if number >= len(parts):  # padding of the last rank
            values[done:].zero_()
            return
        count = min(numel - at, values.numel() - done)
        values[done : done + count].copy_(parts[number].view(-1)[at : at + count])
        done += count
