"""The ways people call the Trainer and accelerate give what they give on CPU offload.

Evaluation at the start, early stopping and the best model, sequence classification, trials of a
search, a batch size that is found, saving the model alone, data loader workers, TRL's reference
that follows the policy, a long loop.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import RANKS

from .programs import BLOCK, alone, armed_lines, needs_entry_point, run, trainer_config

pytestmark = [pytest.mark.deepspeed, needs_entry_point]

PROGRAM = Path(__file__).with_name("ways_program.py")
#: Over 120 steps; a tensor that is left behind in each would be many times as much.
GROWTH_BYTES_MAX = 8 << 20
#: With two ranks no shard is large enough for the drive by itself; with a limit all are.
LIMITED = BLOCK | {"host_memory_limit": "300MiB"}
WAYS = (
    *("evaluation_at_start", "sequence_classification", "trials", "no_batch_size_of_the_trainer"),
    *("only_the_model_saved", "data_loader_workers", "reference_that_follows"),
    *("batch_size_found", "loop_of_accelerate"),
)
#: In which ranks have to agree: about a stop, a model that is made anew, a failed attempt.
WAYS_OF_RANKS = (
    *("evaluation_at_start", "trials", "only_the_model_saved"),
    *("reference_that_follows", "batch_size_found"),
)


def ways(folder: Path, *names: str, block: dict[str, Any] | None, world: int) -> dict[str, Any]:
    """Run some ways, with CPU offload where there is no block."""
    folder.mkdir()
    config = folder / "config.json"
    device = "cpu" if block is None else "nvme"
    config.write_text(json.dumps(trainer_config(folder, device=device, block=block)))
    launcher = [RANKS, str(world)] if world > 1 else []
    done = run(
        [*launcher, str(PROGRAM), str(config), str(folder / "out"), *names],
        cwd=folder,
        environment={"OMP_NUM_THREADS": "1"} | (alone() if world == 1 else {}),
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert bool(armed_lines(done.stdout)) == (block is not None)
    (result,) = [row for row in done.stdout.splitlines() if row.startswith("RESULT ")]
    found: dict[str, Any] = json.loads(result.removeprefix("RESULT "))
    return found


@pytest.mark.full
@pytest.mark.parametrize(
    ("world", "block", "names"),
    [(1, BLOCK, WAYS), (2, LIMITED, WAYS_OF_RANKS)],
    ids=["one rank", "two ranks"],
)
def test_each_way_gives_what_cpu_offload_gives(
    world: int, block: dict[str, Any], names: tuple[str, ...], tmp_path: Path
) -> None:
    expected = ways(tmp_path / "cpu", *names, block=None, world=world)
    found = ways(tmp_path / "drive", *names, block=block, world=world)
    assert list(found) == list(names)
    growth = found.get("loop_of_accelerate", {}).pop("growth_bytes", 0)
    expected.get("loop_of_accelerate", {}).pop("growth_bytes", None)
    for name in names:
        assert found[name] == expected[name], name
    assert growth <= GROWTH_BYTES_MAX
