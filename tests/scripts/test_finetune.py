"""The training script: an ordinary one, whose loss falls and whose runs can be compared."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.scripts import SCRIPTS, load_script

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = SCRIPTS / "finetune.py"
STOCK_CONFIGS = sorted(
    path for path in (ROOT / "configs").glob("*.json") if not path.stem.endswith("_memascend")
)


@pytest.fixture(scope="module")
def finetune() -> ModuleType:
    return load_script("finetune")


def write_config(folder: Path, device: str) -> Path:
    """Writes the CPU configuration at the scale of the tiny models; a folder holds one run."""
    config = json.loads((ROOT / "configs" / "nvme_cpu.json").read_text(encoding="utf-8"))
    zero = config["zero_optimization"]
    zero["offload_param"].update(device=device, buffer_size=4096 * 384, nvme_path=str(folder))
    zero["offload_optimizer"].update(device=device, nvme_path=str(folder))
    # Stock asks twice for a parameter when the prefetch window is longer than the model.
    zero["stage3_prefetch_bucket_size"] = 0
    path = folder / f"{device}.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def run(folder: Path, *arguments: str, device: str = "nvme") -> str:
    config = write_config(folder, device)
    command = [sys.executable, str(SCRIPT), "--deepspeed_config", str(config), *arguments]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def losses(output: str) -> list[float]:
    return [float(text) for text in re.findall(r"^step \d+ loss (\S+) time", output, re.MULTILINE)]


def digests(output: str) -> dict[str, str]:
    return dict(re.findall(r"^digest (\S+) ([0-9a-f]{64})$", output, re.MULTILINE))


@pytest.mark.parametrize("path", STOCK_CONFIGS, ids=lambda path: path.stem)
def test_paired_configs_differ_by_the_empty_block_and_the_memory_it_needs_not(path: Path) -> None:
    stock = json.loads(path.read_text(encoding="utf-8"))
    if stock["zero_optimization"]["offload_param"]["max_in_cpu"]:
        del stock["zero_optimization"]["offload_param"]["max_in_cpu"]
    pair = path.with_name(f"{path.stem}_memascend.json")
    ours: dict[str, Any] = json.loads(pair.read_text(encoding="utf-8"))
    assert ours.pop("memascend") == {}
    assert ours == stock


def test_every_config_has_its_pair() -> None:
    assert len(STOCK_CONFIGS) * 2 == len(list((ROOT / "configs").glob("*.json")))
    assert len(STOCK_CONFIGS) >= 3


def test_the_script_does_not_mention_memascend() -> None:
    assert "memascend" not in SCRIPT.read_text(encoding="utf-8").lower()


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("qwen2.5-0.5b", 494),
        ("qwen2.5-7b", 7616),
        ("qwen2.5-32b", 32764),
        ("llama-3.2-1b", 1236),
        ("llama-3.1-8b", 8030),
        ("gpt2-125m", 124),
        ("mixtral-8x7b", 46703),
    ],
)
def test_public_shapes_have_their_published_sizes(
    finetune: ModuleType, name: str, millions: int
) -> None:
    import torch

    with torch.device("meta"):
        model = finetune.build_model(name, torch.bfloat16)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == millions


def test_every_shape_can_be_built(finetune: ModuleType) -> None:
    import torch

    for name in finetune.SHAPES:
        with torch.device("meta"):
            finetune.build_model(name, torch.bfloat16)


def test_text_is_read_from_files_and_folders_in_a_fixed_order(
    finetune: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "b.txt").write_bytes(b"two")
    (tmp_path / "a.txt").write_bytes(b"one")
    (tmp_path / "image").write_bytes(b"\x00\x01")
    assert finetune.load_tokens([tmp_path], "none").tolist() == list(b"onetwo")
    assert finetune.load_tokens([tmp_path / "b.txt"], "none").tolist() == list(b"two")


@pytest.mark.deepspeed
@pytest.mark.full
@pytest.mark.parametrize(
    "family",
    [
        "qwen2.5",
        # As parity has them in many more ways.
        pytest.param("llama-3", marks=pytest.mark.matrix),
        pytest.param("gpt2", marks=pytest.mark.matrix),
    ],
)
def test_the_loss_falls_and_equals_that_of_cpu_offload(tmp_path: Path, family: str) -> None:
    arguments = ["--model", f"{family}-tiny", "--steps", "4", "--digest", "parameters"]
    nvme = run(tmp_path, *arguments)
    cpu = run(tmp_path, *arguments, device="cpu")
    assert len(losses(nvme)) == 4
    assert losses(nvme)[-1] < losses(nvme)[0] - 1
    assert losses(nvme) == losses(cpu)
    assert digests(nvme) == digests(cpu) != {}


@pytest.mark.deepspeed
@pytest.mark.full
@pytest.mark.matrix
def test_the_loss_of_a_mixture_of_experts_falls(tmp_path: Path) -> None:
    # On CPU offload alone: stock's NVMe path gives other losses in every run of this model.
    found = losses(run(tmp_path, "--model", "mixtral-tiny", "--steps", "4", device="cpu"))
    assert found[-1] < found[0] - 1


@pytest.mark.deepspeed
@pytest.mark.full
def test_saved_weights_are_a_local_folder_to_start_from(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    first = run(tmp_path, "--model", "qwen2.5-tiny", "--steps", "3", "--save", str(saved))
    second = run(tmp_path, "--model", str(saved), "--steps", "3", "--digest", "master")
    assert losses(second)[0] < losses(first)[0] - 1
    assert len(digests(second)) > 10


@pytest.mark.deepspeed
@pytest.mark.full
def test_command_line_options_override_the_json(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    arguments = ["--model", "qwen2.5-tiny", "--steps", "2", "--batch-size", "2", "--lr", "0"]
    output = run(tmp_path, *arguments, "--nvme-path", str(elsewhere), "--digest", "parameters")
    again = run(tmp_path, *arguments, "--steps", "1", "--digest", "parameters")
    assert digests(output) == digests(again) != {}
    assert (elsewhere / "zero_stage_3").is_dir()
