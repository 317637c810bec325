"""Every example trains as it is, and to the bit as it does without the block on CPU offload."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from memascend.config.block import parse_block
from memascend.deepspeed.monitor.logs import TRAINER_NAMES
from tests.integration.programs import (
    REPOSITORY,
    alone,
    armed_lines,
    losses,
    needs_entry_point,
    run,
)
from tests.support.ports import free_port

FOLDER = REPOSITORY / "examples"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/train.py"))
#: A progress bar may stand before it in its line.
SAMPLE = re.compile(r"sample '.*'|trainable params.*")
STEPS = 3
#: Trained in one pass, in slices; CPU offload makes so many micro-steps of so many rows instead.
IN_SLICES = {"packed": ("--gradient_accumulation_steps", "4", "--per_device_train_batch_size", "2")}
#: What memascend adds to a line of a step that the Trainer logs.
OF_A_STEP = {f"memascend_{name}" for name in TRAINER_NAMES}
#: Their Trainer is made before DeepSpeed has seen the block: docs/monitor.md.
MADE_BEFORE = {"qlora"}
#: Started by DeepSpeed's launcher, which imports DeepSpeed twice more and knows no example.
LAUNCHED = "trainer"
#: Models of an example, where there is more than one: the reference of DPO.
MODEL_COUNT = {"dpo": 2}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

each_example = pytest.mark.parametrize("name", NAMES)
#: Named as a parameter, so that whoever runs a share of the tests makes its run once.
the_trainer = pytest.mark.parametrize("name", ["trainer"])


@dataclasses.dataclass
class Trained:
    """What came of one run: its log, each step's figures, and a digest of each file of weights."""

    log: str
    steps: list[dict[str, Any]]
    weights: dict[str, str]


def train(name: str, folder: Path, toys: Path, *arguments: str, is_stock: bool = False) -> Trained:
    """Run one example in a folder of its own: with the block, or without it on CPU offload."""
    folder.mkdir(exist_ok=True)
    if not (folder / "toy").exists():
        (folder / "toy").symlink_to(toys)
    script = [str(FOLDER / name / "train.py"), "--output_dir", "out", *arguments]
    script += ["--max_steps", str(STEPS)]
    launcher: list[str] = []
    environment = ONE_THREAD | alone()
    if is_stock:
        (folder / "cpu.json").write_text(json.dumps(on_cpu_offload(name)))
        script += ["--deepspeed", "cpu.json", *IN_SLICES.get(name, ())]
    elif name == LAUNCHED:
        launcher = ["-m", "deepspeed.launcher.runner", "--num_gpus", "1"]
        launcher += ["--master_port", str(free_port())]
        environment = dict(ONE_THREAD)
    done = run([*launcher, *script], cwd=folder, environment=environment)
    assert done.returncode == 0, done.stdout[-8000:]
    model_count = 0 if is_stock else MODEL_COUNT.get(name, 1)
    assert len(armed_lines(done.stdout)) == model_count
    assert done.stdout.count("host memory of this rank, measured") == model_count
    if not is_stock and name not in MADE_BEFORE:
        assert all(named >= OF_A_STEP for named in named_by_trainer(folder / "out"))
    return Trained(done.stdout, figures(folder / "out", done.stdout), weights(folder / "out"))


