"""The tensor store: reads and writes of CPU tensors by key, on SSD, past the page cache.

A thin, typed wrapper of `_core.Store`, which documents the rules: a write without an offset is the
whole key, overlapping transfers on one key keep their order, and memory in flight must stay alive
(pass its owner as `hold`). Knows torch tensors and volumes; nothing of parameters, pools or
DeepSpeed.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  imported first: its exit hook then runs after ours
import errno
import logging
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from memascend import _core
from memascend.base.interfaces import TensorIO, TensorRequest, contiguous_cpu
from memascend.errors import MemAscendError, StoreError
from memascend.system.mounts import COPY_ON_WRITE_FIX

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# Errors of the drive itself, independent of the directory.
DRIVE_CODES = (errno.EIO, errno.ENODEV, errno.ENXIO, errno.EROFS, errno.ESTALE, errno.ETIMEDOUT)
_EXCHANGED = "a symbolic link took its place, or that of a folder above it, after the check"

#: Registers a function to run before the interpreter joins threads, which may wait for a drive; on
#: a Python without that hook it runs at exit, after the join.
_BEFORE_THREADS_END = getattr(threading, "_register_atexit", atexit.register)

Ticket = _core.Ticket
VolumeOptions = _core.VolumeOptions
MemoryFaults = _core.MemoryFaults


class TensorStore(TensorIO):
    """Named tensors on SSD.

    Thread-safe. Space is found when a key is reserved or first written, never later. No file
    remains, even of a killed process: the volumes are anonymous files.
    """

    def __init__(
        self,
        *,
        volumes: Sequence[str | Path | VolumeOptions],
        bounce: torch.Tensor,
        engine: str = "auto",
        queue_depth: int = 64,
        chunk_bytes: int = 2 * 1024 * 1024,
        watchdog_seconds: float = 60.0,
        eio_retries: int = 2,
        verify: str = "off",
        checksum_memory: _core.Allocator | None = None,
        faults: MemoryFaults | None = None,
    ) -> None:
        """Open one anonymous file in each volume's directory, and the engine.

        Args:
            volumes: Directories to keep the data in, or the result of `volumes.prepare`. Tensors
                are striped over several by their weights.
            bounce: Page-aligned host memory for unaligned heads and tails, best a few mebibytes;
                belongs to the store until it is closed.
            engine: "auto", "uring", "libaio" or "threads" ("memory" in tests).
            queue_depth: Requests in flight at once on each volume.
            chunk_bytes: Bytes of one request.
            watchdog_seconds: Seconds without a completion before a drive is reported on stderr.
            eio_retries: Retries after EIO of the device; no other error is retried.
            verify: "off"; "reads": compare data read with checksums; "full": writes, too.
            checksum_memory: Arena of the checksums, 4 bytes for each 64 KiB under keys; None:
                memory of the process.
            faults: Faults to inject, on the memory engine.

        Raises:
            StoreError: A directory is missing or cannot be written.
            EngineUnavailableError: The engine asked for cannot run here.
        """
        options = [
            volume if isinstance(volume, VolumeOptions) else VolumeOptions(os.path.realpath(volume))
            for volume in volumes
        ]
        paths = [volume.path for volume in options]
        with _naming(paths):
            self._core = _core.Store(
                volumes=options,
                engine=engine,
                queue_depth=queue_depth,
                chunk_bytes=chunk_bytes,
                watchdog_seconds=watchdog_seconds,
                eio_retries=eio_retries,
                verify=verify,
                checksum_memory=checksum_memory,
                bounce_address=contiguous_cpu(bounce).data_ptr(),
                bounce_nbytes=bounce.nbytes,
                bounce_hold=bounce,
                faults=faults,
            )
        self._finalizer = weakref.finalize(self, self._core.close)
        _end_with_program(self._core)
        self._log_opened(paths, verify)

    def _log_opened(self, paths: Sequence[str], verify: str) -> None:
        logger.info(
            "nvme: engine %s (%s; %s), %s, blocks of %d bytes, verify %s, in %s",
            self._core.engine_name,
            self._core.engine_reason,
            self._core.engine_description,
            "direct I/O" if self._core.direct else "buffered I/O: no direct I/O here",
            self._core.offset_alignment_bytes,
            verify,
            ", ".join(paths),
        )
        for volume in self._core.volume_stats():
            if volume.copies_on_write:
                logger.warning(
                    "%s is on a file system that copies what is overwritten: a step may find the "
                    "disk full though its space was reserved, and I/O goes through the page cache\n"
                    "fix: %s",
                    volume.path,
                    COPY_ON_WRITE_FIX,
                )

    @property
    def core(self) -> _core.Store:
        """The native store below, for callers that have addresses instead of tensors."""
        return self._core

    def reserve(self, *, key: str, nbytes: int) -> None:
        """Reserve space on the volumes."""
        self._core.reserve(key=key, nbytes=nbytes)

    def start_write(self, request: TensorRequest) -> Ticket:
        """Start a write in the native store, which checks that it is within the key."""
        return self._core.write(
            key=request.key,
            address=request.tensor.data_ptr(),
            nbytes=request.nbytes,
            offset=request.offset_bytes,
            capacity=request.capacity_bytes,
            hold=(request.tensor, request.hold),
        )

    def start_read(self, request: TensorRequest) -> Ticket:
        """Start a read in the native store, which checks that it is within the key."""
        return self._core.read(
            key=request.key,
            address=request.tensor.data_ptr(),
            nbytes=request.nbytes,
            offset=request.begin,
            capacity=request.capacity_bytes,
            hold=(request.tensor, request.hold),
        )

    def discard(self, *, key: str) -> bool:
        """Remove a key once its I/O has finished; False if there is none."""
        return self._core.discard(key=key)

    def shrink(self) -> None:
        """Give the space that no key has back to the file systems."""
        self._core.shrink()

    def wait_all(self) -> None:
        """Return when nothing is in flight; tickets keep their errors."""
        self._core.wait_all()

    def exchange(self, *, key: str, other: str) -> None:
        """Exchange the contents of two keys, with their transfers in flight, without waiting.

        Raises:
            StoreError: One of the keys does not exist; nothing was changed.
            ValueError: The keys differ in size.
        """
        self._core.exchange(key=key, other=other)

    def contains(self, *, key: str) -> bool:
        """Return whether the key is reserved or written."""
        return self._core.contains(key=key)

    def nbytes(self, *, key: str) -> int:
        """Return the size of a key."""
        return self._core.nbytes(key=key)

    def keys(self) -> list[str]:
        """Return all keys, sorted."""
        return self._core.keys()

    def stats(self) -> dict[str, int | float]:
        """Return the counters since the store was opened; see `_core.Store.stats`."""
        return self._core.stats()

    def close(self) -> None:
        """Wait for everything in flight, then free the space. Also called at exit.

        Raises:
            StoreError: At exit, a drive was silent for too long.
        """
        self._finalizer()

    def __enter__(self) -> TensorStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _end_with_program(core: _core.Store) -> None:
    """Make the program end even if a drive does not complete its requests."""
    try:
        _BEFORE_THREADS_END(partial(_end_patience, weakref.ref(core)))
    except RuntimeError:  # it is ending already
        core.end_patience()


def _end_patience(found: weakref.ref[_core.Store]) -> None:
    core = found()
    if core is not None:
        core.end_patience()


def describe_recovery(folder: str | None) -> str:
    """Return advice for a message about wrong data on a drive; `folder` is the last checkpoint."""
    if folder is None:
        return (
            "then start the run again: no checkpoint is at hand, since this run has neither saved "
            "nor loaded one"
        )
    parent, tag = os.path.split(folder)
    return (
        f"then resume from the last complete checkpoint, {folder}: start the run again with "
        f"engine.load_checkpoint({parent!r}, tag={tag!r}), or with resume_from_checkpoint where a "
        "trainer saved it"
    )


def volume_error(path: str, verb: str, code: int, *, cause: str = "", fix: str = "") -> StoreError:
    """Return the error for a volume; an empty cause or fix is derived from the errno."""
    advice = _core.describe_cause(code=code)
    if cause or code not in DRIVE_CODES:
        cause = cause or "memascend.volumes or nvme_path is misspelt, not mounted, or not yours"
        fix = fix or "name a directory on a local disk that you can write"
        advice = f"\nlikely cause: {cause}\nfix: {fix}"
    error = StoreError(code, f"cannot {verb} the volume {path}: {os.strerror(code)}{advice}")
    error.volume = path
    return error


@contextmanager
def _naming(paths: Sequence[str]) -> Iterator[None]:
    """Convert a system error to a StoreError that names the volumes and the remedy."""
    try:
        yield
    except OSError as error:
        if isinstance(error, MemAscendError):
            raise
        code = error.errno or errno.EIO
        cause = _EXCHANGED if code == errno.ELOOP else ""
        raise volume_error(", ".join(paths), "use", code, cause=cause) from error
