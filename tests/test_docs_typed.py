"""Every command of the documents is tried: run here, run by a test that is named, or excused.

A command is a line of a shell's block, or code in the text that begins with a program. The tables
below have each exactly once, by its text or by a pattern; a row without a command fails as well.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import subprocess
import sys
import venv
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from memascend.cli.main import main
from memascend.monitor import runs
from memascend.monitor.status import FINISHED
from tests.support import statuses
from tests.support.documents import DOCUMENTS, code_lines, code_spans, read
from tests.support.source_tree import ROOT

#: Programs with which code in the text is a command.
PROGRAMS = (
    *("accelerate", "apt-get", "axolotl", "bash", "conda", "cryptsetup", "deepspeed", "docker"),
    *("export", "git", "hf", "kubectl", "llamafactory-cli", "make", "memascend", "pip"),
    *("pre-commit", "python", "sbatch", "source", "swift", "torchrun", "trl", "ulimit", "umask"),
)

#: Run by the tests of this file.
RUN = (
    "PYTHONPATH=* python -m pytest *",
    "export *",
    "memascend COMMAND --help",
    "memascend config --nvme-path *",
    "memascend doctor",
    "memascend doctor --config ds.json",
    "memascend doctor --json",
    "memascend doctor --path *",
    "memascend env",
    "memascend monitor*",
    "memascend plan --table*",
    "memascend plan [A-Z]*",
    "python -c *",
    "python -m memascend",
    "python -m pytest *",
    "source *",
    "ulimit -c 0",
    "umask 077",
)

#: Run by another test or by CI, mostly at a smaller size. Their arguments are tried here.
ELSEWHERE = {
    "bash gpu-bundle/run.sh *": "tests/scripts/test_gpu_bundle.py",
    "deepspeed * examples/trainer/train.py*": "tests/examples/test_examples.py",
    "make bench": "tests/benchmarks/test_harness.py",
    "make bench-context*": "tests/benchmarks/test_bench_context.py",
    "make bench-formats *": "tests/benchmarks/test_bench_formats.py",
    "make bench-forms *": "tests/benchmarks/test_bench_forms.py",
    "make bench-memory": "tests/benchmarks/test_bench_memory.py",
    "make bench-overlap*": "tests/benchmarks/test_bench_overlap.py",
    "make bench-step": "tests/benchmarks/test_bench_step.py",
    "make demo*": "tests/integration/test_launchers.py",
    "make docs": ".ci/run",
    "make environment": ".github/workflows/deepspeed.yml",
    "make kill-test*": "tests/integration/test_kills.py",
    "make lint*": ".ci/run",
    "make showcase": "tests/scripts/test_showcase.py",
    "make test": ".github/workflows/ci.yml",
    "make test-all": ".ci/run",
    "make test-cpp": ".ci/run",
    "make test-frameworks": "tests/scripts/test_try_frameworks.py",
    "make test-releases": ".github/workflows/ci.yml",
    "make test-versions": "tests/scripts/test_try_versions.py",
    "memascend checkpoint to-universal *": "tests/cli/test_checkpoint.py",
    "memascend compare --out *": "tests/test_docs_commands.py",
    "memascend volume bench --sustained *": "tests/cli/volume/test_sustained.py",
    "memascend volume bench /mnt/*": "tests/cli/volume/test_bench.py",
    "memascend volume bench PATH*": "tests/cli/volume/test_bench.py",
    "memascend volume format /dev/*": "tests/cli/volume/test_device.py",
    "memascend volume show DEVICE --json": "tests/cli/volume/test_device.py",
    "pip install .": "tests/test_wheel.py",
    "pip install . *": "tests/test_wheel.py",
    "pip install memascend-*.whl": "tests/test_wheel.py",
    "python -m pip wheel *": "tests/test_wheel.py",
    "python -m tests.device.waits --whole": "tests/device/test_waits.py",
    "python benchmarks/adam_traffic.py": "tests/benchmarks/test_adam_traffic.py",
    "python benchmarks/bench_adam.py": "tests/benchmarks/test_bench_adam.py",
    "python benchmarks/bench_allocator.py": "tests/benchmarks/test_harness.py",
    "python benchmarks/bench_formats.py *": "tests/benchmarks/test_bench_formats.py",
    "python benchmarks/bench_lanes.py *": "tests/benchmarks/test_bench_lanes.py",
    "python benchmarks/bench_loading.py": "tests/deepspeed/weights/test_pretrained.py",
    "python benchmarks/bench_muon_momentum.py": "tests/benchmarks/test_bench_muon_momentum.py",
    "python benchmarks/bench_nvme.py *": "tests/benchmarks/test_harness.py",
    "python benchmarks/bench_overflow.py": "tests/benchmarks/test_harness.py",
    "python benchmarks/bench_overlap.py *": "tests/benchmarks/test_bench_overlap.py",
    "python benchmarks/bench_states.py": "tests/benchmarks/test_bench_states.py",
    "python benchmarks/bench_step.py *": "tests/benchmarks/test_bench_step.py",
    "python benchmarks/bench_verify.py *": "tests/benchmarks/test_harness.py",
    "python benchmarks/bench_volumes.py *": "tests/benchmarks/test_bench_volumes.py",
    "python benchmarks/pinned_shapes.py": "tests/benchmarks/test_harness.py",
    "python benchmarks/run.py *": "tests/benchmarks/test_harness.py",
    "python examples/toy.py": "tests/examples/test_examples.py",
    "python scripts/deepspeed_tests.py *": "tests/scripts/test_deepspeed_tests.py",
    "python scripts/test_cpp.py *": ".github/workflows/ci.yml",
    "python scripts/update_docs.py": "tests/test_docs.py",
    "python scripts/update_fingerprints.py*": "tests/scripts/test_update_fingerprints.py",
    "sbatch deploy/slurm.sh *": "tests/test_deploy.py",
    "sbatch deploy/slurm_nodes.sh *": "tests/test_deploy.py",
    "scripts/gpu_bench.sh *": "tests/benchmarks/test_bench_gpu.py",
    "scripts/gpu_bundle.sh *": "tests/scripts/test_gpu_bundle.py",
    "scripts/gpu_smoke.sh *": "tests/scripts/test_gpu_smoke.py",
    "torchrun *": "tests/integration/test_launchers.py",
}

#: Not run, for want of one of MISSING. The arguments of our own programs are tried here.
CANNOT = {
    "FORCE_TORCHRUN=1 llamafactory-cli train *": "package",
    "NPROC_PER_NODE=1 swift sft *": "package",
    "accelerate launch --config_file *": "package",
    "apt-get install *": "root",
    "axolotl train *": "package",
    "cryptsetup *": "root",
    "docker *": "Docker",
    "hf download *": "network",
    "kubectl apply *": "cluster",
    "make bench-volumes *": "root",
    "make fuzz*": "package",
    "make soak*": "hours",
    "make test-device": "hours",
    "make test-root": "root",
    "pip install [!.]*": "network",
    "pip uninstall memascend": "root",
    "pre-commit install": "package",
    "python -m pytest -m gpu tests": "GPU",
    "trl sft *": "package",
    "ulimit -l unlimited": "root",
}
MISSING = {
    "cluster": "several machines and their scheduler",
    "Docker": "a Docker daemon",
    "GPU": "a GPU",
    "hours": "hours, or minutes of all cores",
    "network": "a package index, or the Hub",
    "package": "a package that the tests' environment has not",
    "root": "root, or a machine to change",
}

#: Names of commands in the text, without arguments, and a line of a file.
NAMES = (
    "accelerate launch",
    "conda build",
    "deepspeed --hostfile",
    "hf upload",
    "memascend /dev/nvme1n1 /dev/urandom *",
    "memascend checkpoint to-universal",
    "memascend compare",
    "memascend config",
    "memascend config --one-pass 2",
    "memascend doctor --config",
    "memascend plan",
    "memascend plan --config",
    "memascend plan --path",
    "memascend plan --verbose",
    "memascend volume",
    "memascend volume bench",
    "memascend volume format",
    "memascend volume show",
    "memascend volume wipe",
    "pip install",
    "torchrun --nnodes",
    "trl sft",
)

#: Put in the place of the reader's own values.
STAND_INS = {
    "/mnt/ssd": ".",
    "/scratch/runs": "runs",
    "/var/lib/node_exporter": ".",
    "20261123T135407.511-27995": statuses.RUN,
    "COMMAND": "plan",
    "FOLDER": ".",
    "MODEL": "Llama-3.1-8B",
}
#: The Python programs that shell scripts start with their own arguments, and `sbatch` on a node.
STARTED = {
    "bash gpu-bundle/run.sh bench": "benchmarks/bench_gpu.py",
    "bash gpu-bundle/run.sh smoke": "scripts/gpu_smoke.py",
    "sbatch deploy/slurm_nodes.sh examples/trainer/train.py ds.json": (
        "examples/trainer/train.py --deepspeed ds.json"
    ),
    "scripts/gpu_bench.sh": "benchmarks/bench_gpu.py",
    "scripts/gpu_bundle.sh": "scripts/gpu_bundle.py",
    "scripts/gpu_smoke.sh": "scripts/gpu_smoke.py",
}
PROGRAM = re.compile(r"\b(?:benchmarks|examples|scripts|tests)/\S+\.py\b.*")
#: In the table of examples: a script, and its arguments for a model of the reader's own.
EXAMPLE = re.compile(r"^\| \[\w+\]\((\w+/train\.py)\).*`(--model [^`]+)`", re.MULTILINE)
#: A command at the top of a file of deploy/, which ends where it is explained.
AT_THE_TOP = re.compile(
    r"^# .*?\b((?:docker|kubectl|sbatch) (?=.*deploy/)(?:(?!: |  | \[)[^\n`])+)", re.MULTILINE
)


def is_command(span: str) -> bool:
    words = re.sub(r"^(?:[A-Z_]+=\S+ )+", "", span).split()
    ours = words[0].startswith(("benchmarks/", "scripts/", ".ci/"))
    return len(words) > 1 and "..." not in words and (ours or words[0] in PROGRAMS)


def collected() -> tuple[dict[str, list[Path]], set[str]]:
    """Return the documents of each command, and the commands that are lines of a block."""
    found: dict[str, list[Path]] = {}
    lines: set[str] = set()
    for document in DOCUMENTS:
        stripped = [re.sub(r"\s+#\s.*", "", line) for line in code_lines(document)]
        typed = [" ".join(line.split()) for line in stripped if line.strip()]
        lines.update(typed)
        for command in {*typed, *filter(is_command, code_spans(document))}:
            found.setdefault(command, []).append(document)
    for path in sorted((ROOT / "deploy").glob("*")):
        if path.is_file() and path.suffix != ".md":
            for command in AT_THE_TOP.findall(read(path)):
                found.setdefault(command, []).append(path)
    return found, lines


COMMANDS, LINES = collected()


@functools.cache
def rows_of(command: str) -> list[str]:
    """Return the rows that fit, of all tables: the one that has its text, else patterns."""
    rows = [*RUN, *ELSEWHERE, *CANNOT, *NAMES]
    exact = [row for row in rows if row == command]
    return exact or [row for row in rows if fnmatchcase(command, row)]


def of_rows(rows: Iterable[str]) -> list[str]:
    """Return the commands of these rows."""
    return [command for command in sorted(COMMANDS) if {*rows_of(command)} & {*rows}]


def recipe(command: str) -> str:
    """Return the commands that make would run, without running them."""
    words = ["make", "--dry-run", *shlex.split(command)[1:]]
    alone = os.environ | {"MAKEFLAGS": ""}  # also where make has started the tests
    done = subprocess.run(words, cwd=ROOT, env=alone, capture_output=True, text=True, check=True)
    return done.stdout.replace("\\\n", " ")


def python_programs(command: str) -> list[str]:
    """Return the programs of ours that a command starts, each with its arguments."""
    for start, program in STARTED.items():
        command = command.replace(start, program)
    if command.startswith("memascend "):
        return [command.partition(" > ")[0].replace("memascend", "memascend/__main__.py", 1)]
    if command.startswith("python -m tests."):
        module, _, arguments = command.removeprefix("python -m ").partition(" ")
        return [f"{module.replace('.', '/')}.py {arguments}"]
    text = recipe(command) if command.startswith("make ") else command
    lines = [line for line in text.splitlines() if "-m pytest" not in line]
    return [match.group() for line in lines if (match := PROGRAM.search(line))]


def is_named(command: str, text: str) -> bool:
    """Return whether a test's text has the program of a command, or the make target."""
    words = shlex.split(command)
    if words[0] == "make" and re.search(rf"\bmake .*\b{words[1]}\b", text):
        return True
    programs = [] if words[0] == "memascend" else python_programs(command)
    scripts = [Path(one.split()[0]).stem for one in programs]
    scripts += [Path(word).name for word in words if word.endswith(".sh")]
    names = [name for script in scripts for name in (script, script.removeprefix("bench_"))]
    if words[0] == "torchrun" or not names:
        return all(word in text for word in words[:3] if re.fullmatch(r"[a-z][a-z-]+", word))
    return any(re.search(rf"\b{re.escape(name)}\b", text) for name in names)


