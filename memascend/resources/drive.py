"""The drive of a runtime: our store, or stock DeepSpeed's engine. Both answer the same questions.

Knows keys, volumes and wear; never DeepSpeed.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from memascend.base.components import BOUNCE_BUFFERS, RESIDENT_CACHE
from memascend.base.interfaces import TensorIO
from memascend.base.sizes import BOUNCE_BYTES
from memascend.base.streams import GRADIENTS, MASTER, PARAMETERS, STATE
from memascend.config.block import MemAscendConfig
from memascend.config.environment import local_world_size
from memascend.ledger.traffic import VolumeTraffic, traffic_of
from memascend.ledger.wear import Wear, WearMeter
from memascend.nvme.resident import ResidentStore
from memascend.nvme.store import TensorStore, describe_recovery
from memascend.resources.host import Host
from memascend.volumes.prepare import prepared

#: The stream of a key, by its prefix before the first dot.
STREAM_OF_PREFIX = {
    "param": PARAMETERS,
    "gradient": GRADIENTS,
    "master": MASTER,
    "low": MASTER,
    "state": STATE,
}


def stream_of(key: str) -> str | None:
    """Return the stream that a key of the store belongs to; None if no plan counts it."""
    return STREAM_OF_PREFIX.get(key.partition(".")[0])


class OwnDrive:
    """The store: the section `direct_nvme` is on."""

    is_ours = True

    def __init__(self, config: MemAscendConfig, directory: str, host: Host) -> None:
        """Open the store.

        Args:
            config: The block.
            directory: A directory on the drive, for a block without `volumes`.
            host: Source of bounce buffers, checksums and the resident cache.

        Raises:
            StoreError: A directory is missing or cannot be written.
        """
        section = config.direct_nvme
        bounce = host.memory.tensor(BOUNCE_BYTES, torch.uint8, component=BOUNCE_BUFFERS)
        with prepared(config, directory) as volumes:
            store = TensorStore(
                volumes=volumes,
                bounce=bounce,
                engine=section.engine or "auto",
                queue_depth=section.queue_depth,
                chunk_bytes=section.chunk_bytes,
                eio_retries=section.eio_retries,
                verify=config.verify,
                checksum_memory=host.checksum_memory,
            )
        store.core.set_recovery(describe_recovery(None))
        self.store = ResidentStore(store, stream_of=stream_of)
        self._host = host
        self._wear = WearMeter(
            endurance_bytes=config.wear.endurance,
            budget_bytes=config.wear.write_budget,
            ranks=local_world_size(),
        )

    @property
    def io(self) -> TensorIO:
        """Reads and writes tensors by key."""
        return self.store

    # -- the plan --------------------------------------------------------------------------------

    def make_way(self, resident: Mapping[str, int]) -> None:
        """Move all resident keys to the drive, unless just these bytes are granted already.

        Raises:
            StoreError: The drive failed or is full.
        """
        if self.store.granted != resident:
            self.store.revoke()

    def provide_checksums(self, nbytes: int) -> None:
        """Take the memory of checksums.

        Raises:
            HostMemoryError: There is not enough memory.
        """
        self.store.core.provide_checksums(nbytes=nbytes)

    def grant(self, resident: Mapping[str, int]) -> None:
        """Take the memory of resident keys, unless just these bytes are granted already.

        Raises:
            HostMemoryError: There is not enough memory.
            StoreError: The drive failed.
        """
        if self.store.granted != resident:
            self.store.grant(
                self._host.reduced(resident), memory=self._host.memory, component=RESIDENT_CACHE
            )

    # -- the account -----------------------------------------------------------------------------

    def stats(self) -> dict[str, int | float]:
        """Return the counters of the store."""
        return self.store.stats()

    def volumes(self) -> Sequence[VolumeTraffic]:
        """Return the traffic of each volume."""
        return traffic_of(self.store.core)

    def free_bytes(self) -> int | None:
        """Return the bytes that are left for other files; None: no volume is in a file system."""
        paths = [Path(volume.path) for volume in self.store.core.volume_stats()]
        folders = {path.stat().st_dev: path for path in paths if path.is_dir()}
        free = [shutil.disk_usage(path).free for path in folders.values()]
        return sum(free) if free else None

    def read_wear(self) -> Wear | None:
        """Return the account of writes so far."""
        return self._wear.read(self._written_bytes())

    def note_step(self) -> Wear | None:
        """Count an optimizer step; return the account, once, when the write budget is exceeded."""
        return self._wear.note_step(self._written_bytes())

    def _written_bytes(self) -> int:
        return int(self.store.stats()["bytes_written"])

    def note_checkpoint(self, folder: str) -> None:
        """Note the last complete checkpoint, for errors about corrupted data."""
        self.store.core.set_recovery(describe_recovery(folder))

    def describe(self) -> str:
        """Return the engine that was obtained, for the log."""
        core = self.store.core
        return f"engine {core.engine_name} ({core.engine_description})"

    def close(self) -> None:
        """Wait for transfers and free the space."""
        self.store.close()


class StockDrive:
    """Stock DeepSpeed's engine, of which there is no account: `direct_nvme` is off."""

    is_ours = False
    store: ResidentStore | None = None

    def __init__(self, io: TensorIO | None) -> None:
        """Serve from `io`; None if DeepSpeed's swappers serve everything."""
        self._io = io

    @property
    def io(self) -> TensorIO:
        """Reads and writes tensors by key, whole keys only."""
        if self._io is None:
            raise AssertionError("direct_nvme is off and nothing was given instead")
        return self._io

    def make_way(self, resident: Mapping[str, int]) -> None:
        """Do nothing: no key is resident."""

    def provide_checksums(self, nbytes: int) -> None:
        """Do nothing: nothing is verified."""

    def grant(self, resident: Mapping[str, int]) -> None:
        """Do nothing: no key is resident."""

    def stats(self) -> dict[str, int | float]:
        """Return nothing."""
        return {}

    def volumes(self) -> Sequence[VolumeTraffic]:
        """Return nothing."""
        return ()

    def free_bytes(self) -> int | None:
        """Return None: it is not known where DeepSpeed's files are."""
        return None

    def read_wear(self) -> Wear | None:
        """Return None: writes are not counted."""
        return None

    def note_step(self) -> Wear | None:
        """Return None: writes are not counted."""
        return None

    def note_checkpoint(self, folder: str) -> None:
        """Do nothing: DeepSpeed's engine raises no error about corrupted data."""

    def describe(self) -> str:
        """Return the engine, for the log."""
        return "engine DeepSpeed aio"

    def close(self) -> None:
        """Do nothing: the files go with the process."""


Drive = OwnDrive | StockDrive
