"""Page-aligned memory with canaries, and stores on it, for the nvme tests."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import tempfile
from pathlib import Path

import torch

from memascend import _core
from memascend.errors import EngineUnavailableError

CANARY = 0xA5
BOUNCE_BYTES = 256 * 1024


class PageMemory:
    """Anonymous private pages, filled with the canary."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._map = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._view = (ctypes.c_char * max(nbytes, 1)).from_buffer(self._map)
        self.address = ctypes.addressof(self._view)
        ctypes.memset(self.address, CANARY, nbytes)

    @property
    def tensor(self) -> torch.Tensor:
        """All of it, as bytes."""
        return torch.frombuffer(self._map, dtype=torch.uint8, count=self.nbytes)

    def put(self, content: bytes, offset: int = 0) -> None:
        assert offset + len(content) <= self.nbytes
        ctypes.memmove(self.address + offset, content, len(content))

    def get(self, offset: int = 0, nbytes: int | None = None) -> bytes:
        return ctypes.string_at(self.address + offset, self.nbytes if nbytes is None else nbytes)


@functools.cache
def refusal(engine: str = "uring") -> str:
    """Why an engine cannot run here, empty when it can."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            open_store(Path(directory), engine).close()
        except EngineUnavailableError as error:
            return str(error)
    return ""


def flip_bit(where: str, offset: int, bit: int = 0) -> None:
    """Flips a bit of this process's volume in a directory, or of the one in memory of that name.

    A volume has no name that could be opened, but its descriptor leads to it.
    """
    own = Path("/proc/self/fd")
    links = {entry: os.readlink(own / entry) for entry in os.listdir(own) if (own / entry).exists()}
    path = os.path.realpath(where)
    found = [
        entry
        for entry, link in links.items()
        if link.endswith(" (deleted)") and (link.startswith(f"{path}/") or f":{where} " in link)
    ]
    assert len(found) == 1, links
    descriptor = os.open(own / found[0], os.O_RDWR | os.O_CLOEXEC)
    try:
        byte = os.pread(descriptor, 1, offset)[0]
        assert os.pwrite(descriptor, bytes([byte ^ 1 << bit]), offset) == 1
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_store(directory: Path, engine: str, **options: object) -> _core.Store:
    bounce = PageMemory(BOUNCE_BYTES)
    settings: dict[str, object] = {
        "volumes": [str(directory)],
        "chunk_bytes": 128 * 1024,
        "grow_bytes": 8 << 20,
    }
    if engine == "memory":
        settings["faults"] = _core.MemoryFaults()
    settings.update(options)
    return _core.Store(
        engine=engine,
        bounce_address=bounce.address,
        bounce_nbytes=bounce.nbytes,
        bounce_hold=bounce,
        **settings,
    )


def write(store: _core.Store, key: str, content: bytes, offset: int | None = None, shift: int = 0):
    """Starts writing from memory that lies `shift` bytes behind a page's start."""
    memory = PageMemory(len(content) + shift)
    memory.put(content, shift)
    return store.write(
        key=key, address=memory.address + shift, nbytes=len(content), offset=offset, hold=memory
    )


def read(store: _core.Store, key: str, nbytes: int, offset: int = 0, shift: int = 0) -> bytes:
    """Reads, and checks that nothing beside the target was touched."""
    margin = 8192
    memory = PageMemory(nbytes + shift + 2 * margin)
    ticket = store.read(
        key=key, address=memory.address + margin + shift, nbytes=nbytes, offset=offset, hold=memory
    )
    ticket.wait()
    head = margin + shift
    assert memory.get(0, head) == bytes([CANARY]) * head
    tail = memory.nbytes - head - nbytes
    assert memory.get(head + nbytes, tail) == bytes([CANARY]) * tail
    return memory.get(head, nbytes)
