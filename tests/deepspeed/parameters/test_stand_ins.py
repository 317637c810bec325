"""What stands for absent shards: nobody takes it for a value, and a write to it is found out."""

from __future__ import annotations

import pytest
import torch

from memascend.deepspeed.parameters.stand_ins import StandIns
from memascend.errors import StoreError

FLOATS = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", [*FLOATS, torch.uint8, torch.int64, torch.bool])
def test_each_dtype_has_one_without_dimensions(dtype: torch.dtype) -> None:
    stand_ins = StandIns()
    stand_in = stand_ins.of(dtype, 5)
    assert (stand_in.dtype, stand_in.shape) == (dtype, ())
    assert stand_ins.of(dtype, 6) is stand_in
    assert stand_in.isnan().item() is dtype.is_floating_point
    stand_ins.check()


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_write_of_a_script_is_told_once(dtype: torch.dtype) -> None:
    """It goes past `_version`: `.data` has a counter of its own."""
    stand_ins, others = StandIns(), StandIns()
    shard, other = torch.empty(0, dtype=dtype), torch.empty(0, dtype=dtype)
    shard.data, other.data = stand_ins.of(dtype, 0), others.of(dtype, 7)
    writes = [
        lambda: shard.data.copy_(torch.lerp(other.data.float(), shard.data.float(), 0.5)),
        lambda: shard.data.mul_(0.5),
        lambda: shard.data.copy_(other.data),
        lambda: shard.data.fill_(1),
    ]
    for write in writes:
        write()
        with pytest.raises(StoreError, match="GatheredParameters"):
            stand_ins.check()
        stand_ins.check()
    others.check()


def test_what_is_read_is_no_number() -> None:
    assert (StandIns().of(torch.bfloat16, 3).float() * 2).isnan()
