"""What a store leaves behind, and what it does where the system refuses things."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.nvme_memory import open_store, write
from tests.support.other_user import another_user, open_folder
from tests.support.seccomp import (
    DENY_ASYNCHRONOUS,
    DENY_DIRECT,
    DENY_TMPFILE,
    DENY_URING,
    on_x86_64,
)
from tests.support.store_programs import start


def run(directory: Path, script: str) -> str:
    process = start(directory, script)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return output


def free_bytes(directory: Path) -> int:
    state = os.statvfs(directory)
    return state.f_bfree * state.f_frsize


def reserved_bytes(process: subprocess.Popen[str], directory: Path) -> int:
    """What files in a folder take that a process has open; others use the disk, too."""
    opened = Path(f"/proc/{process.pid}/fd").iterdir()
    own = [path for path in opened if os.readlink(path).startswith(f"{directory}/")]
    return sum(path.stat().st_blocks for path in own) * 512


def wait_for_free_bytes(directory: Path, wanted: int) -> int:
    """Others use the disk, too: the space has to be back within their noise."""
    deadline = time.monotonic() + 60
    while free_bytes(directory) < wanted and time.monotonic() < deadline:
        time.sleep(0.05)
    return free_bytes(directory)


RESERVE = """
store = open_store(directory, ENGINE, grow_bytes=2 << 30)
write(store, "k", bytes(1 << 20)).wait()
print("ready", flush=True)
"""


@pytest.mark.parametrize("engine", ["auto", "threads"])
@pytest.mark.parametrize("end", ["close", "return", "exception", "SIGTERM", "SIGKILL"])
def test_nothing_is_left_however_the_process_ends(tmp_path, engine, end):
    endings = {
        "close": "store.close(); print(os.listdir(directory))",
        "return": "pass",
        "exception": "raise RuntimeError('on purpose')",
    }
    before = free_bytes(tmp_path)
    script = RESERVE.replace("ENGINE", repr(engine)) + endings.get(end, "signal.pause()")
    process = start(tmp_path, script)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    if end.startswith("SIG"):
        assert reserved_bytes(process, tmp_path) >= 2 << 30
        process.send_signal(getattr(signal, end))
    output, errors = process.communicate(timeout=60)
    expected = {"exception": 1, "SIGTERM": -signal.SIGTERM, "SIGKILL": -signal.SIGKILL}
    assert process.returncode == expected.get(end, 0), errors
    assert output in ("", "[]\n")
    assert os.listdir(tmp_path) == []
    assert wait_for_free_bytes(tmp_path, before - (1 << 30)) > before - (1 << 30)


def test_closing_gives_the_space_back_at_once(tmp_path):
    output = run(
        tmp_path,
        """
        def free():
            state = os.statvfs(directory)
            return state.f_bfree * state.f_frsize
        store = open_store(directory, "auto", grow_bytes=2 << 30)
        store.reserve(key="k", nbytes=1)
        taken = free()  # others use the disk, too: no longer before it than this
        store.close()
        print(free() - taken > 1 << 30)
        """,
    )
    assert output == "True\n"


def test_a_limit_on_file_sizes_is_found_when_space_is_reserved(tmp_path):
    output = run(
        tmp_path,
        """
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        store = open_store(directory, "auto")
        store.reserve(key="fits", nbytes=600 << 10)
        try:
            store.reserve(key="big", nbytes=600 << 10)
        except StoreFullError as error:
            print(error.strerror.splitlines()[0].split(": ")[-1])
        """,
    )
    assert output == "needed 614400 bytes, available 434176 bytes\n"


@on_x86_64
@pytest.mark.parametrize(
    ("refused", "expected"),
    [
        (DENY_URING, "libaio"),
        (DENY_ASYNCHRONOUS, "threads"),
        # Without direct I/O it would wait for each request.
        (DENY_URING + DENY_DIRECT, "threads"),
    ],
    ids=["io_uring", "both", "and no direct I/O"],
)
def test_auto_takes_the_next_engine_where_io_uring_is_forbidden_and_says_why(
    tmp_path, refused, expected
):
    output = run(
        tmp_path,
        refused
        + """
