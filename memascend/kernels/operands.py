"""Checks of tensors of which the core gets only addresses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend.kernels.overflow import dtype_name

if TYPE_CHECKING:
    import torch


def check_operand(name: str, tensor: torch.Tensor, numel: int, dtypes: tuple[str, ...]) -> None:
    """Raise for a tensor that the core would misread.

    Args:
        name: Of the argument.
        tensor: What was given.
        numel: Elements that it has to have.
        dtypes: The core's names of dtypes that it may have.

    Raises:
        ValueError: It has another dtype or length, is not contiguous, or not on the host.
    """
    dtype = dtype_name(tensor.dtype)
    if dtype not in dtypes:
        raise ValueError(f"{name} is of dtype {dtype}; known: {', '.join(dtypes)}")
    if tensor.numel() != numel:
        raise ValueError(f"{name} has {tensor.numel()} elements, others {numel}; give one length")
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} is on device {tensor.device}; give host tensors")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} is not contiguous: shape {tuple(tensor.shape)}, stride {tensor.stride()}; "
            "give the contiguous buffer it is a view of"
        )
