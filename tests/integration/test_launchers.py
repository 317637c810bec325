"""An unchanged script, started the ways people start one, is armed by the JSON alone.

The reference of each run is as many ranks with DeepSpeed's CPU offload and MEMASCEND_DISABLE=1.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.ports import free_port

from .programs import (
    FINETUNE,
    armed_lines,
    deepspeed_config,
    losses,
    needs_entry_point,
    run,
    trainer_config,
)

pytestmark = [pytest.mark.deepspeed, needs_entry_point]

TRAINER = Path(__file__).with_name("trainer_program.py")
STOCK = {"MEMASCEND_DISABLE": "1"}
OTHER_LAUNCHERS = ("python", "torchrun", "accelerate")


def launched_by(launcher: str) -> list[str]:
    """What comes between the interpreter and the script."""
    return {
        "python": [],
        # Its default port is the same for every job of a machine.
        "deepspeed": [
            *("-m", "deepspeed.launcher.runner"),
            *("--num_gpus", "1", "--master_port", str(free_port())),
        ],
        "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
        "trainer": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"],
        "accelerate": ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"],
    }[launcher]


def finetune(
    folder: Path,
    *,
    launcher: str,
    device: str = "nvme",
    block: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
) -> tuple[int, str]:
    """Two steps of a tiny model: exit status and output."""
    drive = folder / "drive"
    drive.mkdir(exist_ok=True)
    config = folder / f"{device}.json"
    config.write_text(json.dumps(deepspeed_config(drive, device=device, block=block)))
    script = [str(FINETUNE), "--model", "qwen2.5-tiny", "--steps", "2", "--seq-len", "32"]
    done = run(
        [*launched_by(launcher), *script, "--deepspeed_config", str(config)],
        cwd=folder,
        environment={"OMP_NUM_THREADS": "1"} | (environment or {}),
    )
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def expected_losses(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """CPU offload's by as many ranks as a launcher starts; launchers of one rank share a run."""

    @functools.cache
    def of_ranks(launcher: str) -> list[str]:
        folder = tmp_path_factory.mktemp("expected")
        status, output = finetune(folder, launcher=launcher, device="cpu", environment=STOCK)
        assert status == 0, output[-4000:]
        assert armed_lines(output) == []
        return losses(output)

    return lambda launcher: of_ranks("torchrun" if launcher == "torchrun" else "python")


@pytest.mark.parametrize(
    "launcher",
    ["deepspeed", *(pytest.param(name, marks=pytest.mark.full) for name in OTHER_LAUNCHERS)],
)
def test_an_unchanged_script_is_armed_and_gives_the_losses_of_cpu_offload(
    launcher: str, expected_losses: Callable[[str], list[str]], tmp_path: Path
) -> None:
    status, output = finetune(tmp_path, launcher=launcher, block={})
    assert status == 0, output[-4000:]
    assert len(armed_lines(output)) == 1, output[-4000:]
    first, second = map(float, losses(output))  # one line for each step, whatever the ranks
    assert second < first
    assert losses(output) == expected_losses(launcher)
    assert list((tmp_path / "drive").iterdir()) == []


@pytest.mark.full
def test_the_block_in_the_environment_arms_a_script_whose_json_has_none(tmp_path: Path) -> None:
    status, output = finetune(
        tmp_path, launcher="python", environment={"MEMASCEND_CONFIG": '{"buffer_pool": {}}'}
    )
    assert status == 0, output[-4000:]
    assert len(armed_lines(output)) == 1


def test_disabling_in_the_environment_runs_stock_whatever_the_json_says(tmp_path: Path) -> None:
    status, output = finetune(tmp_path, launcher="python", block={}, environment=STOCK)
    assert armed_lines(output) == []
    # Stock's own files on the drive show who trained.
    assert list((tmp_path / "drive").iterdir()) != []
    assert status == 0, output[-4000:]


@pytest.mark.full
def test_a_typo_in_the_block_stops_the_run_before_the_model_is_built(tmp_path: Path) -> None:
    status, output = finetune(tmp_path, launcher="python", block={"direct_nvme": {"queue_dept": 8}})
    assert status != 0
    assert "memascend.direct_nvme.queue_dept: unknown key" in output
    assert "Did you mean 'queue_depth'?" in output
    assert "modeling_qwen2" not in output
    assert list((tmp_path / "drive").iterdir()) == []


# -- Hugging Face's Trainer ----------------------------------------------------------------------


def train_with_trainer(
    folder: Path, *, device: str, block: dict[str, Any] | None = None, disable: bool = False
) -> tuple[int, str]:
    drive = folder / "drive"
    drive.mkdir(exist_ok=True)
    config = trainer_config(drive, device=device, block=block)
    path = folder / f"trainer-{device}.json"
    path.write_text(json.dumps(config))
    done = run(
        [*launched_by("trainer"), str(TRAINER), str(path), str(folder / "output")],
        cwd=folder,
        environment=STOCK if disable else None,
    )
    return done.returncode, done.stdout


def test_trainer_with_auto_values_gives_the_losses_of_cpu_offload(tmp_path: Path) -> None:
    status, expected = train_with_trainer(tmp_path, device="cpu", disable=True)
    assert status == 0, expected[-4000:]
    status, output = train_with_trainer(tmp_path, device="nvme", block={})
    assert status == 0, output[-4000:]
    assert len(armed_lines(output)) == 1
    assert len(losses(output)) == 3
    assert losses(output) == losses(expected)
    (norms,) = [line for line in output.splitlines() if line.startswith("norms ")]
    assert norms in expected.splitlines()
    # Its own line of a step has ours, with no callback that the script would have to add.
    assert output.count("'memascend_step_seconds': ") == 3


@pytest.mark.full
def test_trainer_stops_at_a_typo_in_the_block(tmp_path: Path) -> None:
    status, output = train_with_trainer(
        tmp_path, device="nvme", block={"bufer_pool": {"enabled": False}}
    )
    assert status != 0
    assert "memascend.bufer_pool: unknown key" in output
    assert "modeling_llama" not in output
