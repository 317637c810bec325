"""Finds and verifies a checkpoint for the optimizer of an engine, in any division.

A checkpoint with the same number of ranks and the same sub-groups is read directly. Any other one
is assembled by parameter name (checkpoint/divided.py), and so is a universal one
(checkpoint/universal.py). The model changes only after every rank has verified its files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspeed import comm as dist

from memascend.base.progress import Advance, byte_progress
from memascend.checkpoint.divided import SavedLayout, open_divided, read_parameters
from memascend.checkpoint.folder import clean
from memascend.checkpoint.layout import NamedParameter, SubGroups, flat
from memascend.checkpoint.manifest import FileEntry, manifest_name, missing_file, read_manifest
from memascend.checkpoint.source import (
    CheckpointSource,
    RankFiles,
    TargetOptimizer,
    check_folder,
    open_source,
    read_zero_states,
    saved_world,
    verify,
)
from memascend.checkpoint.universal import open_universal, universal_files, verify_universal
from memascend.deepspeed.checkpoint.every_rank import on_every_rank, rank_of
from memascend.deepspeed.older_releases import model_parallel_rank
from memascend.errors import CheckpointError

if TYPE_CHECKING:
    from memascend.deepspeed.optimizer.optimizer import ZeroOptimizer
    from memascend.deepspeed.optimizer.upstream import Upstream

log = logging.getLogger(__name__)


@contextmanager
def opened(
    engine: Any, optimizer: ZeroOptimizer, load_dir: str, tag: str
) -> Iterator[CheckpointSource]:
    """Open a checkpoint after every rank has verified it; the model is unchanged so far.

    Raises:
        CheckpointError: It is damaged, incomplete, or of another model, here or on another rank.
    """
    opener = _Opener(engine, optimizer, load_dir, tag)
    if engine.load_universal_checkpoint():
        source = on_every_rank(opener.open_universal)
    else:
        on_every_rank(opener.put_back)
        source = on_every_rank(opener.open)
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
        """The number of this rank among those that share the optimizer."""
        return int(dist.get_rank(group=self.optimizer.upstream.process_group))

    @property
    def world(self) -> int:
        return int(dist.get_world_size(group=self.optimizer.upstream.process_group))

    @property
    def leads(self) -> bool:
        return rank_of(self.engine) == 0

    def put_back(self) -> None:
        """Rename a checkpoint back, if a save was killed between its two renames."""
        if self.leads and not self.folder.is_dir() and self.folder.parent.is_dir():
            clean(self.folder.parent)

    # -- as it was saved, or divided anew ---------------------------------------------------------

    def open(self) -> CheckpointSource:
        check_folder(self.folder)
        target = target_of(self.optimizer.upstream)
        world = self._saved_world()
        parameters = self._saved_parameters(world)
        if world == self.world and not _is_divided_otherwise(parameters, target.parameters):
            own = self._part(rank_of(self.engine), self.rank, world)
            self._verify([own])
            return open_source(own, target)
        if parameters is None:
            raise self._other_world(world)
        return self._open_divided(target, parameters, world)

    def _open_divided(
        self, target: TargetOptimizer, parameters: SubGroups, world: int
    ) -> CheckpointSource:
        # Check the last rank's file first: the number of ranks is only a claim of a file.
        if not self._states(world - 1).is_file():
            raise missing_file(self._states(world - 1))
        saved = SavedLayout(parameters, [self._part(rank, rank, world) for rank in range(world)])
        self._verify(saved.ranks)
        if self.leads:
            log.info(
                "memascend: %s was saved by %d ranks in %d sub-groups, and is divided anew between "
                "%d ranks in %d sub-groups",
                self.folder,
                world,
                len(parameters),
                self.world,
                len(target.parameters),
            )
        source = open_divided(saved, target, rank=self.rank, world=self.world)
        return replace(source, model_states=self._model_states(self.rank % world))

    def _saved_parameters(self, world: int) -> SubGroups | None:
        """Return the parameters of each saved sub-group; None if it cannot be divided anew."""
        path = self._model_states(self.rank % world)
        if not self._may_divide or (world == self.world and not path.is_file()):
            return None
        return read_parameters(path)

    @property
    def _may_divide(self) -> bool:
        """True if all ranks' files are in this folder, under the numbers of the ranks."""
        return not self.engine.use_node_local_storage() and self.engine.mp_world_size == 1

    def _saved_world(self) -> int:
        """Return how many ranks saved it, from this rank's files or those of the first rank."""
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
        return saved_world(read_zero_states(path), self.world)

    def _verify(self, parts: Sequence[RankFiles]) -> None:
        """Read this rank's share of all files that have a checksum."""
        entries: dict[str, FileEntry] = {}
        for part in parts:
            if part.manifest is None:
                if not part.states.is_file():
                    raise missing_file(part.states)
                continue
            if part.manifest.world != part.world:
                raise CheckpointError(
                    f"checkpoint {self.folder}: {manifest_name(part.rank)} is of a checkpoint of "
                    f"{part.manifest.world} ranks, the others of {part.world}. Likely cause: files "
                    "of several checkpoints in one folder. Copy it again, or load another tag"
                )
            entries |= {entry.name: entry for entry in part.manifest.files}
        if parts[0].manifest is None and self.leads:
            log.warning(
                "memascend: %s has no %s: it was saved without memascend, and only the sizes of "
                "its files can be checked",
                self.folder,
                manifest_name(parts[0].rank),
            )
        share = list(entries.values())
        if len(parts) > 1:
            share = share[self.rank :: self.world]
        with self._progress(sum(entry.nbytes for entry in share)) as advance:
            verify(self.folder, share, advance)

    # -- universal -------------------------------------------------------------------------------

    def open_universal(self) -> CheckpointSource:
        check_folder(self.folder)
        target = target_of(self.optimizer.upstream)
        share = universal_files(self.folder, target)[self.rank :: self.world]
        with self._progress(sum(path.stat().st_size for path in share)) as advance:
            verify_universal(share, advance)
        return open_universal(self.folder, target, rank=self.rank, world=self.world)

    # -- files -----------------------------------------------------------------------------------

    def _progress(self, nbytes: int) -> AbstractContextManager[Advance]:
        return byte_progress(f"verifying checkpoint {self.folder}", nbytes, leads=self.leads)

    def _part(self, number: int, rank: int, world: int) -> RankFiles:
        """Return a rank's files; `number` is its number in the names of its tensors' folder."""
        manifest = read_manifest(self.folder, number)
        return RankFiles(self.folder, number, world, self._states(rank), manifest)

    def _states(self, rank: int) -> Path:
        """Return a rank's optim_states.pt, also one saved in the other 16-bit format."""
        is_bf16 = self.engine.bfloat16_enabled()
        names: Callable[..., str] = self.engine._get_rank_zero_ckpt_name
        number = model_parallel_rank(self.engine)
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
            "It cannot be divided anew with use_node_local_storage, with model parallelism, or if "
            "its model_states.pt does not name the parameters. Load it "
            f"with {world} ranks"
        )


def _is_divided_otherwise(saved: SubGroups | None, wanted: SubGroups) -> bool:
    """Return whether a checkpoint of the same number of ranks must be assembled by name.

    One with other names but the same sizes is that of a wrapped model, and is read directly.
    """
    if saved is None or saved == wanted:
        return False
    is_same_model = set(flat(saved)) == set(flat(wanted))
    return is_same_model or list(map(len, saved)) != list(map(len, wanted))


def target_of(upstream: Upstream) -> TargetOptimizer:
    """Describe a live optimizer, to be restored from a checkpoint."""
    parameters = tuple(
        tuple(NamedParameter(upstream.name_of(param), param.ds_numel) for param in group)
        for group in upstream.params
    )
    return TargetOptimizer(
        names=upstream.names,
        numels=list(upstream.numels),
        group_count=len(upstream.base.param_groups),
        kind=type(upstream.base).__name__,
        master_dtype=upstream.master_dtype,
        parameters=parameters,
        groups=[upstream.group_number(number) for number in range(len(parameters))],
        ids={upstream.name_of(param): param.ds_id for param in upstream.all_params},
    )
