"""The tensor store: reads and writes of CPU tensors by key, on SSD, past the page cache.

A thin, typed face of `_core.Store`, which documents the rules: a write without an offset is the
whole key, transfers on one key keep their order where they overlap, and memory in flight must stay
alive (pass its owner as `hold`). Knows torch tensors and volumes; nothing of parameters, pools
or DeepSpeed.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  what it registers is called behind what we do
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
from memascend.errors import MemAscendError, StoreError
from memascend.system.mounts import COPY_ON_WRITE_FIX

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# Errors of a drive itself, whatever the directory.
DRIVE_CODES = (errno.EIO, errno.ENODEV, errno.ENXIO, errno.EROFS, errno.ESTALE, errno.ETIMEDOUT)
_EXCHANGED = "a symbolic link took its place, or that of a folder above it, since it was looked at"

#: Has something called before the interpreter waits for threads, which may wait for a drive; where
#: there is no such thing, behind that.
_BEFORE_THREADS_END = getattr(threading, "_register_atexit", atexit.register)

Ticket = _core.Ticket
VolumeOptions = _core.VolumeOptions
MemoryFaults = _core.MemoryFaults


class TensorStore:
    """Named tensors on SSD.

    Thread-safe. Space is found when a key is reserved or first written, never later. Whatever the
    process leaves behind, it leaves no file: the volumes have no names.
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
            volumes: Directories to keep the data in, or what `volumes.prepare` made of them. Over
                several, tensors are striped by their weights.
            bounce: Page-aligned host memory for unaligned heads and tails, best a few mebibytes;
                belongs to the store until it is closed.
            engine: "auto", "uring", "libaio" or "threads" ("memory" in tests).
            queue_depth: Requests in flight at once on each volume.
            chunk_bytes: Bytes of one request.
            watchdog_seconds: Silence of the device before it is reported on stderr.
            eio_retries: Tries after EIO of the device; no other error is tried again.
            verify: "off"; "reads": compare what is read with checksums; "full": writes, too.
            checksum_memory: Arena of the checksums, 4 bytes for each 64 KiB under
                keys; None: memory of the process.
            faults: What goes wrong on the memory engine.

        Raises:
            StoreError: A directory is missing or cannot be written.
            EngineUnavailableError: The engine asked for cannot run here.
        """
        options = [
            volume if isinstance(volume, VolumeOptions) else VolumeOptions(os.path.realpath(volume))
            for volume in volumes
        ]
        paths = [volume.path for volume in options]
        address, nbytes = _span(bounce)
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
                bounce_address=address,
                bounce_nbytes=nbytes,
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
                    "%s is on a file system that copies what is overwritten: a step may meet a "
                    "full disk though its space was reserved, and I/O goes through the page cache\n"
                    "fix: %s",
                    volume.path,
                    COPY_ON_WRITE_FIX,
                )

    @property
    def core(self) -> _core.Store:
        """The store below, for callers that have addresses instead of tensors."""
        return self._core

    def reserve(self, *, key: str, nbytes: int) -> None:
        """Find room now, so that no later write can meet a full disk.

        Raises:
            StoreFullError: There is not enough; nothing was changed.
        """
        self._core.reserve(key=key, nbytes=nbytes)

    def write(
        self,
        *,
        key: str,
        source: torch.Tensor,
        offset_bytes: int | None = None,
        hold: object | None = None,
        capacity_bytes: int = 0,
    ) -> Ticket:
        """Start writing a tensor; as the whole key, or into a key from `offset_bytes` on.

        The tensor's bytes must not change, and are kept alive, until the ticket is done.

        Args:
            key: Name in the store.
            source: Contiguous CPU tensor.
            offset_bytes: Where in the key; None for the whole key, which is reserved if need be.
            hold: Kept alive until the I/O is over, besides the tensor.
            capacity_bytes: What may be read from the tensor's first byte on, where that is more
                than the tensor: its odd tail then needs no bounce buffer.

        Raises:
            StoreFullError: No room for the key.
            ValueError: Not a contiguous CPU tensor, or outside the key.
        """
        address, nbytes = _span(source)
        return self._core.write(
            key=key,
            address=address,
            nbytes=nbytes,
            offset=offset_bytes,
            capacity=capacity_bytes,
            hold=(source, hold),
        )

    def read(
        self,
        *,
        key: str,
        target: torch.Tensor,
        offset_bytes: int = 0,
        hold: object | None = None,
        capacity_bytes: int = 0,
    ) -> Ticket:
        """Start reading into a tensor, from `offset_bytes` of the key on.

        The tensor must not be used until the ticket is done. It sees every write started before.
        With `capacity_bytes` what follows the tensor in memory, up to there, may be overwritten.

        Raises:
            StoreError: No such key, or an earlier write of it failed.
            ValueError: Not a contiguous CPU tensor, or outside the key.
        """
        address, nbytes = _span(target)
        return self._core.read(
            key=key,
            address=address,
            nbytes=nbytes,
            offset=offset_bytes,
            capacity=capacity_bytes,
            hold=(target, hold),
        )

    def discard(self, *, key: str) -> bool:
        """Forget a key once its I/O is over; False when there is none."""
        return self._core.discard(key=key)

    def wait_all(self) -> None:
        """Return when nothing is in flight; tickets keep their errors."""
        self._core.wait_all()

    def exchange(self, *, key: str, other: str) -> None:
        """Have two keys change places, with what is in flight on either; waits for nothing.

        Raises:
            StoreError: One of them is not there; nothing was changed.
            ValueError: They are not of one size.
        """
        self._core.exchange(key=key, other=other)

    def contains(self, *, key: str) -> bool:
        """Check that the key is reserved or written."""
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
        """Wait for everything in flight and give the space back. Also done at exit.

        Raises:
            StoreError: A drive is silent for too long, at exit.
        """
        self._finalizer()

    def __enter__(self) -> TensorStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _end_with_program(core: _core.Store) -> None:
    """Have the program end though a drive does not answer."""
    try:
        _BEFORE_THREADS_END(partial(_end_patience, weakref.ref(core)))
    except RuntimeError:  # it is ending already
        core.end_patience()


def _end_patience(found: weakref.ref[_core.Store]) -> None:
    core = found()
    if core is not None:
        core.end_patience()


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return address and size of a contiguous CPU tensor."""
    return contiguous_cpu(tensor).data_ptr(), tensor.nbytes


def contiguous_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself.

    Raises:
        ValueError: It is not a contiguous CPU tensor.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"the store moves contiguous CPU tensors, got shape {tuple(tensor.shape)} with strides "
            f"{tensor.stride()} on {tensor.device}; call .contiguous() or copy it to the host first"
        )
    return tensor


def describe_recovery(folder: str | None) -> str:
    """Return what to do once data on a drive turned out to be wrong, for a message.

    Args:
        folder: Of the last complete checkpoint; None while there is none.
    """
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
    """Return the error for a volume that cannot be used.

    Args:
        path: Of the volume.
        verb: What was tried.
        code: The errno.
        cause: The likely one; left out: by the errno.
        fix: What to do; left out: by the errno.
    """
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
    """Make an error of the system one about the volumes, with what to do."""
    try:
        yield
    except OSError as error:
        if isinstance(error, MemAscendError):
            raise
        code = error.errno or errno.EIO
        cause = _EXCHANGED if code == errno.ELOOP else ""
        raise volume_error(", ".join(paths), "use", code, cause=cause) from error
