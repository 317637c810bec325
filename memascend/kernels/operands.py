"""Checks of tensors of which the core gets only addresses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend.kernels.overflow import dtype_name

if TYPE_CHECKING:
    import torch


def check_operand(
    name: str,
    tensor: torch.Tensor,
    numel: int,
    dtypes: tuple[str, ...],
    *,
    may_have_stride: bool = False,
) -> None:
    """Raise for a tensor that the core would misread.

    Args:
        name: Of the argument.
        tensor: What was given.
        numel: Elements that it has to have.
        dtypes: The core's names of dtypes that it may have.
        may_have_stride: The core is given the stride of one dimension: it need not be contiguous.

    Raises:
        ValueError: It has another dtype or length, is not contiguous, or not on the host; or with a
            stride it has not one dimension.
    """
    dtype = dtype_name(tensor.dtype)
    if dtype not in dtypes:
        raise ValueError(f"{name} is of dtype {dtype}; known: {', '.join(dtypes)}")
    if tensor.numel() != numel:
        raise ValueError(f"{name} has {tensor.numel()} elements, others {numel}; give one length")
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} is on device {tensor.device}; give host tensors")
    if may_have_stride:
        if tensor.dim() != 1:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; give one dimension")
        return
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} is not contiguous: shape {tuple(tensor.shape)}, stride {tensor.stride()}; "
            "give the contiguous buffer it is a view of"
        )
