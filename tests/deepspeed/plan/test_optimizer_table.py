"""Each row of the table of optimizers in docs/limits.md, tried on small sub-groups."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from memascend.deepspeed.plan.optimizers import is_elementwise, state_count
from memascend.plan.derive import derive
from memascend.plan.request import PlanRequest
from memascend.plan.shapes import ModelShapes, TensorShape
from tests.support.tiled_training import SIZES, Training, gradients

DOCUMENT = Path(__file__).parents[3] / "docs" / "limits.md"
Make = Callable[[Any], torch.optim.Optimizer]


def lion(params: Any) -> torch.optim.Optimizer:
    from deepspeed.ops.lion import DeepSpeedCPULion

    return DeepSpeedCPULion(params, lr=1e-2)


def adagrad(params: Any) -> torch.optim.Optimizer:
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad

    return DeepSpeedCPUAdagrad(params, lr=1e-2)


class Unheard(torch.optim.NAdam):
    """Stands for a class that is not known, and has two states."""


#: By row: the optimizer; None: other tests step it (the one pass, matrices).
ROWS: dict[str, Make | None] = {
    "AdamW, Adam (DeepSpeed's)": None,
    "AdamW, Adam of torch": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "Lion": lion,
    "Adagrad": adagrad,
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2),
    "SGD with momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "Muon (DeepSpeed's)": None,
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=1e-2),
    "any other class": lambda params: Unheard(params, lr=1e-2),
}
#: DeepSpeed compiles operators for these, which takes minutes the first time.
COMPILED = ("Lion", "Adagrad")
#: tests/deepspeed/attach/test_refusals.py, tests/deepspeed/optimizer/test_refusals.py.
REFUSED = {"LAMB", "Muon (torch's)"}
#: By row: `optimizer` in the DeepSpeed JSON.
IN_JSON: dict[str, dict[str, Any]] = {
    "AdamW, Adam (DeepSpeed's)": {"type": "AdamW"},
    "AdamW, Adam of torch": {"type": "AdamW", "params": {"torch_adam": True}},
    "SGD with momentum": {"type": "SGD", "params": {"momentum": 0.9}},
    "Muon (DeepSpeed's)": {"type": "Muon"},
    "any other class": {"type": "Unheard"},
}


def rows() -> dict[str, list[str]]:
    """Return the cells of the table by the beginning of their first one."""
    text = DOCUMENT.read_text(encoding="utf-8")
    section = text[text.index("## Optimizers") :]
    lines = section.split("\n\n")[1].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    known = sorted({*ROWS, *REFUSED}, key=len, reverse=True)
    return {next(name for name in known if row[0].startswith(name)): row for row in cells}


def bytes_of(row: list[str]) -> list[tuple[int, int]]:
    """Return bytes read and written, without clipping and, where the row has them, with it."""
    return [(int(read), int(written)) for read, written in re.findall(r"(\d+) \+ (\d+)", row[2])]


def test_the_table_has_a_row_for_each_optimizer_that_is_tried() -> None:
    table = rows()
    assert set(table) == {*ROWS, *REFUSED}
    assert {name for name, row in table.items() if row[1].startswith("refused")} == REFUSED


@pytest.mark.parametrize("name", ROWS)
def test_the_plan_counts_the_bytes_of_the_table(name: str) -> None:
    tensors = [TensorShape(f"layers.{one}.up.weight", (1024, 1024)) for one in range(512)]
    model = ModelShapes("m", tuple(tensors))
    ds_config = {
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            **{f"offload_{one}": {"device": "nvme"} for one in ("param", "optimizer")},
            "stage3_max_reuse_distance": 0,
        },
        "optimizer": IN_JSON.get(name, {"type": name}),
    }
    stated = bytes_of(rows()[name])
    assert stated
    for clipping, wanted in zip((0.0, 1.0), stated, strict=False):
        request = PlanRequest.from_deepspeed(ds_config | {"gradient_clipping": clipping})
        plan = derive(model, request=request)
        found = [sum(plan.read_bytes.values()), sum(plan.written_bytes.values())]
        assert tuple(round(nbytes / model.numel) for nbytes in found) == wanted
    if "whole" in rows()[name][1]:
        per_element = int(re.findall(r"\d+", rows()[name][3])[0])
        sizes = plan.host["optimizer tiles"] + plan.host["optimizer scratch"]
        assert sizes == pytest.approx(per_element * model.numel, rel=0.001)


def test_the_plan_counts_the_bytes_of_muon_during_backward() -> None:
    tensors = [TensorShape(f"layers.{one}.up.weight", (1024, 1024)) for one in range(512)]
    model = ModelShapes("m", tuple(tensors))
    request = PlanRequest(optimizer="Muon", during_backward=True, reuse_numel=0)
    plan = derive(model, request=request)
    found = [sum(plan.read_bytes.values()), sum(plan.written_bytes.values())]
    read, written = (round(nbytes / model.numel, 1) for nbytes in found)
    assert f"during backward {read} + {written}" in rows()["Muon (DeepSpeed's)"][2]


class Moved:
    """Counts bytes of a training's store, of all but parameters."""

    def __init__(self, training: Training, patch: pytest.MonkeyPatch) -> None:
        self.read = self.written = 0
        self._read, self._write = training.store.read, training.store.write
        patch.setattr(training.store, "read", self._count_read)
        patch.setattr(training.store, "write", self._count_written)

    def _count_read(self, *, key: str, target: torch.Tensor, **keywords: Any) -> Any:
        self.read += 0 if key.startswith("param.") else target.nbytes
        return self._read(key=key, target=target, **keywords)

    def _count_written(self, *, key: str, source: torch.Tensor, **keywords: Any) -> Any:
        self.written += 0 if key.startswith("param.") else source.nbytes
        return self._write(key=key, source=source, **keywords)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.full] if name in COMPILED else [])
        for name, make in ROWS.items()
        if make is not None
    ],
)
def test_an_optimizer_of_the_table_gives_the_bits_of_whole_tensors_and_moves_its_bytes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = ROWS[name]
    assert make is not None
    row, numel = rows()[name], sum(SIZES.values())
    optimizer = make([torch.nn.Parameter(torch.zeros(1))])
    assert is_elementwise(optimizer) == ("tiles" in row[1])
    sizes = {"tile_numel": 4096} if is_elementwise(optimizer) else {"tile_numel": 20_480}
    training = Training(make, **sizes, tile_count=3, state_count=state_count(optimizer))
    params = [torch.nn.Parameter(weights.clone()) for weights in training.initial.values()]
    reference = make(params)
    for step in range(3):
        values = gradients(step, torch.bfloat16)
        moved = Moved(training, monkeypatch)
        training.step(values, 0.5)
        for param, gradient in zip(params, values.values(), strict=True):
            param.grad = gradient.float().mul_(0.5)
        reference.step()
    [(read, written)] = bytes_of(row)
    # The passes read a parameter twice, and the step writes it.
    assert (moved.read / numel, moved.written / numel) == (read - 4, written - 2)
    for group, param in zip(SIZES, params, strict=True):
        assert torch.equal(training.master(group), param.data), group
