"""Recipes: each framework's YAML leads to a JSON of ours that is accepted."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from memascend.base.units import GIB
from memascend.cli.main import main
from memascend.config.block import active_config
from memascend.config.deepspeed import parse_deepspeed
from memascend.deepspeed.attach.refusals import check_config
from memascend.plan.context import OURS_ON_DEVICE
from memascend.plan.request import PlanRequest
from tests.integration.programs import REPOSITORY, alone, run

yaml = pytest.importorskip("yaml")
torch = pytest.importorskip("torch")

FOLDER = REPOSITORY / "configs" / "recipes"
JSONS = sorted(FOLDER.glob("*.json"))
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


def json_of(name: str) -> str | None:
    found: Any = load(name)
    for key in KEYS[name] or ():
        found = found[key]
    return found if KEYS[name] else None


def test_every_recipe_is_tested() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(KEYS)
    assert {json_of(name) for name in KEYS} - {None} == {path.name for path in JSONS}


@pytest.mark.parametrize("name", [name for name, keys in KEYS.items() if keys])
def test_a_recipe_names_a_json_beside_it(name: str) -> None:
    found = json_of(name)
    assert found is not None
    assert (FOLDER / found).is_file()


@pytest.mark.parametrize("name", KEYS)
def test_numbers_in_a_recipe_are_numbers(name: str) -> None:
    """YAML reads 1e-5, without a point, as text."""
    rates = [value for key, value in load(name).items() if key.endswith(("rate", "ratio"))]
    assert all(isinstance(rate, float) for rate in rates)


@pytest.mark.parametrize("path", JSONS, ids=by_stem)
def test_a_json_of_the_recipes_is_accepted_with_everything_on_the_drive(path: Path) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    assert config["memascend"] == {"host_memory_limit": 0.5}  # of the machine, for each rank
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
    assert found is not None
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


@pytest.mark.parametrize("name", sorted(set(KEYS) - {"accelerate"}))
def test_a_recipe_fits_the_machine_that_it_names(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = load(name)
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    named = r"Fits a GPU of (\d+) GiB, host memory of (\d+) GiB and a drive of (\d+) TB\."
    [sizes] = re.findall(named, text)
    card, memory, terabytes = map(int, sizes)
    model = tmp_path / "config.json"
    model.write_text(json.dumps(SHAPES[first_of(recipe, MODEL_KEYS)] | COMMON))
    options = ["--config", str(FOLDER / (json_of(name) or "accelerate.json")), "--json"]
    options += ["--limit", f"{memory // 2}GiB"]  # the JSON's half, of the machine named
    options += ["--context", str(first_of(recipe, LENGTH_KEYS))]
    options += ["--batch", str(first_of(recipe, BATCH_KEYS))]
    options += ["--device-memory", f"{card}GiB", "--host-memory", f"{memory}GiB"]
    is_fused = name in FUSES_BY_ITSELF or any(recipe.get(key) for key in LIGER_KEYS)
    options += ["--fused-loss"] if is_fused else []
    assert main(["plan", str(model), *options]) == 0
    found = json.loads(capsys.readouterr().out)
    ways = found["context"]["ways"]

    # The JSON leaves activations on the device.
    assert ways[OURS_ON_DEVICE.title]["device_bytes"] <= card * GIB
    assert ways[OURS_ON_DEVICE.title]["host_bytes"] <= memory * GIB
    assert found["memascend"]["drive_bytes"] <= terabytes * 10**12


def test_the_batch_of_the_readme_is_that_of_the_recipes_and_one_below_the_plans(
    capsys: pytest.CaptureFixture[str],
) -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    [model, length, batch] = re.findall(
        r"--deepspeed ds\.json --model (\S+) .*?--max_length (\d+)"
        r" --per_device_train_batch_size (\d+)",
        readme.replace("\\\n    ", ""),
    )[0]
    assert {first_of(load(name), BATCH_KEYS) for name in ("axolotl", "ms_swift", "trl")} == {
        int(batch)
    }
    options = ["--config", str(FOLDER / "trainer.json"), "--limit", "16GiB", "--fused-loss"]
    options += ["--device-memory", "24GiB", "--host-memory", "32GiB", "--json"]
    assert main(["plan", model, *options]) == 0
    answer = json.loads(capsys.readouterr().out)["answer"]
    largest = answer["tokens"] // int(length)
    assert largest == int(batch) + 1
    assert f"the largest batch: {largest} here; use {batch}, as it estimates" in readme
    [row] = re.findall(r"^\| Qwen3-8B \|.*", readme, re.MULTILINE)
    assert f" {answer['tokens']:,} " in row


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