# -- every command has its row ---------------------------------------------------------------------


def test_every_command_has_one_row() -> None:
    found = {command: rows_of(command) for command in COMMANDS}
    assert {command: rows for command, rows in found.items() if len(rows) != 1} == {}
    assert LINES & {*of_rows(NAMES)} == set(), "a line of a block is typed as it is"


def test_every_row_has_a_command() -> None:
    rows = [*RUN, *ELSEWHERE, *CANNOT, *NAMES]
    assert len(rows) == len({*rows})
    assert [row for row in rows if not of_rows([row])] == []
    assert {*CANNOT.values()} == {*MISSING}


@pytest.mark.parametrize("row", ELSEWHERE)
def test_the_test_that_runs_a_command_names_its_program(row: str) -> None:
    text = read(ROOT / ELSEWHERE[row])
    assert [command for command in of_rows([row]) if not is_named(command, text)] == []


# -- every command is tried ------------------------------------------------------------------------


def test_every_program_takes_its_arguments() -> None:
    """Each is started in one process, which ends it behind its parser."""
    programs = {
        program
        for command in of_rows([*ELSEWHERE, *CANNOT])
        for program in python_programs(command)
    }
    with_your_model = EXAMPLE.findall(read(ROOT / "examples" / "README.md"))
    assert len(with_your_model) > 10
    programs |= {f"examples/{script} {arguments}" for script, arguments in with_your_model}
    assert called("-m", "tests.support.parsers", text=json.dumps(sorted(programs))) == "{}\n"


