"""The shape of tiles: sizes from the plan, dtypes from the optimizer and the block."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("deepspeed")

from deepspeed.ops.adam import DeepSpeedCPUAdam

from memascend.config.block import parse_block
from memascend.deepspeed.optimizer.tile_shape import tile_shape
from memascend.streaming.optimizer.tile_memory import TileShape
from tests.support.tiled_optimizer import BF16, Tiled

FP32 = torch.float32


def shape_of(state_dtype: str = "fp32", *, streams_gradients: bool = True) -> TileShape:
    block = {"streaming": {"optimizer": {"state_dtype": state_dtype}}}
    optimizer = Tiled(DeepSpeedCPUAdam)
    optimizer.runtime.config = parse_block(block)
    return tile_shape(optimizer.upstream, optimizer.runtime, streams_gradients=streams_gradients)


@pytest.mark.parametrize(("streams_gradients", "gradient_dtype"), [(True, BF16), (False, FP32)])
def test_gradients_of_deepspeeds_flat_buffer_come_in_the_dtype_of_the_step(
    streams_gradients: bool, gradient_dtype: torch.dtype
) -> None:
    shape = shape_of(streams_gradients=streams_gradients)
    assert shape.gradient_dtype == gradient_dtype
    assert (shape.master_dtype, shape.parameter_dtype, shape.state_count) == (FP32, BF16, 2)


@pytest.mark.parametrize(
    ("asked", "state_dtype", "moments", "coded"),
    [
        ("fp32", FP32, (), ()),
        ("bf16", BF16, (), ()),
        ("int8", FP32, (torch.int8, torch.uint8), ("exp_avg", "exp_avg_sq")),
        ("int8/bf16", FP32, (torch.int8, BF16), ("exp_avg",)),
    ],
)
def test_the_block_decides_the_form_of_moments(
    asked: str,
    state_dtype: torch.dtype,
    moments: tuple[torch.dtype, ...],
    coded: tuple[str, ...],
) -> None:
    shape = shape_of(asked)
    assert shape.state_dtype == state_dtype
    assert tuple(shape.moments.values()) == moments
    assert shape.coded == coded


def test_a_plan_says_what_a_tile_holds() -> None:
    optimizer = Tiled(DeepSpeedCPUAdam)
    optimizer.runtime.plan = SimpleNamespace(tile_numel=8192, tile_count=5, spare_count=7)
    shape = tile_shape(optimizer.upstream, optimizer.runtime, streams_gradients=True)
    assert (shape.numel, shape.count, shape.spare_count) == (8192, 5, 7)
