"""Products of 16-bit matrices by way of fp32, for all that tests train on a CPU.

Many CPUs cannot multiply in 16 bits: bf16 needs AVX-512. torch's loops that stand for it do a
hundredth of the operations of fp32 in a second.
"""

from __future__ import annotations

from typing import Any

import torch

NARROW = (torch.float16, torch.bfloat16)
#: Libraries of torch, whose kernels serve for as long as these live.
KERNELS: list[torch.library.Library] = []


def use_fp32() -> None:
    """Have torch multiply matrices in this way from here on; a second call changes nothing."""
    if KERNELS:
        return
    KERNELS.append(torch.library.Library("aten", "IMPL"))
    KERNELS[0].impl("mm", matrix_product, "CPU")
    KERNELS[0].impl("addmm", matrix_product_and_bias, "CPU")
    KERNELS[0].impl("bmm", batch_product, "CPU")


def matrix_product(one: Any, other: Any) -> Any:
    """Return the result of torch's kernel, computed in fp32 if it is of 16 bits."""
    if one.dtype in NARROW:
        return matrix_product(one.float(), other.float()).to(one.dtype)
    return torch.mm(one, other, out=one.new_empty(one.shape[0], other.shape[1]))


def matrix_product_and_bias(bias: Any, one: Any, other: Any, **factors: Any) -> Any:
    """Return the result of torch's kernel, computed in fp32 if it is of 16 bits."""
    if one.dtype in NARROW:
        return torch.addmm(bias.float(), one.float(), other.float(), **factors).to(one.dtype)
    out = one.new_empty(one.shape[0], other.shape[1])
    return torch.addmm(bias, one, other, out=out, **factors)


def batch_product(one: Any, other: Any) -> Any:
    """Return the result of torch's kernel, computed in fp32 if it is of 16 bits."""
    if one.dtype in NARROW:
        return batch_product(one.float(), other.float()).to(one.dtype)
    return torch.bmm(one, other, out=one.new_empty(*one.shape[:2], other.shape[2]))