def test_pytest_finds_tests_for_every_command() -> None:
    commands = [command for command in of_rows(RUN) if "python -m pytest " in command]
    arguments = [shlex.split(command.partition(" pytest ")[2]) for command in commands]
    program = (
        "import json, pytest, sys\n"
        "quiet = ['--collect-only', '-qqq', '-n0', '-p', 'no:cacheprovider']\n"
        "found = [int(pytest.main([*words, *quiet])) for words in json.load(sys.stdin)]\n"
        "print(found)"
    )
    printed = called("-c", program, text=json.dumps(arguments))
    assert printed.splitlines()[-1] == str([0] * len(commands))


def called(*arguments: str, text: str) -> str:
    """Run Python at the root of the repository; return its output."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working folder of a command, with the files that pages say are there."""
    recipe = (ROOT / "configs" / "recipes" / "trainer.json").read_text("utf-8")
    (tmp_path / "ds.json").write_text(recipe.replace("/mnt/ssd/swap", str(tmp_path)))
    statuses.write(tmp_path / "runs", statuses.status(phase=FINISHED))
    monkeypatch.setattr(runs, "default_root", lambda: tmp_path / "runs")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", [c for c in of_rows(RUN) if c.startswith("memascend ")])
def test_a_command_of_ours_runs(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for theirs, own in STAND_INS.items():
        command = re.sub(rf"(?<!\S){re.escape(theirs)}\b", own, command)
    typed, _, file = command.partition(" > ")
    try:
        status = main(shlex.split(typed)[1:])
    except SystemExit as ended:  # --help
        status = int(ended.code or 0)
    printed = capsys.readouterr().out
    if "doctor" in typed:
        assert "trial" in printed
        status = 0  # its verdict on this machine is another matter
    assert status == 0
    assert printed or "--prometheus" in typed
    if file:
        config = json.loads(printed)
        assert config["zero_optimization"]["offload_param"]["nvme_path"]


@pytest.mark.parametrize(
    "command", [c for c in of_rows(RUN) if not re.match("memascend |.*python -m pytest ", c)]
)
def test_a_command_of_the_shell_runs(command: str, folder: Path) -> None:
    venv.create(folder / ".venv")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-euc", command],
        env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    if command.startswith("python -c "):
        [page] = COMMANDS[command]
        assert done.stdout.strip() in read(page)


def test_every_extra_that_is_installed_exists() -> None:
    extras = read(ROOT / "pyproject.toml").partition("[project.optional-dependencies]\n")[2]
    named = re.findall(r"(?:memascend|\"\.)\[(\w+)\]", " ".join(COMMANDS))
    assert named
    assert [name for name in named if not re.search(rf"^{name} = ", extras, re.MULTILINE)] == []