store = open_store(directory, "auto")
write(store, "k", b"abc").wait()
print(store.engine_name, "|", store.engine_reason, "|", read(store, "k", 3))
""",
    )
    name, reason, content = output.strip().split(" | ")
    assert name == expected
    assert reason.startswith("io_uring_setup")
    assert "Operation not permitted (seccomp or kernel.io_uring_disabled)" in reason
    assert ("; io_setup" in reason) == (refused == DENY_ASYNCHRONOUS)
    assert content == "b'abc'"


@on_x86_64
def test_uring_asked_for_by_name_fails_clearly_where_it_is_forbidden(tmp_path):
    output = run(
        tmp_path,
        DENY_URING
        + """
try:
    open_store(directory, "uring")
except EngineUnavailableError as error:
    print(error.errno, error.strerror)
""",
    )
    lines = output.splitlines()
    assert lines[0].startswith(
        f'1 engine "uring" cannot run in {tmp_path} (queue_depth=64): io_uring'
    )
    assert lines[1].startswith("likely cause: a container's seccomp profile")
    assert lines[2].startswith("fix: --security-opt seccomp=unconfined")


@on_x86_64
def test_a_file_system_without_nameless_files_is_left_empty_all_the_same(tmp_path):
    output = run(
        tmp_path,
        DENY_TMPFILE
        + """
import errno
try:
    os.open(directory, os.O_TMPFILE | os.O_RDWR)
except OSError as error:
    print(error.errno == errno.EOPNOTSUPP)
store = open_store(directory, "auto")
print(store.direct, os.listdir(directory))
write(store, "k", b"abc").wait()
print(read(store, "k", 3))
""",
    )
    assert output == "True\nTrue []\nb'abc'\n"


def test_a_forked_child_can_neither_use_nor_harm_the_store(tmp_path):
    output = run(
        tmp_path,
        """
        store = open_store(directory, "auto")
        write(store, "k", b"abc").wait()
        child = os.fork()
        if child == 0:
            try:
                store.contains(key="k")
            except ValueError as error:
                print("belongs to the process" in str(error), flush=True)
            store.close()
            del store
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        print(read(store, "k", 3))
        """,
    )
    assert output == "True\nb'abc'\n"


@pytest.mark.parametrize("engine", ["auto", "threads"])
def test_a_data_loaders_workers_keep_nothing_of_a_store_that_is_closed(tmp_path, engine):
    output = run(
        tmp_path,
        f"""
        import contextlib
        import torch
        from torch.utils.data import DataLoader

        def links_of(folder):
            for path in folder.iterdir():
                with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                    yield os.readlink(path)

        store = open_store(directory, {engine!r}, grow_bytes=64 << 20)
        write(store, "k", bytes(1 << 20)).wait()
        loader = DataLoader(
            torch.arange(8), num_workers=2, persistent_workers=True, multiprocessing_context="fork"
        )
        batches = iter(loader)
        assert int(next(batches)) == 0
        print(read(store, "k", 3))
        store.close()
        for worker in batches._workers:
            assert worker.is_alive()
            folder = Path("/proc") / str(worker.pid)
            links = list(links_of(folder / "fd"))
            assert not any(str(directory) in link or "io_uring" in link for link in links), links
            maps = (folder / "maps").read_text()
            assert str(directory) not in maps and "io_uring" not in maps
        print(sum(map(int, batches)))
        """,
    )
    assert output == "b'\\x00\\x00\\x00'\n28\n"


def test_a_file_system_without_direct_io_is_used_buffered():
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        pytest.skip("needs a writable tmpfs at /dev/shm")
    output = run(
        shared,
        """
        store = open_store(directory, "auto")
        content = os.urandom(300_001)
        write(store, "k", content, shift=1).wait()
        print(read(store, "k", 300_001, shift=5) == content)
        """,
    )
    assert output == "True\n"


# Time of day that jumps by up to a year, forward and back, whenever somebody asks.
CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
static time_t jump(void) { return rand() % 63072000 - 31536000; }
int clock_gettime(clockid_t clock, struct timespec* now) {
  static int (*real)(clockid_t, struct timespec*);
  if (!real) real = (int (*)(clockid_t, struct timespec*))dlsym(RTLD_NEXT, "clock_gettime");
  int result = real(clock, now);
  if (clock == CLOCK_REALTIME) now->tv_sec += jump();
  return result;
}
int gettimeofday(struct timeval* now, void* zone) {
  struct timespec value;
  clock_gettime(CLOCK_REALTIME, &value);
  now->tv_sec = value.tv_sec;
  now->tv_usec = value.tv_nsec / 1000;
  return 0;
}
"""


