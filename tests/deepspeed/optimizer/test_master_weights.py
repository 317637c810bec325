"""Master weights in halves under an optimizer, and a script that changes parameters."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from deepspeed.ops.adam import DeepSpeedCPUAdam

from memascend.streaming.optimizer.sub_group import MasterForm
from tests.support.tiled_optimizer import BF16, NAMES, Tiled, stock_unused
from tests.support.tiled_training import gradients


def make(*, block: dict[str, Any] | None = None, on_drive: bool = True, **changes: Any) -> Tiled:
    """Sub-groups that are created anew, of parameters that have made one step."""

    def adam(parameters: Any) -> Any:
        return DeepSpeedCPUAdam(parameters, lr=1e-2)

    streaming = {"streaming": {"optimizer": block or {}}}
    made = Tiled(adam, block=streaming, split=on_drive, stage3=changes)
    if on_drive:
        made.stage3.fp16_partitioned_groups_flat = [None] * len(NAMES)
    made.groups.discard()
    for swapper in {param.nvme_swapper for group in made.upstream.params for param in group}:
        swapper._stream = SimpleNamespace(is_fixed=lambda key: False)
        swapper._before_change = lambda keys: None
    for number in range(len(NAMES)):
        made.steps.create_master(number, stock_unused)
    return made


def forms(optimizer: Tiled) -> set[MasterForm]:
    return {optimizer.groups.group(name).form for name in NAMES}


def change(optimizer: Tiled, number: int) -> None:
    """Change a sub-group's first parameter, as GatheredParameters does at its end."""
    param = optimizer.upstream.params[number][0]
    param.nvme_swapper._before_change([param.key])
    assert not param.nvme_swapper._stream.is_fixed(param.key)
    value = torch.full((param.ds_numel,), 7.0, dtype=BF16)
    optimizer.training.store.write(key=param.key, source=value).wait()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {MasterForm.ROUNDED}),
        ({"block": {"split_master": False}}, {MasterForm.WHOLE}),
        ({"block": {"fused": False}}, {MasterForm.WHOLE}),
        ({"on_drive": False}, {MasterForm.WHOLE}),
    ],
)
def test_only_bf16_parameters_on_the_drive_are_high_halves_and_only_of_fused_steps(
    options: dict[str, Any], expected: set[MasterForm]
) -> None:
    assert forms(make(**options)) == expected


def before_the_step(optimizer: Tiled) -> None:
    change(optimizer, 0)
    optimizer.walk(gradients(0, BF16))


def behind_the_step(optimizer: Tiled) -> None:
    optimizer.walk(gradients(0, BF16))
    change(optimizer, 0)
    change(optimizer, 2)


def before_the_walk_is_over(optimizer: Tiled) -> None:
    for name, value in gradients(0, BF16).items():
        optimizer.gradient_stream.put(name, 0, value)
    optimizer.steps.step(lambda: optimizer.step_all(0.0))
    change(optimizer, 0)


def behind_tiles_that_were_read_ahead(optimizer: Tiled) -> None:
    optimizer.walk(gradients(0, BF16))
    with optimizer.lock:
        optimizer.steps.note_final(NAMES[0], 0)  # as a gradient's hook
    change(optimizer, 0)


@pytest.mark.parametrize(
    "disturb",
    [
        before_the_step,
        behind_the_step,
        before_the_walk_is_over,
        behind_tiles_that_were_read_ahead,
    ],
)
def test_a_changed_parameter_leaves_its_master_weights_as_they_are(
    disturb: Callable[[Tiled], None],
) -> None:
    split, whole = make(), make(block={"split_master": False})
    for one in (split, whole):
        disturb(one)
        one.steps.finish()
        one.walk(gradients(1, BF16))
        one.walk(gradients(2, BF16))
    for number, name in enumerate(NAMES):
        assert torch.equal(split.training.master(name), whole.training.master(name))
        assert torch.equal(split.parameter(number), whole.parameter(number))
    assert forms(split) == {MasterForm.ROUNDED}


def test_a_change_that_no_one_was_told_of_is_an_error() -> None:
    optimizer = make()
    param = optimizer.upstream.params[0][0]
    stream = param.nvme_swapper._stream
    assert stream.is_fixed(param.key)
    assert not stream.is_fixed("a key of a frozen parameter")
    optimizer.steps.discard(None)
    assert not stream.is_fixed(param.key), "at the end nothing depends on it"


def test_parameters_change_freely_after_half_a_step() -> None:
    optimizer = make()
    optimizer.walk(gradients(0, BF16))
    optimizer.steps.current.note_load()
    change(optimizer, 0)
    assert forms(optimizer) == {MasterForm.EXACT}


def test_an_optimizer_that_begins_to_step_by_itself_gets_whole_weights() -> None:
    split, whole = make(), make(block={"split_master": False})
    for one in (split, whole):
        one.walk(gradients(0, BF16))
        one.base.param_groups[0]["betas"] = (0.9, torch.tensor(0.999))
        one.walk(gradients(1, BF16))
    assert forms(split) == {MasterForm.WHOLE}
    for number, name in enumerate(NAMES):
        assert torch.equal(split.training.master(name), whole.training.master(name))
        assert torch.equal(split.parameter(number), whole.parameter(number))
