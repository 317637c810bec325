#!/usr/bin/env python3
"""Trains with each framework as pip installs it, with memascend and with DeepSpeed's CPU offload.

Each has a file in scripts/frameworks: what its users install, its recipe of configs/recipes, what
makes that small enough for a small random model on a CPU, and how it resumes. Losses, norms and
saved tensors must be equal to the last bit, in a whole run, a resumed one and one with LoRA; and
memascend, installed behind the framework, must leave the releases that pip chose for it alone.
Anything else ends the program with status 1. configs/README.md has its table.

An environment takes 2 to 4 GB, with a CUDA build of torch more, and is removed when its framework
is done; a framework takes about ten minutes. PIP_ARGS are given to every pip. Not part of .ci/run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from environments import ROOT, Environment, build_wheel

FOLDER = ROOT / ".venv" / "frameworks"
DATA = ROOT / "scripts" / "frameworks"
RECIPES = ROOT / "configs" / "recipes"
TORCH = "torch==2.13.0"
SHOWN = ("torch", "transformers", "deepspeed")
TITLES = ("losses", "norms", "weights", "saved midway", "resumed", "as never stopped", "LoRA")
HEAD = ("framework", *SHOWN, "changed by memascend", *TITLES, "GB")
NOT_TRIED = "not tried"
#: In a cell of a framework that was not installed.
UNKNOWN = "?"
FULL, RESUMED, LORA = "full", "resumed", "lora"
#: One rank, no download, no reports to anybody. The first core of two is left to others.
VARIABLES = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "disabled",
    "DO_NOT_TRACK": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


@dataclass(frozen=True)
class Framework:
    """A file of scripts/frameworks.

    Words of commands, and values of recipes, may contain {model}, {data}, {out}, {checkpoint},
    {root} and {port}.

    Attributes:
        name: The file's.
        title: In the table.
        package: The distribution whose version is shown.
        requirements: What its users give to `pip install`.
        config: The JSON of configs/recipes.
        command: Trains.
        recipes: YAML files of configs/recipes that the command names, and the keys of each that
            are changed, so that a small model is trained for a few steps; null leaves a key out.
        resume: How the command differs if it resumes: `recipe`, more keys of the first YAML,
            `words`, behind the command, or another `command`.
        lora: How it differs if it trains adapters.
        checkpoint: Saved midway, below the folder of output.
        files: Text of files in the folder of a run, by their names.
        variables: Of the environment.
        beside: What the toy needs besides; not what the recipe needs.
        alone: What is installed without its own requirements.
        model: Which one scripts/frameworks/model.py writes.
        environment: The framework in whose environment this one runs; its own if empty.
        torch: The build it is tried with, which a pip with wheels of its own may not prefer.
    """

    name: str
    title: str
    package: str
    requirements: list[str]
    config: str
    command: list[str]
    checkpoint: str
    recipes: dict[str, dict[str, Any]] = field(default_factory=dict)
    resume: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    beside: list[str] = field(default_factory=list)
    alone: list[str] = field(default_factory=list)
    model: str = "qwen3"
    environment: str = ""
    torch: str = TORCH

    @property
    def place(self) -> str:
        """The name of the environment."""
        return self.environment or self.name

    @property
    def kinds(self) -> list[str]:
        """The kinds of runs."""
        return [FULL, *[RESUMED] * bool(self.resume), *[LORA] * bool(self.lora)]

    def variant(self, kind: str) -> dict[str, Any]:
        """Return how a kind of run differs from the plain one."""
        return {RESUMED: self.resume, LORA: self.lora}.get(kind, {})


@dataclass(frozen=True)
class Outcome:
    """What a run left.

    Attributes:
        optimizer: The class of DeepSpeed's optimizer, with its module.
        steps: The number, losses and norm of each.
        tensors: A digest of each one saved, by its file and name.
    """

    optimizer: str
    steps: list[dict[str, Any]]
    tensors: dict[str, str]


@dataclass
class Found:
    """What came of a framework.

    Attributes:
        versions: The releases installed, by package.
        moved: The releases that installing memascend changed, as "package old -> new".
        cells: What the table says, by its column.
        problems: What was not as expected.
        gigabytes: What the environment took on the disk.
    """

    versions: dict[str, str] = field(default_factory=dict)
    moved: list[str] = field(default_factory=list)
    cells: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    gigabytes: float = 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Tries the frameworks that were asked for and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where environments are made")
    parser.add_argument("--keep", action="store_true", help="environments, for the next time")
    parser.add_argument("--list", action="store_true", help="the names, and try none")
    parser.add_argument("name", nargs="*", help="only these")
    args = parser.parse_args(arguments)
    known = {path.stem: path for path in sorted(DATA.glob("*.yaml"))}
    unknown = set(args.name) - set(known)
    if args.list or unknown:
        print("\n".join(known))
        return 1 if unknown else 0
    wheel = build_wheel(args.folder.resolve())
    results = []
    frameworks = [load(known[name]) for name in args.name or known]
    try:
        for index, framework in enumerate(frameworks):
            environment = Environment(args.folder.resolve() / framework.place)
            later = {one.place for one in frameworks[index + 1 :]}
            try:
                results.append((framework, try_framework(framework, environment, wheel)))
            finally:
                if not args.keep and framework.place not in later:
                    environment.remove()
    finally:  # Ctrl-C after an hour leaves the rows of that hour
        print(table(results))
    problems = [f"{one.title}: {problem}" for one, found in results for problem in found.problems]
    print("\n".join(["", *problems]) if problems else "\nall as expected")
    return 1 if problems else 0


def load(path: Path) -> Framework:
    """Reads the file of a framework."""
    return Framework(name=path.stem, **yaml.safe_load(path.read_text(encoding="utf-8")))


# -- packages --------------------------------------------------------------------------------------


def try_framework(framework: Framework, environment: Environment, wheel: Path) -> Found:
    """Installs a framework, then memascend, and makes the runs."""
    print(f"== {framework.title}", flush=True)
    found = Found()
    try:
        install(framework, environment, wheel, found)
        found.gigabytes = occupied_bytes(environment.folder) / 1e9
        try_runs(framework, environment, found)
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        found.problems.append(f"{error}\n{environment.tail()}")
    return found


def install(framework: Framework, environment: Environment, wheel: Path, found: Found) -> None:
    """Installs as a user would, and notes what memascend has changed, which must be nothing."""
    notes = environment.folder / "problems.json"
    constraint = ("-c", str(environment.folder / "constraints.txt"))
    if not environment.is_ready:
        environment.create()
        (environment.folder / "constraints.txt").write_text(framework.torch, encoding="utf-8")
        # DeepSpeed's source package imports torch while it is built.
        environment.install(framework.torch, "setuptools", "wheel", "ninja")
        build = ("--no-build-isolation", *constraint)
        environment.install(*build, *framework.requirements)
        if framework.alone:
            environment.install("--no-deps", *framework.alone)
        before = installed(environment)
        environment.install(*build, str(wheel))
        moved = changes(before, installed(environment))
        refused = ""
        try:
            both = (*framework.requirements, str(wheel))
            environment.install("--dry-run", "--ignore-installed", *build, *both)
        except subprocess.CalledProcessError:
            refused = environment.tail()
        if framework.beside:
            environment.install(*build, *framework.beside)
        notes.write_text(json.dumps({"moved": moved, "refused": refused}), encoding="utf-8")
        environment.finish()
    environment.install("--no-deps", "--force-reinstall", str(wheel))
    noted = json.loads(notes.read_text(encoding="utf-8"))
    found.moved = noted["moved"]
    found.versions = installed(environment)
    found.problems += [f"memascend has changed {change}" for change in found.moved]
    if noted["refused"]:
        found.problems.append(f"not installed in one command with memascend\n{noted['refused']}")


def installed(environment: Environment) -> dict[str, str]:
    """Returns the version of each package in an environment."""
    listed = environment.python("-m", "pip", "list", "--format", "json").stdout
    return {row["name"].lower().replace("_", "-"): row["version"] for row in json.loads(listed)}


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Returns what became of packages that were there before."""
    return [
        f"{name} {version} -> {after.get(name, 'gone')}"
        for name, version in before.items()
        if after.get(name) != version
    ]


