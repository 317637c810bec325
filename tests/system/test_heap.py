"""The heap: what freed memory does, whose malloc is left alone, and how many mappings it may have.

Settings are the process's, so each test has a process of its own.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memascend.base.units import MIB
from memascend.system import heap
from tests.support.source_tree import ROOT

BLOCKS, BLOCK_BYTES = 64, MIB
#: Frees blocks with something between them that stays, once glibc has seen larger ones freed.
PROGRAM = f"""
import ctypes, json, sys
from pathlib import Path
from memascend.config.environment import malloc_settings
from memascend.system.heap import *
from memascend.system.heap import _ACCOUNT, _Account
from memascend.system.memory import resident_memory
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def take(nbytes):
    address = libc.malloc(nbytes)
    ctypes.memset(address, 1, nbytes)
    return address

def mapped():
    glibc = ctypes.CDLL("libc.so.6")
    glibc.mallinfo2.restype = _Account
    return glibc.mallinfo2().hblks

libc.free(take(16 << 20))
heap = eval(sys.argv[1])
before, taken = resident_memory()[0], []
for _ in range({BLOCKS}):
    taken.append(take({BLOCK_BYTES}))
    take(20_000)
found = {{"mapped": mapped(), "taken": resident_memory()[0] - before}}
for address in taken:
    libc.free(address)
found["kept"] = resident_memory()[0] - before
print(json.dumps(found | {{"allocator": heap.allocator, "why_left": heap.why_left,
                           "mapped_bytes_min": heap.mapped_bytes_min, "text": heap.describe()}}))
