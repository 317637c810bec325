"""Trials of frameworks: which there are, how a recipe becomes small, and what counts as equal."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from memascend.cli.doctor_packages import FRAMEWORKS
from tests.support.scripts import SCRIPTS, load_script
from tests.support.source_tree import ROOT

yaml = pytest.importorskip("yaml")

FILES = sorted((SCRIPTS / "frameworks").glob("*.yaml"))
RECIPES = ROOT / "configs" / "recipes"
STOCK, OURS = "deepspeed.runtime.zero.stage3.Optimizer", "memascend.deepspeed.optimizer.Optimizer"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("try_frameworks")


def of_file(path: Path) -> str:
    return path.stem


# -- the files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", FILES, ids=of_file)
def test_a_framework_names_recipes_that_there_are(script: ModuleType, path: Path) -> None:
    framework = script.load(path)
    assert [
        name for name in (framework.config, *framework.recipes) if not (RECIPES / name).is_file()
    ] == []
    named = " ".join([*framework.command, *framework.lora.get("command", [])])
    assert all(name in named for name in framework.recipes)
    assert {*framework.resume, *framework.lora} <= {"recipe", "words", "command"}
    scripts = re.findall(r"\{root\}/(\S+)", named)
    assert [name for name in scripts if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("path", FILES, ids=of_file)
def test_a_key_that_a_toy_leaves_out_is_in_the_recipe(script: ModuleType, path: Path) -> None:
    for name, changes in script.load(path).recipes.items():
        recipe = yaml.safe_load((RECIPES / name).read_text(encoding="utf-8"))
        assert {key for key, value in changes.items() if value is None} <= set(recipe)


def test_every_recipe_is_tried_but_for_what_no_package_has(script: ModuleType) -> None:
    tried = {name for path in FILES for name in script.load(path).recipes}
    assert {path.name for path in RECIPES.glob("*.yaml")} - tried == {"open_instruct.yaml"}


def test_doctor_knows_the_frameworks_that_are_tried(script: ModuleType) -> None:
    assert {script.load(path).package for path in FILES} - {"transformers"} == {*FRAMEWORKS}


def test_who_shares_an_environment_installs_the_same(script: ModuleType) -> None:
    frameworks = {path.stem: script.load(path) for path in FILES}
    for one in frameworks.values():
        owner = frameworks[one.place]
        assert (one.requirements, one.torch) == (owner.requirements, owner.torch)


def test_the_page_has_a_row_for_each(script: ModuleType) -> None:
    """A framework with two files, each with its release, has two rows."""
    text = (ROOT / "configs" / "README.md").read_text("utf-8")
    [part] = re.findall(r"^## Versions that were run\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    table = part[part.index("| framework | torch") :].partition("\n\n")[0]
    head, _, *rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    assert head == [*script.HEAD]
    assert {len(row) for row in rows} == {len(head)}
    named = [row[0].rpartition(" ") for row in rows]
    expected = {path.stem: script.load(path) for path in FILES}
    assert sorted(name for name, _, _ in named) == sorted(one.title for one in expected.values())
    for one in expected.values():
        pins = re.findall(rf"\b{one.package}\S*==(\S+)", " ".join([*one.requirements, *one.alone]))
        for pin in pins:
            assert (one.title, " ", pin) in named
    for row in rows:
        cells = {*row[1:]}
        assert cells == {"not run"} or "not run" not in cells


# -- a recipe at toy size --------------------------------------------------------------------------


def test_a_changed_key_is_replaced_and_one_without_a_value_is_left_out(script: ModuleType) -> None:
    recipe = {"model": "large", "epochs": 1, "bf16": True}
    found = script.changed(recipe, {"model": "{model}", "epochs": None, "max_steps": 6})
    assert found == {"model": "{model}", "bf16": True, "max_steps": 6}
    assert script.filled(found, {"model": "/toy"})["model"] == "/toy"


def test_places_are_filled_in_wherever_they_are(script: ModuleType) -> None:
    value = {"datasets": [{"path": "{data}/chat.jsonl"}], "steps": 6, "text": '{"a": "{data}"}'}
    found = script.filled(value, {"data": "/d"})
    assert found == {"datasets": [{"path": "/d/chat.jsonl"}], "steps": 6, "text": '{"a": "/d"}'}


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.json")), ids=of_file)
def test_both_runs_differ_in_the_block_and_the_devices_alone(
    script: ModuleType, path: Path, tmp_path: Path
) -> None:
    recipe = json.loads(path.read_text(encoding="utf-8"))
    ours, stock = script.with_memascend(recipe, tmp_path), script.on_cpu_offload(recipe)
    assert ours.pop("memascend") == recipe["memascend"]
    for config in (recipe, ours, stock):
        config.pop("memascend", None)
        parts = [
            config["zero_optimization"].pop(f"offload_{part}") for part in ("param", "optimizer")
        ]
        assert {part["device"] for part in parts} == {"cpu" if config is stock else "nvme"}
    assert recipe == ours == stock


# -- what is compared ------------------------------------------------------------------------------


def safetensors(path: Path, tensors: dict[str, bytes], **metadata: str) -> None:
    header: dict[str, Any] = {"__metadata__": metadata}
    content = b""
    for name, data in tensors.items():
        offsets = [len(content), len(content) + len(data)]
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": offsets}
        content += data
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)


def ran(folder: Path, *, optimizer: str = STOCK, first: int = 1, loss: str = "0x1p+0") -> Path:
    """Write what a run of three steps leaves."""
    lines = [{"optimizer": optimizer}]
    lines += [{"step": n, "losses": [loss], "norm": "0x1p+1"} for n in range(first, 4)]
    folder.mkdir(exist_ok=True)
    (folder / "record.jsonl").write_text("\n".join(map(json.dumps, lines)))
    safetensors(folder / "out" / "model.safetensors", {"a": b"12", "b": b"3"})
    safetensors(folder / "out" / "checkpoint-2" / "model.safetensors", {"a": b"1"})
    return folder


def outcomes(script: ModuleType, folder: Path, **ours: Any) -> dict[Any, Any]:
    found = {}
    for kind, first in ((script.FULL, 1), (script.RESUMED, 3), (script.LORA, 1)):
        for is_ours in (False, True):
            changes = {"optimizer": OURS, "first": first, **ours} if is_ours else {"first": first}
            path = ran(folder / f"{kind}{is_ours}", **changes)
            found[kind, is_ours] = script.read_outcome(path)
    return found


@pytest.fixture
def framework(script: ModuleType) -> Any:
    return script.Framework(
        name="one",
        title="One",
        package="one",
        requirements=["one"],
        config="trainer.json",
        command=["one"],
        checkpoint="checkpoint-2",
        resume={"words": ["--resume"]},
        lora={"words": ["--lora"]},
    )


def test_equal_runs_are_as_expected(script: ModuleType, framework: Any, tmp_path: Path) -> None:
    cells, problems = script.compare(framework, outcomes(script, tmp_path))
    assert problems == []
    assert cells["losses"] == cells["norms"] == "3 of 3"
    assert (cells["weights"], cells["saved midway"]) == ("2 of 2", "1 of 1")
    assert cells["resumed"] == "1 of 1 steps, 3 of 3 tensors"
    assert cells["as never stopped"] == "yes"
    assert cells["LoRA"] == "3 of 3 steps, 3 of 3 tensors"


def test_a_loss_of_another_bit_is_a_problem(
    script: ModuleType, framework: Any, tmp_path: Path
) -> None:
    _, problems = script.compare(framework, outcomes(script, tmp_path, loss="0x1.0000000000001p+0"))
    assert [problem.partition(":")[0] for problem in problems] == ["losses", "resumed", "LoRA"]
    assert "0 of 3" in problems[0]


def test_a_run_without_memascend_is_a_problem(
    script: ModuleType, framework: Any, tmp_path: Path
) -> None:
    _, problems = script.compare(framework, outcomes(script, tmp_path, optimizer=STOCK))
    assert [STOCK in problem for problem in problems] == [True] * 3


def test_a_run_that_begins_anew_is_not_resumed(
    script: ModuleType, framework: Any, tmp_path: Path
) -> None:
    found = outcomes(script, tmp_path)
    for is_ours in (False, True):
        found[script.RESUMED, is_ours] = found[script.FULL, is_ours]
    _, [problem] = script.compare(framework, found)
    assert "the first step is 1" in problem


def test_nothing_saved_is_a_problem(script: ModuleType, framework: Any, tmp_path: Path) -> None:
    found = outcomes(script, tmp_path)
    for key, one in found.items():
        found[key] = script.Outcome(one.optimizer, one.steps, {})
    cells, problems = script.compare(framework, found)
    assert "weights: 0 of 0 are equal" in problems
    assert cells["saved midway"] == "no safetensors"


def test_tensors_are_compared_each_and_not_their_files(script: ModuleType, tmp_path: Path) -> None:
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    safetensors(first, {"a": b"12", "b": b"3"}, made="today")
    safetensors(second, {"b": b"3", "a": b"14"})
    found = script.digests(first), script.digests(second)
    assert script.equal(*found) == "1 of 2"
    assert script.equal(found[0], {}) == "0 of 2"


def test_what_a_resumed_run_was_given_does_not_count(script: ModuleType, tmp_path: Path) -> None:
    folder = ran(tmp_path / "run")
    found = script.read_outcome(folder, [folder / "out" / "checkpoint-2"])
    assert set(found.tensors) == {"model.safetensors:a", "model.safetensors:b"}


def test_a_run_without_a_step_is_an_error(script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no step"):
        script.read_outcome(tmp_path)


# -- packages --------------------------------------------------------------------------------------


def test_a_package_is_known_by_the_name_that_its_users_type(script: ModuleType) -> None:
    class Lists:
        def python(self, *words: str) -> Any:
            text = json.dumps([{"name": "ms_swift", "version": "4.6.0"}])
            return type("Done", (), {"stdout": text})

    assert script.installed(Lists()) == {"ms-swift": "4.6.0"}


def test_what_pip_has_changed_is_named(script: ModuleType) -> None:
    before = {"deepspeed": "0.18.9", "torch": "2.13.0", "gone": "1"}
    after = {"deepspeed": "0.19.8", "torch": "2.13.0", "memascend": "0.1.0"}
    assert script.changes(before, after) == ["deepspeed 0.18.9 -> 0.19.8", "gone 1 -> gone"]
    found = script.Found(moved=["deepspeed 0.18.9 -> 0.19.8"])
    framework = script.load(FILES[0])
    assert "| deepspeed 0.18.9 -> 0.19.8 |" in script.table([(framework, found)])


class Refuses:
    """Stands for an environment in which pip refuses commands with one of the words."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder = folder
        self.words = words
        self.installed: list[tuple[str, ...]] = []

    is_ready = False

    def create(self) -> None:
        self.folder.mkdir()

    def finish(self) -> None:
        pass

    def tail(self) -> str:
        return "the end of the log"

    def install(self, *words: str) -> None:
        if {*words} & {*self.words}:
            raise subprocess.CalledProcessError(1, "pip")
        self.installed.append(words)

    def python(self, *words: str) -> Any:
        return type("Done", (), {"stdout": '[{"name": "trl", "version": "1.0"}]'})


