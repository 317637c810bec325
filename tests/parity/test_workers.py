"""What the worker groups do around the cases."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from . import workers
from .cases import Case

PINNED = "assert all([get_accelerator().is_pinned(buf) for buf in buffers])"


def test_a_lock_that_no_process_holds_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "LOCK_RELEASE_S", 0.0)
    stale, held = tmp_path / "cpu_adam" / "lock", tmp_path / "async_io" / "lock"
    for lock in (stale, held):
        lock.parent.mkdir()
    stale.touch()
    # As torch does it.
    code = f"import os, sys; os.open({str(held)!r}, os.O_CREAT | os.O_EXCL); print(flush=True); "
    code += "sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdout.readline()
        workers.remove_stale_locks(tmp_path)
        assert (stale.exists(), held.exists()) == (False, True)
        holder.stdin.close()
    workers.remove_stale_locks(tmp_path)
    assert not held.exists()


def test_without_locks_no_process_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers.psutil, "process_iter", None)
    workers.remove_stale_locks(tmp_path / "never built")


def test_time_to_end_runs_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "STOP_TIMEOUT_S", 0.05)
    group = workers.WorkerGroup(world=1, folder=tmp_path)
    with subprocess.Popen(["sleep", "100"], text=True) as process:
        group._processes.append(process)
        assert not group._all_ended()
        process.kill()
        process.wait()
        assert group._all_ended()


def test_a_rank_is_asked_to_end_before_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import signal, sys, time; signal.signal(signal.SIGTERM, {}); print(flush=True); "
    code += "time.sleep(100)"
    group = workers.WorkerGroup(world=2, folder=tmp_path)
    for answer in ("lambda *_: sys.exit(3)", "signal.SIG_IGN"):
        command = [sys.executable, "-c", code.format(answer)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        group._processes.append(process)
    ranks = list(group._processes)
    ends = iter([lambda: None, lambda: ranks[0].wait()])

    def run_out_of_time() -> bool:
        next(ends)()  # until the one that listens has ended, when it has been asked
        return False

    monkeypatch.setattr(group, "_all_ended", run_out_of_time)
    group.stop()
    assert [rank.wait() for rank in ranks] == [3, -9]
    for rank in ranks:
        assert rank.stdout is not None
        rank.stdout.close()


def test_the_group_that_was_used_longest_ago_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [workers.WorkerGroup(world=1, folder=tmp_path) for _ in range(3)]
    monkeypatch.setattr(workers.WorkerGroup, "_living", list(groups))
    monkeypatch.setattr(
        workers.WorkerGroup, "_resident_bytes", lambda group: workers.RESIDENT_BYTES_MAX // 2
    )
    first, _, third = groups
    first._make_room()
    assert workers.WorkerGroup._living == [third, first]
    monkeypatch.setattr(
        workers.WorkerGroup, "_resident_bytes", lambda group: workers.RESIDENT_BYTES_MAX + 1
    )
    first._make_room()  # whatever it has grown to goes, too
    assert workers.WorkerGroup._living == []


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            "errors.ConfigError: a step needs DeepSpeed 0.19.8 or later, and DeepSpeed",
            "a step needs",
        ),
        (f'  File "/x/swap_tensor/utils.py", line 100, in __init__\n    {PINNED}', "is_pinned"),
        ("int deepspeed_io_handle_t::wait(): Assertion `n > 0' failed.", "Assertion"),
        ("void deepspeed_io_handle_t::_stop_threads(): Assertion `0 == n' failed.", "Assertion"),
    ],
    ids=["a setting", "its own buffers", "its own drives", "their end"],
)
def test_only_limits_of_an_older_release_are_skipped(
    monkeypatch: pytest.MonkeyPatch, error: str, reason: str
) -> None:
    monkeypatch.setattr(workers, "is_able", lambda ability: True)
    workers.skip_what_the_release_lacks(error)  # the newest lacks nothing: a failure
    monkeypatch.setattr(workers, "is_able", lambda ability: False)
    workers.skip_what_the_release_lacks("memascend.errors.ConfigError: another value")
    with pytest.raises(pytest.skip.Exception, match=reason):
        workers.skip_what_the_release_lacks(error)


class FailingGroup:
    """Fails with memascend by one error, and with CPU offload by another, or not if it is empty."""

    def __init__(self, cpu_offload: str) -> None:
        self.cpu_offload = cpu_offload

    def run(self, _: object, config: dict[str, object], **__: object) -> list[workers.Facts]:
        error = "ValueError: ours" if "memascend" in config else self.cpu_offload
        if error:
            raise workers.CaseFailed(error)
        return []


@pytest.mark.parametrize(
    ("cpu_offload", "is_older", "end"),
    [
        ("KeyError: 'exp_avg'", True, pytest.skip.Exception),
        ("KeyError: 'exp_avg'", False, workers.CaseFailed),
        ("ranks [0] gave no answer within 150.0 s", True, workers.CaseFailed),
        ("", True, workers.CaseFailed),
    ],
    ids=["older", "newest", "out of time", "CPU offload passes"],
)
def test_a_case_is_skipped_if_cpu_offload_of_an_older_release_fails_too(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cpu_offload: str,
    is_older: bool,
    end: type[BaseException],
) -> None:
    monkeypatch.setattr(workers, "is_able", lambda ability: not is_older)
    monkeypatch.setattr(workers, "WorkerGroup", lambda **_: FailingGroup(cpu_offload))
    bench = workers.Bench(tmp_path)
    with pytest.raises(end):
        bench.run(Case(), "memascend")
    if cpu_offload:  # memascend had passed
        with pytest.raises(end):
            bench.run(Case(), "oracle")
