"""One pass over a larger batch gives what accumulation gives, with the trainers people use.

Accumulation runs with DeepSpeed's CPU offload and without a block, one pass with everything on the
drive. docs/context.md has the table that these tests stand for.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import RANKS

from .programs import (
    BLOCK,
    alone,
    armed_lines,
    importing_tests,
    needs_entry_point,
    run,
    trainer_config,
)

pytestmark = [pytest.mark.deepspeed, needs_entry_point]

PROGRAM = Path(__file__).with_name("slices_program.py")
ROWS, COUNT = 2, 4  # of a slice, and of slices
OF_ROWS = {"sequences": ROWS}
BITS = (
    *("nonreentrant", "reentrant", "short_last_batch", "evaluation", "lora", "lora_reentrant"),
    *("accelerate_loop", "accuracy_in_training", "classification_of_mean_loss"),
    *("sft", "sft_wrapped", "liger"),
)
#: Those that do more between steps in slices, and those whose bits they have nevertheless.
BETWEEN = {
    "generation": "nonreentrant",
    "forward_alone": "nonreentrant",
    "accelerate_loop_with_generation": "accelerate_loop",
}
SAVED = ("resumed", "uninterrupted")
#: Means over the padded rows of a batch, and losses of its routers.
OF_WHOLE_BATCH = ("accelerate_loop_of_padded_rows", "router_loss", "sft_experts")
#: Those whose gradients are added up in another order, or rounded otherwise.
OTHER_ORDER = ("dpo", "tied", "sft_packed", "dropout", "padded_to_longest")
#: What is left whole in each of the others, by the words of the log.
CLOSE: dict[str, tuple[str, ...]] = {
    "tied": (),
    "label_smoothing": ("the head of LlamaForCausalLM",),
    "sequence_classification": (),
    "sft_packed": (),
    "dpo": (),
    "dpo_squares": (),
    "dpo_of_two_losses": (),
    "dpo_precomputed": (),
    "dpo_adapters": (),
}
#: Relative differences of weights, by the norm of each, and of losses. Two runs of AdamW in bf16
#: whose gradients are rounded otherwise differ by as much.
WEIGHTS_REL, LOSSES_REL = 6e-3, 6e-3
WHOLE = "computes the whole batch at once: "


@dataclass
class Trained:
    """The logs, weights and output of the ways that were run."""

    logs: dict[str, list[dict[str, float]]]
    weights: dict[str, dict[str, torch.Tensor]]
    whole: dict[str, list[str]]  # what was left whole, by way

    def losses(self, name: str) -> list[float]:
        return [row[key] for row in self.logs[name] for key in row if key in ("loss", "eval_loss")]


def train(
    folder: Path,
    names: tuple[str, ...],
    *,
    slices: bool,
    micro_steps: int = COUNT,
    world: int = 1,
    section: dict[str, Any] = OF_ROWS,
) -> Trained:
    """Run some ways, in slices, or on CPU offload in `micro_steps`."""
    folder.mkdir()
    config = folder / "config.json"
    block = BLOCK | {"micro_batches": section} if slices else None
    device = "nvme" if slices else "cpu"
    config.write_text(json.dumps(trainer_config(folder, device=device, block=block)))
    accumulation = 1 if slices else micro_steps
    rows = ROWS * COUNT // accumulation
    launcher = [RANKS, str(world)] if world > 1 else []
    arguments = [str(config), str(folder / "out"), str(rows), str(accumulation), *names]
    done = run(
        [*launcher, str(PROGRAM), *arguments],
        cwd=folder,
        environment={"OMP_NUM_THREADS": "1"} | importing_tests() | (alone() if world == 1 else {}),
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert bool(armed_lines(done.stdout)) == slices
    (result,) = [row for row in done.stdout.splitlines() if row.startswith("RESULT ")]
    logs: dict[str, Any] = json.loads(result.removeprefix("RESULT "))
    return Trained(
        {name: one["log"] for name, one in logs.items()},
        {name: torch.load(folder / "out" / f"{name}.pt") for name in names},
        whole_of(done.stdout),
    )


def whole_of(output: str) -> dict[str, list[str]]:
    """The lines about what is left whole, by way."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in output.splitlines():
        if line.startswith("WAY "):
            name = line.removeprefix("WAY ")
        elif WHOLE in line:
            found.setdefault(name, []).append(line)
    return found


