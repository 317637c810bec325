"""Recipes: each framework's YAML leads to a JSON of ours that is accepted."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from memascend.base.units import GIB
from memascend.cli.config import one_pass_sections
from memascend.cli.main import main
from memascend.config.block import active_config
from memascend.config.deepspeed import parse_deepspeed
from memascend.deepspeed.attach.refusals import check_config
from memascend.plan.request import PlanRequest
from tests.integration.programs import REPOSITORY, alone, run

yaml = pytest.importorskip("yaml")
torch = pytest.importorskip("torch")

FOLDER = REPOSITORY / "configs" / "recipes"
JSONS = sorted(FOLDER.glob("*.json"))
#: Sections of the JSON for a large batch: each layer computes it in slices.
ONE_PASS: dict[str, dict[str, Any]] = {
    "micro_batches": {"count": 16},
    "activations": {"enabled": True, "device_bytes": "8GiB"},
}
#: Where a YAML names the JSON; the first of accelerate's two files has nothing of DeepSpeed.
KEYS = {
    "axolotl": ("deepspeed",),
    "llama_factory": ("deepspeed",),
    "llama_factory_vision": ("deepspeed",),
    "ms_swift": ("deepspeed",),
    "trl": None,
    "open_instruct": None,
    "accelerate": ("deepspeed_config", "deepspeed_config_file"),
}


def by_stem(path: Path) -> str:
    return path.stem


def load(name: str) -> dict[str, Any]:
    content = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def json_of(name: str) -> str:
    """Return the JSON that a recipe names, or the command in it, or accelerate.yaml."""
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    if KEYS[name] is None:
        stated = re.findall(r"^#.* --deepspeed_config_file (\S+)", text, re.MULTILINE)
        return str(stated[0]) if stated else json_of("accelerate")
    found: Any = load(name)
    for key in KEYS[name] or ():
        found = found[key]
    return str(found)


def test_every_recipe_is_tested() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(KEYS)
    assert {json_of(name) for name in KEYS} == {path.name for path in JSONS}


@pytest.mark.parametrize("name", KEYS)
def test_a_recipe_names_a_json_beside_it_as_the_readme_does(name: str) -> None:
    found = json_of(name)
    assert (FOLDER / found).is_file()
    readme = (FOLDER.parent / "README.md").read_text(encoding="utf-8")
    rows = [line for line in readme.splitlines() if f"| `{name}.yaml`" in line]
    assert all(f"| `{found}` |" in row for row in rows)
    assert len(rows) == (name != "accelerate")


@pytest.mark.parametrize("name", KEYS)
def test_numbers_in_a_recipe_are_numbers(name: str) -> None:
    """YAML reads 1e-5, without a point, as text."""
    rates = [value for key, value in load(name).items() if key.endswith(("rate", "ratio"))]
    assert all(isinstance(rate, float) for rate in rates)


@pytest.mark.parametrize("path", JSONS, ids=by_stem)
def test_a_json_of_the_recipes_is_accepted_with_everything_on_the_drive(path: Path) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    sections = ONE_PASS if path.name == "one_pass.json" else {}
    # Half of the machine's memory, for each rank.
    assert config["memascend"] == {"host_memory_limit": 0.5, **sections}
    assert active_config(config) is not None
    check_config(parse_deepspeed(config))
    request = PlanRequest.from_deepspeed(config)
    assert (request.parameters_device, request.optimizer_device) == ("nvme", "nvme")


def test_accelerate_reads_its_recipe() -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    path = FOLDER / "accelerate.yaml"
    config = config_args.load_config_from_file(str(path))
    assert config.distributed_type == "DEEPSPEED"
    assert config.deepspeed_config["zero3_init_flag"] is True
    # What is in the JSON must not be said twice.
    said = {*load(path.stem), *config.deepspeed_config}
    assert not said & {"mixed_precision", "zero_stage", "gradient_clipping"}


def test_the_command_of_open_instruct_names_another_json_than_accelerates_file() -> None:
    launch = pytest.importorskip("accelerate.commands.launch")
    text = (FOLDER / "open_instruct.yaml").read_text(encoding="utf-8")
    [words] = re.findall(r"^#   accelerate launch (.*) \\$", text, re.MULTILINE)
    words = words.replace("accelerate.yaml", str(FOLDER / "accelerate.yaml")).split()
    args, *_ = launch._validate_launch_command(
        launch.launch_command_parser().parse_args([*words, "finetune.py"])
    )
    assert args.deepspeed_config_file == json_of("open_instruct") == "accelerate.json"


#: Frameworks that make the optimizer themselves. ms-swift stops where the JSON names one.
MAKES_THE_OPTIMIZER = {
    "axolotl": False,
    "llama_factory": False,
    "llama_factory_vision": False,
    "ms_swift": True,
    "accelerate": True,
}


@pytest.mark.parametrize(("name", "makes_it"), MAKES_THE_OPTIMIZER.items())
def test_who_makes_the_optimizer_itself_gets_a_json_without_one(name: str, makes_it: bool) -> None:
    found = json_of(name)
    assert ("optimizer" in json.loads((FOLDER / found).read_text(encoding="utf-8"))) != makes_it


def test_of_every_recipe_with_a_json_it_is_known_who_makes_the_optimizer() -> None:
    assert set(MAKES_THE_OPTIMIZER) == {name for name, keys in KEYS.items() if keys}


def test_accelerate_keeps_the_betas_of_an_optimizer_that_the_script_makes() -> None:
    """ms-swift's beta2 is not DeepSpeed's default, and its recipe has no other place for it."""
    accelerate = pytest.importorskip("accelerate.utils.deepspeed")
    pytest.importorskip("deepspeed")
    made = torch.optim.AdamW([torch.nn.Parameter(torch.ones(4))], betas=(0.8, 0.95), eps=1e-6)
    (group,) = accelerate.map_pytorch_optim_to_deepspeed(made).param_groups
    assert (group["betas"], group["eps"]) == ((0.8, 0.95), 1e-6)


#: Shapes of the models that recipes name. OLMo 2 has those of a Llama, and small norms besides;
#: Qwen3-VL those of a Qwen3, and an image encoder of 0.6 billion weights that is not trained.
QWEN3_8B = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "intermediate_size": 12288,
    "vocab_size": 151936,
}
SHAPES = {
    "Qwen/Qwen3-8B": QWEN3_8B,
    "Qwen/Qwen3-VL-8B-Instruct": QWEN3_8B,
    "allenai/OLMo-2-1124-7B": {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "intermediate_size": 11008,
        "vocab_size": 100352,
    },
}
COMMON = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "head_dim": 128,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
MODEL_KEYS = ("base_model", "model", "model_name_or_path")
BATCH_KEYS = ("micro_batch_size", "per_device_train_batch_size")
LENGTH_KEYS = ("sequence_len", "cutoff_len", "max_length", "max_seq_length")


def first_of(recipe: dict[str, Any], keys: tuple[str, ...]) -> Any:
    return next(recipe[key] for key in keys if key in recipe)


#: Keys with which a framework computes the loss in chunks.
LIGER_KEYS = ("liger_fused_linear_cross_entropy", "enable_liger_kernel", "use_liger_kernel")
#: Those that always do (TRL from 1.16 on).
FUSES_BY_ITSELF = ("trl",)


@dataclasses.dataclass
class Planner:
    """Asks `memascend plan` about recipes on the machine that they name."""

    folder: Path
    capsys: pytest.CaptureFixture[str]

    def ask(self, name: str, *, config: Path | None = None, batch: int | None = None) -> Any:
        """Return the plan of a recipe, or of it with another JSON or batch."""
        recipe = load(name)
        text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
        named = r"Fits a GPU of (\d+) GiB, host memory of (\d+) GiB and a drive of (\d+) TB[.:]"
        [sizes] = re.findall(named, text)
        card, memory, terabytes = map(int, sizes)
        model = self.folder / "config.json"
        model.write_text(json.dumps(SHAPES[first_of(recipe, MODEL_KEYS)] | COMMON))
        options = ["--config", str(config or FOLDER / json_of(name)), "--json"]
        options += ["--context", str(first_of(recipe, LENGTH_KEYS))]
        options += ["--batch", str(batch or first_of(recipe, BATCH_KEYS))]
        options += ["--device-memory", f"{card}GiB", "--host-memory", f"{memory}GiB"]
        options += ["--drive-space", f"{terabytes}TB"]
        is_fused = name in FUSES_BY_ITSELF or any(recipe.get(key) for key in LIGER_KEYS)
        options += ["--fused-loss"] if is_fused else []
        assert main(["plan", str(model), *options]) == 0
        return json.loads(self.capsys.readouterr().out)["answer"]


@pytest.fixture
def planner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Planner:
    return Planner(tmp_path, capsys)


@pytest.mark.parametrize("name", sorted(set(KEYS) - {"accelerate"}))
def test_a_recipe_fits_the_machine_that_it_names(name: str, planner: Planner) -> None:
    answer = planner.ask(name)
    assert set(answer["available"]) == {"host memory", "drive space", "GPU memory"}
    assert answer["fits"], answer["lacking"]


def test_the_recipes_of_a_large_batch_fit_by_the_sections_of_their_json_alone(
    planner: Planner,
) -> None:
    names = [name for name in KEYS if json_of(name) == "one_pass.json" and name != "accelerate"]
    assert sorted(names) == ["ms_swift", "trl"]
    for name in names:
        assert first_of(load(name), BATCH_KEYS) == 32
        whole = planner.ask(name, config=FOLDER / "accelerate.json")
        assert set(whole["lacking"]) == {"GPU memory"}
        eight = planner.ask(name, config=FOLDER / "accelerate.json", batch=8)
        one_pass = planner.ask(name)
        written = [one["written_bytes"] / one["tokens"] for one in (one_pass, eight)]
        assert written[0] < 0.34 * written[1]  # "a third" in configs/README.md


def test_the_sections_of_one_pass_may_be_copied_to_the_json_with_an_optimizer(
    planner: Planner, tmp_path: Path
) -> None:
    config = json.loads((FOLDER / "trainer.json").read_text(encoding="utf-8"))
    config["memascend"] |= ONE_PASS
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    check_config(parse_deepspeed(config))
    assert planner.ask("axolotl", config=path, batch=32)["fits"]


def test_the_batch_of_the_readme_is_that_of_the_recipes_in_one_pass() -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    [[model, batch]] = re.findall(
        r"--deepspeed ds\.json --model (\S+) .*?--max_length 4096"
        r" --per_device_train_batch_size (\d+)",
        readme.replace("\\\n    ", ""),
    )
    assert f"memascend plan {model} --config ds.json --batch {batch} --context 4096" in readme
    sliced = [n for n in KEYS if json_of(n) == "one_pass.json" and n != "accelerate"]
    assert sliced == ["ms_swift", "trl"]
    assert {first_of(load(name), BATCH_KEYS) for name in sliced} == {int(batch)}
    [slice_] = re.findall(r"memascend config .*--one-pass (\d+)", readme)
    assert int(batch) == int(slice_) * ONE_PASS["micro_batches"]["count"]
    assert one_pass_sections(int(slice_), 24 * GIB)["activations"] == ONE_PASS["activations"]
    assert f"Layers compute {slice_} of the {batch} sequences at a time" in readme


def test_the_batch_of_the_other_recipes_is_one_below_the_largest_that_fits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = [name for name in KEYS if json_of(name) == "trainer.json" and "vision" not in name]
    [batch] = {first_of(load(name), BATCH_KEYS) for name in whole}
    options = ["--config", str(FOLDER / "trainer.json"), "--limit", "16GiB", "--fused-loss"]
    options += ["--device-memory", "24GiB", "--host-memory", "32GiB", "--json"]
    assert main(["plan", "Qwen/Qwen3-8B", *options]) == 0
    answer = json.loads(capsys.readouterr().out)["answer"]
    assert answer["tokens"] == 4096 * (batch + 1)


@pytest.mark.deepspeed
def test_the_trainers_line_of_the_readme_is_accepted_with_its_json(tmp_path: Path) -> None:
    """transformers raises an error where the JSON and the arguments differ."""
    pytest.importorskip("transformers")
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    [arguments] = re.findall(r"`TrainingArguments\((.*?), \.\.\.\)`", readme)
    shutil.copyfile(FOLDER / "trainer.json", tmp_path / "ds.json")
    program = f"""
from types import SimpleNamespace
from transformers import TrainingArguments
training = TrainingArguments({arguments}, output_dir="out", use_cpu=True)
model = SimpleNamespace(config=SimpleNamespace(hidden_size=64))
training.hf_deepspeed_config.trainer_config_finalize(training, model, 10)
print("precision", training.hf_deepspeed_config.config["bf16"]["enabled"])
"""
    done = run(["-c", program], cwd=tmp_path, environment=alone())
    assert done.returncode == 0, done.stdout[-4000:]
    assert "precision True" in done.stdout
