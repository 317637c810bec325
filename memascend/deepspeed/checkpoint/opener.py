"""Finds and verifies a checkpoint for the optimizer of an engine, however it was divided.

One that was saved by as many ranks with the same sub-groups is read as it lies. Another one is put
together by name (divided_source.py), and so is a universal checkpoint (universal_source.py). Until
every rank has found everything nothing of the model changes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspeed import comm as dist

from memascend.checkpoint.divided import Saved, is_same_model, open_divided, read_parameters
from memascend.checkpoint.files import Advance
from memascend.checkpoint.folder import clean
from memascend.checkpoint.layout import NamedParameter, SubGroups
from memascend.checkpoint.manifest import (
    FileEntry,
    Manifest,
    manifest_name,
    missing_file,
    read_manifest,
)
from memascend.checkpoint.progress import byte_progress
from memascend.checkpoint.source import (
    CheckpointSource,
    Place,
    Wanted,
    check_folder,
    load_mapped,
    open_source,
    verify,
)
from memascend.checkpoint.universal import open_universal, universal_files, verify_universal
from memascend.deepspeed.checkpoint.every_rank import rank_of, together
from memascend.errors import CheckpointError

if TYPE_CHECKING:
    from memascend.deepspeed.optimizer.optimizer import ZeroOptimizer

log = logging.getLogger(__name__)


@contextmanager
def opened(
    engine: Any, optimizer: ZeroOptimizer, load_dir: str, tag: str
) -> Iterator[CheckpointSource]:
    """A checkpoint that every rank found sound; nothing of the model has been changed so far.

    Args:
        engine: DeepSpeed's.
        optimizer: What it is for.
        load_dir: Where checkpoints are.
        tag: Which one.

    Raises:
        CheckpointError: It is damaged, incomplete, or of another model, here or on another rank.
    """
    opener = _Opener(engine, optimizer, load_dir, tag)
    if engine.load_universal_checkpoint():
        source = together(engine, opener.open_universal)
    else:
        together(engine, opener.put_back)
        source = together(engine, opener.open)
    try:
        yield source
    finally:
        source.close()


@dataclass(frozen=True, slots=True)
class _Opener:
    """One rank's view of a checkpoint that is to be loaded."""

    engine: Any
    optimizer: ZeroOptimizer
    load_dir: str
    tag: str

    @property
    def folder(self) -> Path:
        return Path(self.load_dir) / self.tag

    @property
    def rank(self) -> int:
        """Among those that share the optimizer."""
        return int(dist.get_rank(group=self.optimizer.dp_process_group))

    @property
    def world(self) -> int:
        return int(dist.get_world_size(group=self.optimizer.dp_process_group))

    @property
    def leads(self) -> bool:
        return rank_of(self.engine) == 0

    def put_back(self) -> None:
        """Of a save that was killed while it replaced this tag on a simple file system."""
        if self.leads and not self.folder.is_dir() and self.folder.parent.is_dir():
            clean(self.folder.parent)

    # -- as it was saved, or divided anew ---------------------------------------------------------

    def open(self) -> CheckpointSource:
        check_folder(self.folder)
        wanted = wanted_of(self.optimizer)
        world = self._saved_world()
        parameters = self._saved_parameters(world)
        if world == self.world and not _is_divided_otherwise(parameters, wanted.parameters):
            own = self._place(rank_of(self.engine), self.rank, world)
            manifest = read_manifest(self.folder, own.rank)
            self._verify([own], [manifest])
            return open_source(own, manifest, wanted)
        if parameters is None:
            raise self._other_world(world)
        return self._open_divided(wanted, parameters, world)

    def _open_divided(self, wanted: Wanted, parameters: SubGroups, world: int) -> CheckpointSource:
        # Before any work is done for as many ranks as a file happens to say.
        if not self._states(world - 1).is_file():
            raise missing_file(self._states(world - 1))
        places = [self._place(rank, rank, world) for rank in range(world)]
        manifests = [read_manifest(self.folder, place.rank) for place in places]
        self._verify(places, manifests)
        if self.leads:
            log.info(
                "memascend: %s was saved by %d ranks in %d sub-groups, and is divided anew between "
                "%d ranks in %d sub-groups",
                self.folder,
                world,
                len(parameters),
                self.world,
                len(wanted.parameters),
            )
        saved = Saved(parameters, world, places.__getitem__, manifests.__getitem__)
        source = open_divided(saved, wanted, rank=self.rank, world=self.world)
        return replace(source, model_states=self._model_states(self.rank % world))

    def _saved_parameters(self, world: int) -> SubGroups | None:
        """Which parameters each sub-group had; None where another division is out of question."""
        path = self._model_states(self.rank % world)
        if not self._may_divide or (world == self.world and not path.is_file()):
            return None
        return read_parameters(path)

    @property
    def _may_divide(self) -> bool:
        """Whether all ranks' files are in this folder, under the numbers of the ranks."""
        return not self.engine.use_node_local_storage() and self.engine.mp_world_size == 1

    def _saved_world(self) -> int:
        """How many ranks saved the checkpoint, as this rank's part says, or that of the first."""
        own = rank_of(self.engine)
        has_own = (self.folder / manifest_name(own)).is_file()
        manifest = read_manifest(self.folder, own if has_own or not self._may_divide else 0)
        if manifest is not None:
            return max(1, manifest.world)
        path = self._states(self.rank)
        if not path.is_file() and self._may_divide:
            path = self._states(0)
        if not path.is_file():
            raise missing_file(self._states(self.rank))
        count = load_mapped(path)["optimizer_state_dict"].get("partition_count", self.world)
        return int(max(count) if isinstance(count, list) else count)

    def _verify(self, places: Sequence[Place], manifests: Sequence[Manifest | None]) -> None:
        """Reads this rank's share of all files that have a checksum."""
        entries: dict[str, FileEntry] = {}
        for place, manifest in zip(places, manifests, strict=True):
            if manifest is None:
                if not place.states.is_file():
                    raise missing_file(place.states)
                continue
            if manifest.world != place.world:
                raise CheckpointError(
                    f"checkpoint {self.folder}: {manifest_name(place.rank)} is of a checkpoint of "
                    f"{manifest.world} ranks, others are of {place.world}. Likely cause: files of "
                    "several checkpoints in one folder. Copy it again, or load another tag"
                )
            entries |= {entry.name: entry for entry in manifest.files}
        if manifests[0] is None and self.leads:
            log.warning(
                "memascend: %s has no %s: it was saved without memascend, and only the sizes of "
                "its files can be checked",
                self.folder,
                manifest_name(places[0].rank),
            )
        share = list(entries.values())
        if len(places) > 1:
            share = share[self.rank :: self.world]
        with self._progress(sum(entry.nbytes for entry in share)) as advance:
            verify(self.folder, share, advance)

    # -- universal -------------------------------------------------------------------------------

    def open_universal(self) -> CheckpointSource:
        check_folder(self.folder)
        wanted = wanted_of(self.optimizer)
        share = universal_files(self.folder, wanted)[self.rank :: self.world]
        with self._progress(sum(path.stat().st_size for path in share)) as advance:
            verify_universal(share, advance)
        return open_universal(self.folder, wanted, rank=self.rank, world=self.world)

    # -- files -----------------------------------------------------------------------------------

    def _progress(self, nbytes: int) -> AbstractContextManager[Advance]:
        return byte_progress(f"verifying checkpoint {self.folder}", nbytes, leads=self.leads)

    def _place(self, number: int, rank: int, world: int) -> Place:
        """The part of a rank; `number` is upstream's in the folder of the tensors' files."""
        return Place(folder=self.folder, rank=number, world=world, states=self._states(rank))

    def _states(self, rank: int) -> Path:
        """A rank's optim_states.pt, also one that was saved in the other 16-bit format."""
        is_bf16 = self.engine.bfloat16_enabled()
        names: Callable[..., str] = self.engine._get_rank_zero_ckpt_name
        number = self.engine.checkpoint_mp_rank
        paths = [
            Path(names(self.load_dir, self.tag, number, rank, bf16_mode))
            for bf16_mode in (is_bf16, not is_bf16)
        ]
        return next((path for path in paths if path.is_file()), paths[0])

    def _model_states(self, rank: int) -> Path:
        name = self.engine._get_ckpt_name(self.load_dir, self.tag, pp_placeholder=str(rank))
        return Path(name)

    def _other_world(self, world: int) -> CheckpointError:
        return CheckpointError(
            f"checkpoint {self.folder} was saved by {world} ranks and is loaded by {self.world}. "
            "It cannot be divided anew with use_node_local_storage, with a model that is parallel "
            "otherwise too, or where its model_states.pt does not name the parameters. Load it "
            f"with {world} ranks"
        )


def _is_divided_otherwise(saved: SubGroups | None, wanted: SubGroups) -> bool:
    """Whether a checkpoint of as many ranks has to be put together by name.

    One with other names but the same sizes is that of a wrapped model, and is read as it lies.
    """
    if saved is None or saved == wanted:
        return False
    return is_same_model(saved, wanted) or list(map(len, saved)) != list(map(len, wanted))


def wanted_of(optimizer: ZeroOptimizer) -> Wanted:
    """What a live optimizer wants of a checkpoint."""
    names = optimizer.param_names
    parameters = tuple(
        tuple(NamedParameter(names[param], param.ds_numel) for param in group)
        for group in optimizer.fp16_groups
    )
    return Wanted(
        names=[parameter.ds_id for parameter in optimizer.fp32_partitioned_groups_flat],
        numels=list(optimizer.fp16_partitioned_groups_flat_numel),
        group_count=len(optimizer.optimizer.param_groups),
        kind=type(optimizer.optimizer).__name__,
        master_dtype=optimizer.master_weights_and_grads_dtype,
        parameters=parameters,
        groups=[optimizer.sub_group_to_group_id[index] for index in range(len(parameters))],
        ids={names[param]: param.ds_id for group in optimizer.fp16_groups for param in group},
    )
