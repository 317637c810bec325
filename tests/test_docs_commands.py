"""What documents tell a reader to type exists, and works where it can be tried without training."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from memascend.base.units import GIB
from memascend.cli.compare import command as compare
from memascend.cli.compare import run as running
from memascend.cli.compare.warm_up import WarmUp
from memascend.cli.config import one_pass_sections
from memascend.cli.main import main
from memascend.config.block import active_config, parse_block
from memascend.config.deepspeed import parse_deepspeed
from memascend.deepspeed.attach.refusals import check_config
from tests.support.documents import (
    code_blocks,
    code_lines,
    code_spans,
    commands,
    each_document,
    read,
)
from tests.support.source_tree import ROOT

CONFIGURATION = ROOT / "docs" / "configuration.md"
START = ROOT / "docs" / "start.md"
MAKEFILE = read(ROOT / "Makefile")

each_workflow = pytest.mark.parametrize(
    "workflow", sorted(ROOT.glob(".github/**/*.yml")), ids=lambda path: path.name
)


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep rates of drives elsewhere than for the user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


# -- what is typed exists --------------------------------------------------------------------------


@each_document
def test_every_make_target_and_variable_named_exists(document: Path) -> None:
    for words in commands(document, "make"):
        settings = [word.partition("=") for word in words if "=" in word]
        assert {word for word in words if "=" not in word} <= make_targets()
        assert [name for name, *_ in settings if f"{name} ?=" not in MAKEFILE] == []


@each_document
def test_every_command_of_ours_named_exists(
    document: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in commands(document, "memascend"):
        actions = [word for word in words[:2] if re.fullmatch(r"[a-z-]+", word)]
        if not actions:
            continue
        for length in range(len(actions), 0, -1):  # the second word may be an argument
            with pytest.raises(SystemExit) as ended:
                main([*actions[:length], "--help"])
            if ended.value.code == 0:
                break
        assert ended.value.code == 0, words
        known = capsys.readouterr().out
        own = words[: words.index("--")] if "--" in words else words
        assert [word for word in own if word.startswith("--") and word not in known] == []


@each_workflow
def test_every_workflow_is_valid(workflow: Path) -> None:
    content = pytest.importorskip("yaml").safe_load(read(workflow))
    if workflow.parent.name != "workflows":
        return
    steps = [step for job in content["jobs"].values() for step in job["steps"]]
    used = [step["uses"] for step in steps if "uses" in step]
    assert [name for name in used if not re.search(r"@[0-9a-f]{40}$", name)] == []
    runs = [line.split() for step in steps for line in step.get("run", "").splitlines()]
    assert {words[1] for words in runs if words[:1] == ["make"]} <= make_targets()


@each_document
def test_every_block_shown_is_accepted_and_has_every_key_named(document: Path) -> None:
    spans = code_spans(document)
    shown = [*code_blocks(document, "json"), *(s for s in spans if s.startswith('"memascend": {'))]
    for text in shown:
        config = json.loads(text if text.startswith("{") else f"{{{text}}}")
        parse_block(config.get("memascend", {}))
    keys = re.findall(r"^\| `([\w.\[\]]+)` \|", read(CONFIGURATION), re.MULTILINE)
    parts = {key[: end.start()] for key in keys for end in re.finditer(r"\.|$", key)}
    sections = {key.partition(".")[0] for key in keys if "." in key}
    named = {span.removeprefix("memascend.") for span in spans if re.fullmatch(r"[\w.]+", span)}
    ours = {name for name in named if "." in name and name.partition(".")[0] in sections}
    assert ours - parts == set()


# -- what is typed works ---------------------------------------------------------------------------


def test_the_quick_start_of_the_readme_can_be_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for `pip install .`, which is tests/test_wheel.py, and for the training.

    Its script is run by tests/examples.
    """
    monkeypatch.chdir(tmp_path)
    lines = [line.replace("/mnt/ssd", str(tmp_path)) for line in code_lines(ROOT / "README.md")]
    typed = [shlex.split(line) for line in lines]
    assert [words[:2] for words in typed] == [
        ["pip", "install"],
        ["memascend", "doctor"],
        ["memascend", "config"],
        ["memascend", "plan"],
        ["deepspeed", "--num_gpus"],
    ]
    main(typed[1][1:])  # its verdict on this machine is another matter
    assert typed[2][-2:] == [">", "ds.json"]
    capsys.readouterr()
    assert main(typed[2][1:-2]) == 0
    written = json.loads(capsys.readouterr().out)
    assert active_config(written) is not None
    check_config(parse_deepspeed(written))
    Path("ds.json").write_text(json.dumps(written))
    assert main(typed[3][1:]) == 0
    assert "\nfits " in capsys.readouterr().out
    [diff] = code_blocks(ROOT / "README.md", "diff")
    assert [line[0] for line in diff.splitlines()].count("+") == 1
    changed = json.loads("{" + re.sub(r"^.", "", diff, flags=re.MULTILINE) + "}")
    assert active_config(changed) is not None


def test_the_first_page_has_the_sections_that_config_writes_for_a_larger_batch() -> None:
    _, larger = code_blocks(START, "json")
    sections = one_pass_sections(2, 24 * GIB)
    assert json.loads(f"{{{larger}}}")["memascend"] == {"host_memory_limit": "16GiB"} | sections


def test_the_first_page_can_be_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for `pip install .`, which is tests/test_wheel.py, and for a training of your own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare, "warm_up", lambda log, on_news: WarmUp())
    block, _ = code_blocks(START, "json")
    Path("ds.json").write_text(block.replace("/mnt/ssd", str(tmp_path)))
    config = json.loads(Path("ds.json").read_text())
    assert active_config(config) is not None
    check_config(parse_deepspeed(config))
    launcher = tmp_path / "bin" / "deepspeed"
    launcher.parent.mkdir()
    launcher.write_text('#!/bin/sh\necho "memascend 0 armed: $*"\necho "step 0 loss 2.5"\n')
    launcher.chmod(0o700)
    path = os.pathsep.join([str(launcher.parent), os.environ["PATH"]])
    monkeypatch.setattr(
        running, "child_environment", lambda changes: {**os.environ, "PATH": path, **changes}
    )
    typed = [shlex.split(line) for line in code_lines(START)]
    assert [words[:2] for words in typed] == [
        ["pip", "install"],
        ["memascend", "doctor"],
        ["memascend", "plan"],
        ["memascend", "compare"],
    ]
    statuses = [
        main([word.replace("/mnt/ssd", str(tmp_path)) for word in words])
        for program, *words in typed
        if program == "memascend"
    ]
    assert statuses[1:] == [0, 0]  # what the doctor says of this machine is another matter
    printed = " ".join(capsys.readouterr().out.split())
    assert "trial" in printed
    assert "optimizer tiles" in printed
    report = json.loads(Path("compare-out", "report.json").read_text())
    assert report["losses_equal"]
    assert [run["losses"] for column in report["columns"].values() for run in column["runs"]] == [
        ["2.5"],
        ["2.5"],
    ]
