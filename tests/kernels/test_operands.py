"""A tensor that the core would misread is refused by name."""

from __future__ import annotations

import pytest
import torch

from memascend.kernels.operands import check_operand


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.zeros(3), "low has 3 elements, others 4"),
        (torch.zeros(4, dtype=torch.float16), "low is of dtype float16; known: float32, int16"),
        (torch.zeros(8)[::2], r"low is not contiguous: shape \(4,\), stride \(2,\)"),
        (torch.zeros(4, device="meta"), "low is on device meta"),
    ],
    ids=["length", "dtype", "stride", "device"],
)
def test_a_tensor_that_the_core_would_misread_is_refused(tensor: torch.Tensor, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_operand("low", tensor, 4, ("float32", "int16"))


def test_any_of_the_dtypes_serves() -> None:
    for dtype in (torch.float32, torch.int16):
        check_operand("low", torch.zeros(4, dtype=dtype), 4, ("float32", "int16"))


def test_with_a_stride_a_tensor_has_one_dimension_and_need_not_be_contiguous() -> None:
    check_operand("low", torch.zeros(8)[::2], 4, ("float32",), may_have_stride=True)
    with pytest.raises(ValueError, match=r"low has shape \(2, 2\); give one dimension"):
        check_operand("low", torch.zeros(2, 2), 4, ("float32",), may_have_stride=True)