@pytest.fixture
def jumping_clock(tmp_path):
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    (tmp_path / "clock.c").write_text(CLOCK)
    library = tmp_path / "clock.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", library, tmp_path / "clock.c", "-ldl"], check=True
    )
    return {"LD_PRELOAD": str(library)}


@pytest.mark.parametrize("engine", ["auto", "threads", "memory"])
def test_a_clock_that_jumps_neither_ends_a_wait_nor_prolongs_it(tmp_path, jumping_clock, engine):
    """Waits, pauses and the watchdog go by a clock that never does."""
    drive = tmp_path / "drive"
    drive.mkdir()
    script = """
    import time
    from memascend import _core
    times = [time.time() for _ in range(10)]
    print(max(times) - min(times) > 86_400)
    faults = _core.MemoryFaults(seed=3, eio=0.3, delay=0.3)
    more = {"faults": faults, "eio_retries": 20} if ENGINE == "memory" else {}
    began = time.monotonic()
    store = open_store(directory, ENGINE, watchdog_seconds=50, eio_pause_seconds=0.01, **more)
    content = os.urandom(1 << 20)
    for turn in range(20):
        write(store, "k", content).wait()
        assert read(store, "k", 1 << 20) == content
    print(store.stats()["stalls"], time.monotonic() - began < 30)
    """.replace("ENGINE", repr(engine))
    process = start(drive, script, environment=jumping_clock)
    output, errors = process.communicate(timeout=60)
    assert output == "True\n0 True\n", errors


def test_a_directory_removed_under_a_run_is_not_missed_by_it(tmp_path):
    output = run(
        tmp_path,
        """
        folder = directory / "gone"
        folder.mkdir()
        store = open_store(folder, "auto", grow_bytes=1 << 20)
        write(store, "k", b"abc").wait()
        folder.rmdir()
        write(store, "more", bytes(4 << 20)).wait()
        print(read(store, "k", 3), read(store, "more", 4 << 20) == bytes(4 << 20))
        store.close()
        try:
            open_store(folder, "auto")
        except FileNotFoundError as error:
            print(error.strerror)
        """,
    )
    first, second = output.splitlines()
    assert first == "b'abc' True"
    assert second.startswith(f"open an anonymous file in {tmp_path}/gone: No such file")


def test_two_processes_on_one_directory_do_not_see_each_other(tmp_path):
    script = """
    content = os.urandom(1 << 20)
    store = open_store(directory, "auto")
    print("ready", flush=True)
    sys.stdin.readline()
    for turn in range(50):
        write(store, f"k{turn % 5}", content).wait()
        assert read(store, f"k{turn % 5}", 1 << 20) == content
    print(len(store.keys()))
    """
    processes = [start(tmp_path, script) for _ in range(2)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        output, errors = process.communicate(timeout=60)
        assert output == "5\n", errors


@pytest.mark.root
def test_another_user_reaches_a_stores_file_neither_by_name_nor_by_descriptor():
    with open_folder(mode=0o777) as folder:
        store = open_store(folder, "threads")
        write(store, "k", b"abc").wait()
        paths = [f"/proc/{os.getpid()}/fd/{name}" for name in os.listdir("/proc/self/fd")]
        (path,) = [p for p in paths if os.path.lexists(p) and f"{folder}/" in os.readlink(p)]
        assert os.stat(path).st_mode & 0o777 == 0o600
        with another_user(lambda: os.listdir(folder)) as names:
            assert names == []
        with another_user(lambda: os.open(path, os.O_RDONLY)) as refused:
            assert isinstance(refused, PermissionError)
        os.close(os.open(path, os.O_RDONLY))  # whoever is trusted can
        store.close()