def occupied_bytes(folder: Path) -> int:
    """Returns what the files below a folder take on the disk."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


# -- runs ------------------------------------------------------------------------------------------


def try_runs(framework: Framework, environment: Environment, found: Found) -> None:
    """Makes each kind of run on CPU offload and with memascend, and compares them."""
    runs = environment.folder / "runs" / framework.name
    shutil.rmtree(runs, ignore_errors=True)
    runs.mkdir(parents=True)
    made = environment.python(str(DATA / "model.py"), str(runs / "model"), framework.model)
    if made.returncode:
        raise ValueError("no model was made")
    outcomes = {}
    for kind in framework.kinds:
        for is_ours in (False, True):
            run = Run(framework, environment, runs, kind, is_ours)
            print(f"   {run.folder.name}", flush=True)
            outcomes[kind, is_ours] = run.make()
    found.cells, problems = compare(framework, outcomes)
    found.problems += problems


@dataclass(frozen=True)
class Run:
    """One run of a framework, in a folder of its own."""

    framework: Framework
    environment: Environment
    runs: Path
    kind: str
    is_ours: bool

    @property
    def folder(self) -> Path:
        """Where the run is made; `out` in it has what is saved."""
        return self.runs / f"{self.kind}-{'memascend' if self.is_ours else 'cpu'}"

    def make(self) -> Outcome:
        """Prepares the folder, trains, and returns what came of it."""
        framework, variant = self.framework, self.framework.variant(self.kind)
        (self.folder / "out").mkdir(parents=True)
        checkpoint = self.folder / "out" / framework.checkpoint
        if self.kind == RESUMED:
            whole = Run(framework, self.environment, self.runs, FULL, self.is_ours)
            shutil.copytree(whole.folder / "out" / framework.checkpoint, checkpoint)
        places = self._places(checkpoint)
        self._write_files(places, variant)
        command = [*variant.get("command", framework.command), *variant.get("words", [])]
        done = self.environment.run(
            [filled(word, places) for word in command],
            folder=self.folder,
            variables=VARIABLES
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": places["port"]}
            | {"RECORD": str(self.folder / "record.jsonl")}
            | {"PYTHONPATH": str(DATA / "recorder")}
            | framework.variables,
        )
        if done.returncode:
            raise ValueError(f"{self.folder.name}: the command ended with {done.returncode}")
        given = {path for path in (checkpoint,) if self.kind == RESUMED}
        return read_outcome(self.folder, given)

    def _places(self, checkpoint: Path) -> dict[str, str]:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        return {
            "model": str(self.runs / "model"),
            "data": str(ROOT / "examples" / "data"),
            "out": str(self.folder / "out"),
            "checkpoint": str(checkpoint),
            "root": str(ROOT),
            "port": str(port),
        }

    def _write_files(self, places: Mapping[str, str], variant: Mapping[str, Any]) -> None:
        """Writes the recipe at toy size, the JSON that it names, and the framework's own files."""
        framework = self.framework
        config = json.loads((RECIPES / framework.config).read_text(encoding="utf-8"))
        config = with_memascend(config, self.folder) if self.is_ours else on_cpu_offload(config)
        texts = {framework.config: json.dumps(config, indent=2)}
        more = variant.get("recipe", {})
        for name, toy in framework.recipes.items():
            recipe = yaml.safe_load((RECIPES / name).read_text(encoding="utf-8"))
            recipe = filled(changed(recipe, toy | more), places)
            texts[name] = yaml.safe_dump(recipe, sort_keys=False)
            more = {}
        texts |= {name: filled(text, places) for name, text in framework.files.items()}
        for name, text in texts.items():
            (self.folder / name).write_text(text, encoding="utf-8")