def on_cpu_offload(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((FOLDER / name / "ds_config.json").read_text())
    del config["memascend"]
    for section in ("offload_param", "offload_optimizer"):
        config["zero_optimization"][section] = {"device": "cpu"}
    return config


def figures(out: Path, log: str) -> list[dict[str, Any]]:
    """Return what was logged of each step, but for times and for what memascend says of itself."""
    state = out / "trainer_state.json"
    if not state.exists():
        return [{"loss": float(loss)} for loss in losses(log)]
    timed = ("runtime", "per_second", "flos", "tokens_per", "memascend_")
    return [
        {key: value for key, value in row.items() if not any(word in key for word in timed)}
        for row in json.loads(state.read_text())["log_history"]
    ]


def named_by_trainer(out: Path) -> list[set[str]]:
    """Return the names in each line that the Trainer has logged of a step; none without one."""
    state = out / "trainer_state.json"
    rows = json.loads(state.read_text())["log_history"] if state.exists() else []
    return [set(row) for row in rows if "loss" in row]


def weights(out: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(out.glob("*.safetensors"))
    }


@dataclasses.dataclass
class Runs:
    """Runs of the examples, each made once: with the block, and without it on CPU offload."""

    folder: Path
    toys: Path
    done: dict[str, tuple[Trained, Trained]] = dataclasses.field(default_factory=dict)

    def of(self, name: str) -> tuple[Trained, Trained]:
        if name not in self.done:
            ours = train(name, self.folder / f"{name} ours", self.toys)
            stock = train(name, self.folder / f"{name} stock", self.toys, is_stock=True)
            self.done[name] = ours, stock
        return self.done[name]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("examples")
    done = run([str(FOLDER / "toy.py")], cwd=folder, environment=ONE_THREAD)
    assert done.returncode == 0, done.stdout[-4000:]
    return Runs(folder, folder / "toy")


@pytest.mark.deepspeed
@pytest.mark.full
@needs_entry_point
@each_example
def test_an_example_gives_the_bits_of_cpu_offload(name: str, runs: Runs) -> None:
    needed(name)
    ours, stock = runs.of(name)
    found = [row["loss"] for row in ours.steps if "loss" in row]
    assert len(found) == STEPS
    assert all(math.isfinite(loss) for loss in found)
    if name in IN_SLICES:  # micro-steps of an epoch are other parts of it
        for row in (*ours.steps, *stock.steps):
            del row["epoch"]
    assert ours.steps == stock.steps
    assert ours.weights == stock.weights != {}
    assert SAMPLE.findall(ours.log) == SAMPLE.findall(stock.log)
    assert list((runs.folder / f"{name} ours" / "nvme_swap").iterdir()) == []


@pytest.mark.deepspeed
@pytest.mark.full
@needs_entry_point
@the_trainer
def test_a_resumed_trainer_ends_like_one_never_interrupted(name: str, runs: Runs) -> None:
    needed(name)
    _, stock = runs.of(name)
    folder = runs.folder / "trainer ours"
    shutil.rmtree(folder / "out" / "checkpoint-3")
    again = train("trainer", folder, runs.toys, "--resume_from_checkpoint", "last")
    assert again.log.count("'loss': ") == 1
    assert again.weights == stock.weights
    assert [row for row in again.steps if "loss" in row] == [
        row for row in stock.steps if "loss" in row
    ]


@pytest.mark.deepspeed
@pytest.mark.full
@needs_entry_point
@the_trainer
def test_an_example_prints_what_the_page_shows(name: str, runs: Runs) -> None:
    needed(name)
    ours, _ = runs.of(name)
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    lines = page.partition("```text\n")[2].partition("```")[0].splitlines()
    assert len(lines) > 5
    for line in lines:
        words = re.escape(line).replace(r"\.\.\.", ".*")
        assert re.search(re.sub(r"\d+(\\\.\d+)?", r"[\\d.]+", words), ours.log), line


@pytest.mark.deepspeed
@pytest.mark.full
@needs_entry_point
@the_trainer
def test_what_an_example_saves_is_a_model_to_start_from(name: str, runs: Runs) -> None:
    needed(name)
    runs.of(name)
    transformers = pytest.importorskip("transformers")
    out = runs.folder / "trainer ours" / "out"
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert str(model.dtype) == "torch.bfloat16"
    assert transformers.AutoTokenizer.from_pretrained(out)("a").input_ids == [64]


def toy_of(name: str) -> str:
    """Return the toy that an example trains by default."""
    script = (FOLDER / name / "train.py").read_text(encoding="utf-8")
    [toy] = re.findall(r'default="toy/(\w+)"', script)
    return str(toy)


def needed(name: str) -> None:
    """Skip where a library that the example imports is not installed."""
    tree = ast.parse((FOLDER / name / "train.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                pytest.importorskip(alias.name.split(".")[0])


# -- what an example is made of ------------------------------------------------------------------


@each_example
def test_an_example_does_not_mention_memascend(name: str) -> None:
    text = (FOLDER / name / "train.py").read_text(encoding="utf-8")
    assert "memascend" not in text.lower()


@each_example
def test_an_example_has_a_block_that_is_accepted(name: str) -> None:
    config = json.loads((FOLDER / name / "ds_config.json").read_text(encoding="utf-8"))
    parse_block(config["memascend"])


@each_example
def test_an_example_tells_how_to_run_it(name: str) -> None:
    script = (FOLDER / name / "train.py").read_text()
    lines = (FOLDER / "README.md").read_text(encoding="utf-8").splitlines()
    [row] = [line for line in lines if line.startswith(f"| [{name}]({name}/train.py) |")]
    assert f"| `{toy_of(name)}` |" in row
    # Not the few of a toy, nor its checkpoints.
    assert re.search(r"`--model \S+ [^`]*--max_steps \d{4}` \|$", row)
    saves = "save_steps" in script or "--save_strategy steps" in row
    assert saves == bool(re.search(r"--save_steps \d{3}\b", row))


def test_there_is_an_example_of_each_kind() -> None:
    assert len(NAMES) == 11
