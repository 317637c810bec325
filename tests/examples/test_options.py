"""Options of the examples: a model of one's own, its data, and values that are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.programs import alone, losses, needs_entry_point, run

from .test_examples import FOLDER, NAMES, ONE_THREAD, needed, toy_of

PROGRAM = Path(__file__).with_name("options_program.py")
#: Its loop is plain: it has no trainer that could stand aside.
LOOP = "accelerate"
WITH_TRAINER = [name for name in NAMES if name != LOOP]
#: Loaded by TRL's trainers, and their texts are cut there, too.
BY_TRL = {"sft", "dpo"}
#: Families whose tokenizers have no padding token on the Hub.
WITHOUT_PADDING = {"llama", "wide", "mixtral"}
LENGTH, LORA_R = 24, 4
COMMON = {
    "output_dir": "elsewhere",
    "learning_rate": 3e-4,
    "per_device_train_batch_size": 3,
    "max_steps": 5,
    "seed": 7,
}
NO_DEEPSPEED = ("--deepspeed", "")
MESSAGES = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which colour?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "Red."}]},
]

#: Commands with a wrong value, and the words of their message.
WRONG = {
    ("trainer", "--learning_rate", "fast"): ("--learning_rate", "'fast'"),
    ("moe", "--max_steps", "all"): ("--max_steps", "'all'"),
    ("qlora", "--storage", "int3"): ("--storage", "'int3'", "uint8", "bfloat16"),
    ("packed", "--model", "mine/llama", "--max_length", "100000"): (
        *("--max_length", "100000", "text.jsonl"),
    ),
    ("generate", "--lenght", "64"): ("--lenght",),
    ("encoder_decoder", "--model", "mine/nowhere/t5"): ("mine/nowhere/t5",),
    ("vision_language", "--model", "mine/llava", "--data", "none.jsonl"): ("none.jsonl",),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with models of a user's own: saved toys, without padding tokens."""
    image = pytest.importorskip("PIL.Image")
    for name in WITH_TRAINER:
        needed(name)
    folder = tmp_path_factory.mktemp("options")
    done = run([str(FOLDER / "toy.py"), "--folder", "mine"], cwd=folder, environment=ONE_THREAD)
    assert done.returncode == 0, done.stdout[-4000:]
    for family in WITHOUT_PADDING:
        path = folder / "mine" / family / "tokenizer_config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        del config["pad_token"]
        path.write_text(json.dumps(config), encoding="utf-8")
    image.new("RGB", (64, 64), (200, 30, 30)).save(folder / "red.png")
    rows = [{"image": str(folder / "red.png"), "messages": MESSAGES}] * 2
    (folder / "images.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return folder


def command(name: str) -> list[str]:
    """Return an example with a model of the user's own and other values than its defaults."""
    words = [name, "--model", f"mine/{toy_of(name)}", *NO_DEEPSPEED]
    for option, value in COMMON.items():
        words += [f"--{option}", str(value)]
    if name == "vision_language":
        words += ["--data", "images.jsonl"]
    else:
        words += ["--max_length", str(LENGTH)]
    if name in ("lora", "qlora"):
        words += ["--lora_r", str(LORA_R)]
    if name == "generate":
        words += ["--prompt", "Salt", "--new_tokens", "3"]
    return words


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[tuple[str, ...], dict[str, Any]]:
    """Return the result of each command; all run in one process."""
    commands = [command(name) for name in WITH_TRAINER]
    commands += [[*words, *NO_DEEPSPEED] for words in WRONG]
    done = run([str(PROGRAM), json.dumps(commands)], cwd=folder, environment=ONE_THREAD | alone())
    lines = [row for row in done.stdout.splitlines() if row.startswith("RESULT ")]
    assert lines, done.stdout[-6000:]
    found = json.loads(lines[-1].removeprefix("RESULT "))
    return {tuple(words): one for words, one in zip(commands, found, strict=True)}


@pytest.mark.full
@pytest.mark.parametrize("name", WITH_TRAINER)
def test_an_example_takes_a_saved_model_and_the_values_of_a_user(
    name: str, outcomes: dict[tuple[str, ...], dict[str, Any]]
) -> None:
    found = outcomes[tuple(command(name))]
    assert found.get("error") is None
    assert found["model"] == f"mine/{toy_of(name)}"
    assert found["settings"] | COMMON == found["settings"]
    if name in BY_TRL:
        assert found["settings"]["max_length"] == LENGTH
    elif name == "vision_language":
        assert found["rows"] == 2
    else:  # texts are longer, and cut
        assert found["shape"] == [2, LENGTH]
    assert found["lora_r"] == ([LORA_R] if name in ("lora", "qlora") else [])
    expected = {"prompt": "Salt", "new_tokens": 3} if name == "generate" else {}
    assert found["set"] == expected


@pytest.mark.full
@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_a_wrong_value_is_named(
    words: tuple[str, ...], outcomes: dict[tuple[str, ...], dict[str, Any]]
) -> None:
    error = outcomes[(*words, *NO_DEEPSPEED)]["error"]
    assert all(word in error for word in WRONG[words]), error


@pytest.mark.deepspeed
@pytest.mark.full
@needs_entry_point
def test_the_plain_loop_takes_a_saved_model_and_the_values_of_a_user(folder: Path) -> None:
    needed(LOOP)
    options = ["--model", "mine/llama", "--max_length", str(LENGTH), "--learning_rate", "1e-3"]
    options += ["--per_device_train_batch_size", "8", "--max_steps", "2", "--warmup_steps", "1"]
    options += ["--seed", "7", "--save_steps", "2", "--output_dir", "elsewhere"]
    script = str(FOLDER / LOOP / "train.py")
    done = run([script, *options], cwd=folder, environment=ONE_THREAD | alone())
    assert done.returncode == 0, done.stdout[-6000:]
    found = losses(done.stdout)
    assert len(found) == 2
    assert (folder / "elsewhere" / "checkpoint-2").is_dir()
    assert (folder / "elsewhere" / "model.safetensors").is_file()
    # The seed decides the order of the rows.
    other = run([script, *options, "--seed", "8"], cwd=folder, environment=ONE_THREAD | alone())
    assert losses(other.stdout) != found
    wrong = run([script, "--learning_rate", "fast"], cwd=folder, environment=ONE_THREAD | alone())
    assert wrong.returncode == 2
    assert "--learning_rate" in wrong.stdout
    assert "'fast'" in wrong.stdout