def changed(recipe: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a recipe with some keys changed, and without those that become None."""
    return {key: value for key, value in {**recipe, **changes}.items() if value is not None}


def filled(value: Any, places: Mapping[str, str]) -> Any:
    """Returns a value with the names in braces replaced, wherever they are in it."""
    if isinstance(value, str):
        for name, place in places.items():
            value = value.replace(f"{{{name}}}", place)
        return value
    if isinstance(value, Mapping):
        return {key: filled(one, places) for key, one in value.items()}
    return [filled(one, places) for one in value] if isinstance(value, list) else value


def with_memascend(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Returns a JSON of the recipes with the drive in a folder."""
    return sections(config, {"device": "nvme", "nvme_path": str(folder / "swap")})


def on_cpu_offload(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a JSON of the recipes without memascend, on CPU offload."""
    return sections({k: v for k, v in config.items() if k != "memascend"}, {"device": "cpu"})


def sections(config: Mapping[str, Any], offload: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JSON with both offload sections replaced."""
    both = {"offload_param": dict(offload), "offload_optimizer": dict(offload)}
    return {**config, "zero_optimization": {**config["zero_optimization"], **both}}


# -- comparison ------------------------------------------------------------------------------------


def read_outcome(folder: Path, given: Iterable[Path] = ()) -> Outcome:
    """Reads the record of a run and what it saved, but for folders that it was given.

    Raises:
        ValueError: It has trained no step.
    """
    record = folder / "record.jsonl"
    lines = record.read_text(encoding="utf-8").splitlines() if record.exists() else []
    rows = [json.loads(line) for line in lines]
    steps = [row for row in rows if "step" in row]
    if not steps:
        raise ValueError(f"{folder.name}: no step was made")
    tensors = {}
    for path in sorted((folder / "out").rglob("*.safetensors")):
        if not any(place in path.parents for place in given):
            name = str(path.relative_to(folder / "out"))
            tensors |= {f"{name}:{key}": value for key, value in digests(path).items()}
    return Outcome(next(row["optimizer"] for row in rows if "optimizer" in row), steps, tensors)


def digests(path: Path) -> dict[str, str]:
    """Returns a digest of each tensor of a safetensors file, with its dtype and shape."""
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    found = {}
    for name, entry in json.loads(content[8:begin]).items():
        if name != "__metadata__":
            first, last = (begin + offset for offset in entry["data_offsets"])
            digest = hashlib.sha256(content[first:last]).hexdigest()
            found[name] = f"{entry['dtype']} {entry['shape']} {digest}"
    return found


def compare(
    framework: Framework, outcomes: Mapping[tuple[str, bool], Outcome]
) -> tuple[dict[str, str], list[str]]:
    """Returns the table's cells, and what was not equal or not as it should be."""
    problems = [
        f"{kind}: the optimizer is {outcome.optimizer}"
        for (kind, is_ours), outcome in outcomes.items()
        if outcome.optimizer.startswith("memascend.") != is_ours
    ]
    stock, ours = outcomes[FULL, False], outcomes[FULL, True]
    midway = f"{framework.checkpoint}/"
    cells = dict.fromkeys(TITLES, NOT_TRIED) | {
        "losses": equal(of_steps(stock, "losses"), of_steps(ours, "losses")),
        "norms": equal(of_steps(stock, "norm"), of_steps(ours, "norm")),
        "weights": equal(without(stock.tensors, midway), without(ours.tensors, midway)),
        "saved midway": equal(within(stock.tensors, midway), within(ours.tensors, midway)),
    }
    if (
        cells["saved midway"] == "0 of 0"
    ):  # the resumed run shows what DeepSpeed's own form is worth
        cells["saved midway"] = "no safetensors"
    if LORA in framework.kinds:
        cells["LoRA"] = both(outcomes[LORA, False], outcomes[LORA, True])
    if RESUMED in framework.kinds:
        resumed = outcomes[RESUMED, False], outcomes[RESUMED, True]
        cells["resumed"] = both(*resumed)
        first = resumed[1].steps[0]["step"]
        if not 1 < first <= ours.steps[-1]["step"]:
            problems.append(f"resumed: the first step is {first}")
        tails = [one.steps[first - 1 :] for one in (stock, ours)]
        same = [one.steps == tail for one, tail in zip(resumed, tails, strict=True)]
        cells["as never stopped"] = "yes" if all(same) else "no" if not any(same) else "one of both"
    for title, cell in cells.items():
        counts = re.findall(r"(\d+) of (\d+)", cell)
        if any(count != total or total == "0" for count, total in counts):
            problems.append(f"{title}: {cell} are equal")
    return cells, problems


def of_steps(outcome: Outcome, key: str) -> dict[str, Any]:
    """Returns one figure of each step, by the step's number."""
    return {str(row["step"]): row[key] for row in outcome.steps}


def within(tensors: Mapping[str, str], prefix: str) -> dict[str, str]:
    """Returns the tensors of the files below a folder."""
    return {name: digest for name, digest in tensors.items() if name.startswith(prefix)}


def without(tensors: Mapping[str, str], prefix: str) -> dict[str, str]:
    """Returns the tensors of all other files."""
    return {name: digest for name, digest in tensors.items() if not name.startswith(prefix)}


def equal(stock: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Returns how many of all values are equal, as "3 of 4"."""
    names = {*stock, *ours}
    count = sum(name in stock and name in ours and stock[name] == ours[name] for name in names)
    return f"{count} of {len(names)}"


def both(stock: Outcome, ours: Outcome) -> str:
    """Returns how many steps and tensors of two runs are equal."""
    steps = [{str(row["step"]): row for row in outcome.steps} for outcome in (stock, ours)]
    return f"{equal(*steps)} steps, {equal(stock.tensors, ours.tensors)} tensors"


def table(results: Iterable[tuple[Framework, Found]]) -> str:
    """Returns the results as Markdown."""
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for framework, found in results:
        versions = [found.versions.get(name, "") for name in (framework.package, *SHOWN)]
        cells = [found.cells.get(title, "") for title in TITLES]
        first = f"{framework.title} {versions[0]}"
        moved = ", ".join(found.moved) or ("nothing" if found.versions else UNKNOWN)
        row = [first, *versions[1:], moved, *cells, f"{found.gigabytes:.1f}"]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