"""
SET = "give_back_freed(mapped_bytes_min=64 << 10, settings=malloc_settings())"


def run(expression: str, **environment: str) -> dict[str, Any]:
    ours = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    ours.pop("GLIBC_TUNABLES", None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, expression],
        env=ours | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["taken"] > BLOCKS * BLOCK_BYTES * 3 // 4
    return found


# -- glibc ---------------------------------------------------------------------------------------


def test_what_is_freed_stays_with_glibc_as_it_is() -> None:
    found = run("examine_heap()")
    assert found["kept"] > BLOCKS * BLOCK_BYTES // 2
    assert (found["why_left"], found["mapped_bytes_min"]) == ("", None)


def test_what_is_freed_goes_back_once_the_heap_is_set() -> None:
    found = run(SET)
    assert found["kept"] < 4 * MIB
    assert found["mapped"] >= BLOCKS
    assert found["allocator"] == os.confstr("CS_GNU_LIBC_VERSION")
    assert "64.00 KiB" in found["text"]


def test_smaller_allocations_than_stated_are_not_mapped() -> None:
    found = run("give_back_freed(mapped_bytes_min=2 << 20)")
    assert found["mapped"] < BLOCKS
    assert found["mapped_bytes_min"] == 2 * MIB


def test_the_heap_takes_a_quarter_of_the_mappings_that_a_process_may_have(tmp_path: Path) -> None:
    count_max = 64
    (tmp_path / "sys/vm").mkdir(parents=True)
    (tmp_path / "sys/vm/max_map_count").write_text(f"{count_max}\n")
    found = run(f"give_back_freed(mapped_bytes_min=64 << 10, proc=Path({str(tmp_path)!r}))")
    assert 0 < found["mapped"] <= count_max // 4 < BLOCKS


def test_without_the_kernels_number_its_usual_one_is_taken(tmp_path: Path) -> None:
    found = run(f"give_back_freed(mapped_bytes_min=64 << 10, proc=Path({str(tmp_path)!r}))")
    assert found["mapped"] >= BLOCKS


def test_a_size_that_glibc_refuses_is_named_and_nothing_else_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[int, int]] = []

    def refuse(setting: int, value: int) -> int:  # as older glibc does above 32 MiB
        calls.append((setting, value))
        return 0

    monkeypatch.setattr(heap, "_glibc", lambda: SimpleNamespace(mallopt=refuse))
    monkeypatch.setattr(heap, "_is_serving", lambda libc: True)
    found = heap.give_back_freed(mapped_bytes_min=64 * MIB)
    assert found.mapped_bytes_min is None
    assert str(64 * MIB) in found.why_left
    assert calls == [(heap._M_MMAP_THRESHOLD, 64 * MIB)]


def test_an_older_glibc_is_recognized_by_its_older_account() -> None:
    old = SimpleNamespace(mallinfo=ctypes.CDLL("libc.so.6").mallinfo)
    assert heap._is_serving(old)


# -- what is left alone --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("MALLOC_TRIM_THRESHOLD_", str(128 * MIB)),
        ("MALLOC_MMAP_THRESHOLD_", str(32 * MIB)),
        ("GLIBC_TUNABLES", f"glibc.malloc.trim_threshold={128 * MIB}"),
    ],
)
def test_what_the_user_has_set_stays(variable: str, value: str) -> None:
    found = run(SET, **{variable: value})
    assert found["mapped_bytes_min"] is None
    assert variable in found["why_left"]


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("forwards", [False, True], ids=["of its own", "glibc's in the end"])
def test_another_malloc_is_told_from_glibcs_by_what_it_does(tmp_path: Path, forwards: bool) -> None:
    library = tmp_path / "libother.so"
    source = tmp_path / "other.c"
    source.write_text(FORWARDING if forwards else OTHER)
    command = ["cc", "-shared", "-fPIC", "-O1", "-fno-builtin", "-o", str(library), str(source)]
    subprocess.run(command, check=True, timeout=60)
    found = run(SET, LD_PRELOAD=str(library))
    if forwards:
        assert found["mapped_bytes_min"] == 64 << 10
        assert found["kept"] < 4 * MIB
    else:
        assert (found["allocator"], found["mapped_bytes_min"]) == (library.name, None)
        assert found["mapped"] == 0
        assert library.name in found["text"]
        assert found["why_left"] in found["text"]


def test_without_glibc_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str | None, mode: int = 0) -> Any:
        if name is not None:
            raise OSError(name)
        return loaded

    loaded = heap.ctypes.CDLL(None)
    monkeypatch.setattr(heap.ctypes, "CDLL", load)
    found = heap.give_back_freed(mapped_bytes_min=64 << 10)
    assert not found.is_glibc
    assert found.mapped_bytes_min is None
    assert found.why_left


FORWARDING = """
#include <stddef.h>
void *__libc_malloc(size_t);
void *malloc(size_t nbytes) { return __libc_malloc(nbytes); }
"""

#: Hands out one large mapping from front to back, and takes nothing back.
OTHER = """
#include <errno.h>
#include <string.h>
#include <sys/mman.h>
static char *next, *end;
static void *take(size_t alignment, size_t nbytes) {
  static volatile int lock;
  while (__sync_lock_test_and_set(&lock, 1)) {}
  if (!next) {
    size_t all = (size_t)1 << 32;
    next = mmap(0, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    end = next + all;
  }
  if (alignment < 16) alignment = 16;
  char *found = (char *)(((size_t)next + sizeof(size_t) + alignment - 1) & ~(alignment - 1));
  next = found + nbytes;
  ((size_t *)found)[-1] = nbytes;
  __sync_lock_release(&lock);
  return next <= end ? found : 0;
}
void *malloc(size_t nbytes) { return take(16, nbytes); }
void free(void *address) { (void)address; }
void *calloc(size_t count, size_t nbytes) { return take(16, count * nbytes); }
void *realloc(void *old, size_t nbytes) {
  char *found = take(16, nbytes);
  if (old && found) {
    size_t held = ((size_t *)old)[-1];
    memcpy(found, old, held < nbytes ? held : nbytes);
  }
  return found;
}
void *memalign(size_t alignment, size_t nbytes) { return take(alignment, nbytes); }
void *aligned_alloc(size_t alignment, size_t nbytes) { return take(alignment, nbytes); }
int posix_memalign(void **found, size_t alignment, size_t nbytes) {
  *found = take(alignment, nbytes);
  return *found ? 0 : ENOMEM;
}
size_t malloc_usable_size(void *address) { return address ? ((size_t *)address)[-1] : 0; }
"""
