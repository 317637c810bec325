"""The warm-up: what its process says of libraries and operators, and what is heard of it."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from memascend.base.units import GIB
from memascend.cli.compare import warm_up as module
from memascend.cli.compare.warm_up import OPERATORS, warm_up
from memascend.errors import UnsupportedDeepSpeedError

# -- the process, seen from outside ----------------------------------------------------------------


def listen(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *lines: str, status: int = 0
) -> tuple[module.WarmUp, list[str]]:
    """What is heard of a process that prints these lines."""
    text = "\n".join(lines)
    stand_in = folder / "python"
    stand_in.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\necho on stderr >&2\nexit {status}\n")
    stand_in.chmod(0o700)
    monkeypatch.setattr(module.sys, "executable", str(stand_in))
    news: list[str] = []
    return warm_up(folder / "log", news.append), news


def said(**news: object) -> str:
    return f"memascend-warm-up {json.dumps(news)}"


def test_baseline_and_missing_operators_are_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, news = listen(
        tmp_path,
        monkeypatch,
        said(text="importing"),
        "a warning of somebody",
        said(baseline_bytes=5),
        said(unavailable={"A": "no libaio.h"}),
        said(unavailable={"B": "no g++"}),
        said(refusal="DeepSpeed 0.18.4 is older"),
    )
    expected = {"A": "no libaio.h", "B": "no g++"}
    assert found == module.WarmUp(5, expected, refusal="DeepSpeed 0.18.4 is older")
    assert [text for text in news if text] == ["importing"]
    log = (tmp_path / "log").read_text(encoding="utf-8")
    assert "a warning of somebody\n" in log
    assert "on stderr\n" in log


def test_a_process_that_does_not_get_to_its_end_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = listen(tmp_path, monkeypatch, said(baseline_bytes=5), status=3)
    assert (found.baseline_bytes, found.problem) == (5, "exit status 3")


@pytest.mark.parametrize("jobs", [None, "7"])
def test_it_runs_without_memascend_and_with_few_compilers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: str | None
) -> None:
    monkeypatch.setattr(module, "_compile_jobs", lambda: 3)
    monkeypatch.setenv("MEMASCEND_CONFIG", "{}")
    monkeypatch.delenv("MAX_JOBS", raising=False)
    if jobs is not None:
        monkeypatch.setenv("MAX_JOBS", jobs)
    stand_in = tmp_path / "python"
    stand_in.write_text('#!/bin/sh\necho "$*; $MEMASCEND_DISABLE; $MEMASCEND_CONFIG; $MAX_JOBS"\n')
    stand_in.chmod(0o700)
    monkeypatch.setattr(module.sys, "executable", str(stand_in))
    assert warm_up(tmp_path / "log", lambda text: None) == module.WarmUp()
    log = (tmp_path / "log").read_text(encoding="utf-8")
    assert log == f"-m memascend.cli.compare.warm_up; 1; ; {jobs or 3}\n"


@pytest.mark.parametrize(
    ("cores", "memory_bytes", "jobs"),
    [(8, 64 * GIB, 8), (8, 5 * GIB, 2), (8, GIB, 1), (None, 64 * GIB, 1)],
)
def test_compilers_fit_into_memory(
    monkeypatch: pytest.MonkeyPatch, cores: int | None, memory_bytes: int, jobs: int
) -> None:
    facts = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": memory_bytes // 4096}
    monkeypatch.setattr(module.os, "sysconf", facts.__getitem__)
    monkeypatch.setattr(module.os, "cpu_count", lambda: cores)
    assert module._compile_jobs() == jobs


# -- the process itself ----------------------------------------------------------------------------


class Builder:
    """Stands for a builder of DeepSpeed."""

    def __init__(self, name: str, error: Exception | None = None) -> None:
        self.NAME = name
        self.error = error

    def load(self, *, verbose: bool) -> None:
        if self.error is not None:
            raise self.error


def run_main(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    builders: dict[str, Builder | None],
    folder: Path,
    refusal: str = "",
) -> list[dict[str, Any]]:
    """What the process says where DeepSpeed has these builders, and is refused or not."""

    def check_fingerprints() -> None:
        if refusal:
            raise UnsupportedDeepSpeedError(refusal)

    monkeypatch.setattr(module, "check_fingerprints", check_fingerprints)
    accelerator = ModuleType("deepspeed.accelerator")
    accelerator.get_accelerator = lambda: SimpleNamespace(  # type: ignore[attr-defined]
        create_op_builder=builders.get
    )
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    monkeypatch.setitem(sys.modules, "deepspeed.accelerator", accelerator)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(module, "_build_folder", lambda name: str(folder / name))
    assert module._main() == 0
    lines = capsys.readouterr().out.splitlines()
    return [json.loads(line.removeprefix("memascend-warm-up ")) for line in lines]


def test_a_deepspeed_that_memascend_refuses_is_said_and_operators_are_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    builders: dict[str, Builder | None] = {"CPUAdamBuilder": Builder("cpu_adam")}
    news = run_main(monkeypatch, capsys, builders, tmp_path, refusal="0.18.4 is older")
    assert {"refusal": "0.18.4 is older"} in news
    assert any("cpu_adam is ready" in one.get("text", "") for one in news)


def test_operators_that_cannot_be_built_are_named_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    builders = {
        "AsyncIOBuilder": Builder("async_io", RuntimeError(" no libaio.h\n")),
        "PinMemoryBuilder": Builder("pin_memory", AssertionError()),
        "CPUAdamBuilder": Builder("cpu_adam"),
        "ShareMemCommBuilder": None,  # an accelerator without it
    }
    assert builders.keys() == OPERATORS.keys()
    news = run_main(monkeypatch, capsys, builders, tmp_path)
    found = [entry["unavailable"] for entry in news if "unavailable" in entry]
    assert found == [{"AsyncIOBuilder": "no libaio.h"}, {"PinMemoryBuilder": "AssertionError"}]
    [baseline] = [entry["baseline_bytes"] for entry in news if "baseline_bytes" in entry]
    assert baseline > 0
    texts = [entry["text"] for entry in news if "text" in entry]
    assert any("cpu_adam is ready" in text for text in texts)
    assert not any("async_io is ready" in text for text in texts)


def test_a_lock_that_a_killed_build_left_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    builders: dict[str, Builder | None] = {
        "AsyncIOBuilder": Builder("async_io"),
        "CPUAdamBuilder": Builder("cpu_adam"),
    }
    news = run_main(monkeypatch, capsys, builders, tmp_path)
    texts = [entry["text"] for entry in news if "waiting for" in entry.get("text", "")]
    assert len(texts) == 1
    assert str(lock) in texts[0]
    assert lock.exists()