@pytest.mark.parametrize(
    ("refused", "is_run", "moved", "problem"),
    [
        ("--dry-run", True, "nothing", "not installed in one command"),
        ("setuptools", False, "?", "pip"),
    ],
)
def test_runs_are_made_where_the_framework_and_memascend_are_installed(
    script: ModuleType,
    framework: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refused: str,
    is_run: bool,
    moved: str,
    problem: str,
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(script, "try_runs", lambda one, *_: ran.append(one.name))
    environment = Refuses(tmp_path / "one", refused)
    found = script.try_framework(framework, environment, tmp_path / "memascend.whl")
    assert bool(ran) == is_run
    [text] = found.problems
    assert problem in text
    assert "the end of the log" in text
    columns = dict(zip(*(row.split(" | ") for row in rows(script, framework, found)), strict=True))
    assert columns["changed by memascend"] == moved


def test_a_framework_may_name_its_build_of_torch(
    script: ModuleType, framework: Any, tmp_path: Path
) -> None:
    build = "torch==2.13.0,!=2.13.0+cpu"
    environment = Refuses(tmp_path / "one")
    one = dataclasses.replace(framework, torch=build)
    script.install(one, environment, tmp_path / "memascend.whl", script.Found())
    assert environment.installed[0][0] == build
    constraints = environment.folder / "constraints.txt"
    assert constraints.read_text("utf-8") == build
    resolved = [words for words in environment.installed if {*one.requirements} & {*words}]
    assert resolved
    assert all(str(constraints) in words for words in resolved)


def rows(script: ModuleType, framework: Any, found: Any) -> list[str]:
    """Return the table's head and its row."""
    head, _, row = script.table([(framework, found)]).splitlines()
    return [head, row]


def test_a_name_that_no_framework_has_tries_nothing(script: ModuleType, tmp_path: Path) -> None:
    assert script.main(["--folder", str(tmp_path / "new"), "no-framework"]) == 1
    assert not (tmp_path / "new").exists()


def test_ctrl_c_leaves_the_rows_of_frameworks_that_are_done(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def one(framework: Any, *_: Any) -> Any:
        if framework.name != "trl":
            raise KeyboardInterrupt
        return script.Found(cells={"losses": "6 of 6"})

    monkeypatch.setattr(script, "build_wheel", lambda folder: folder)
    monkeypatch.setattr(script, "try_framework", one)
    with pytest.raises(KeyboardInterrupt):
        script.main(["--folder", str(tmp_path), "trl", "accelerate"])
    assert "| 6 of 6 |" in capsys.readouterr().out