def unequal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    assert found
    return [name for name, one in expected.items() if not torch.equal(found[name], one)]


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference of a weight, relative to its norm."""
    assert found.keys() == expected.keys()
    return max(
        (found[name] - one).norm().item() / one.norm().item() for name, one in expected.items()
    )


@pytest.mark.full
def test_slices_have_the_bits_of_accumulation(tmp_path: Path) -> None:
    expected = train(tmp_path / "cpu", BITS, slices=False)
    found = train(tmp_path / "drive", (*BITS, *BETWEEN), slices=True)
    for name, same in BETWEEN.items():
        assert unequal(found.weights[name], expected.weights[same]) == [], name
    for name in BITS:
        assert unequal(found.weights[name], expected.weights[name]) == [], name
        assert len(found.losses(name)) >= 3
        assert found.losses(name) == pytest.approx(expected.losses(name), rel=1e-6), name
    (line,) = found.whole.pop("accuracy_in_training")
    assert "the script reads its logits" in line
    assert found.whole == {}


@pytest.mark.full
def test_a_loss_of_logits_ends_in_an_error_that_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match='fix: "head": false'):
        train(tmp_path / "drive", ("loss_of_logits",), slices=True)
    name = "loss_of_logits"
    expected = train(tmp_path / "cpu", (name,), slices=False)
    found = train(tmp_path / "head", (name,), slices=True, section=OF_ROWS | {"head": False})
    assert found.losses(name) == pytest.approx(expected.losses(name), rel=LOSSES_REL)


@pytest.mark.full
def test_a_loss_that_is_no_sum_over_rows_is_that_of_the_whole_batch(tmp_path: Path) -> None:
    """Accumulation has another loss: the mean, or the sum, of those of micro-steps."""
    expected = train(tmp_path / "cpu", OF_WHOLE_BATCH, slices=False, micro_steps=1)
    found = train(tmp_path / "drive", OF_WHOLE_BATCH, slices=True)
    for name in OF_WHOLE_BATCH:
        worst = difference(found.weights[name], expected.weights[name])
        print(f"{name}: weights {worst:.1e}")
        assert worst <= WEIGHTS_REL
        assert found.losses(name) == pytest.approx(expected.losses(name), rel=1e-4)
    assert found.whole == {}


@pytest.mark.full
def test_a_run_in_slices_resumes_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """CPU offload does not have the bits of a run without a break, if one process has both."""
    expected = train(tmp_path / "cpu", SAVED[1:], slices=False)
    found = train(tmp_path / "drive", SAVED, slices=True)
    for name in SAVED:
        assert unequal(found.weights[name], expected.weights["uninterrupted"]) == [], name
    assert found.whole == {}


@pytest.mark.full
def test_a_run_whose_slices_are_chosen_resumes_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """On the CPU slices of one sequence are chosen, in the first pass as in later ones."""
    found = train(tmp_path / "drive", SAVED, slices=True, section={})
    assert unequal(found.weights["resumed"], found.weights["uninterrupted"]) == []
    assert found.losses("resumed") == found.losses("uninterrupted")
    assert found.whole == {}


@pytest.mark.full
def test_sums_in_another_order_change_as_little_as_other_micro_steps(tmp_path: Path) -> None:
    """TRL's DPOTrainer has all chosen rows of a batch first: no micro-step has those of a slice.

    The gradient of a tied head is summed over slices first, packed slices end at other documents.
    """
    expected = train(tmp_path / "cpu", OTHER_ORDER, slices=False)
    fewer = train(tmp_path / "fewer", OTHER_ORDER, slices=False, micro_steps=COUNT // 2)
    found = train(tmp_path / "drive", OTHER_ORDER, slices=True)
    for name in OTHER_ORDER:
        between = difference(fewer.weights[name], expected.weights[name])
        of_slices = difference(found.weights[name], expected.weights[name])
        print(f"{name}: 4 micro-steps and 2: {between:.1e}, and slices: {of_slices:.1e}")
        assert 0.0 < of_slices <= 2 * between, name


@pytest.mark.full
def test_two_ranks_differ_as_little_as_other_micro_steps(tmp_path: Path) -> None:
    """Their gradients are reduced once, and accelerate fills a short last batch up.

    Eight rows are two micro-steps of each rank, or all on the first rank in one pass.
    """
    names = ("nonreentrant", "short_last_batch")
    expected = train(tmp_path / "cpu", names, slices=False, world=2)
    fewer = train(tmp_path / "fewer", names, slices=False, world=2, micro_steps=COUNT // 2)
    found = train(tmp_path / "drive", names, slices=True, world=2)
    for name in names:
        between = difference(fewer.weights[name], expected.weights[name])
        of_slices = difference(found.weights[name], expected.weights[name])
        print(f"{name}: 4 micro-steps and 2: {between:.1e}, and slices: {of_slices:.1e}")
        assert 0.0 < of_slices <= (2 * between if name == "nonreentrant" else WEIGHTS_REL), name
    assert found.whole == {}


@pytest.mark.full
def test_what_is_left_whole_is_said_and_right(tmp_path: Path) -> None:
    names = tuple(CLOSE)
    expected = train(tmp_path / "cpu", names, slices=False)
    found = train(tmp_path / "drive", names, slices=True)
    for name, reasons in CLOSE.items():
        weights = difference(found.weights[name], expected.weights[name])
        # Transformers does not divide this loss by the micro-steps of a step.
        factor = COUNT if name == "sequence_classification" else 1
        pairs = zip(found.losses(name), expected.losses(name), strict=True)
        losses = max(abs(factor * one - other) / other for one, other in pairs)
        print(f"{name}: weights {weights:.1e}, losses {losses:.1e}")
        assert weights <= WEIGHTS_REL, name
        assert losses <= LOSSES_REL, name
        lines = found.whole.get(name, [])
        assert len(lines) == len(reasons), name
        assert all(one in line for one, line in zip(reasons, lines, strict=True)), name
