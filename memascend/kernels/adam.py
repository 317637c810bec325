"""The fused Adam step on host tensors: gradient, moments, weight and 16-bit weight in one pass.

Knows neither optimizers nor tiles; the numbers of a step come from the caller. Callable from any
thread; the interpreter's lock is released meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend._core import AdamCoefficients, adam_update

if TYPE_CHECKING:
    import torch

__all__ = ["AdamCoefficients", "update"]

#: Of gradients; the same without the first, of outputs.
DTYPES = ("float32", "float16", "bfloat16")


def update(
    *,
    gradient: torch.Tensor,
    weight: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    output: torch.Tensor | None = None,
    coefficients: AdamCoefficients,
    tail_numel: int = 0,
    threads: int | None = None,
    isa: str = "auto",
) -> None:
    """Step every element once, in place; allocate nothing of their size.

    The arithmetic is DeepSpeedCPUAdam's, each operation rounded as there. Bits depend neither on
    threads nor on instruction set nor on alignment; the payload of a NaN may.

    Args:
        gradient: fp32, fp16 or bf16; unchanged.
        weight: fp32, as are the moments; all as long as the gradient.
        exp_avg: The first moment.
        exp_avg_sq: The second moment.
        output: fp16 or bf16; becomes the new weight, rounded to nearest even.
        coefficients: Numbers of the step.
        tail_numel: So many elements at the end are computed in the other order (`csrc/kernels/`).
        threads: None: as many as torch uses.
        isa: One of `memascend._core.kernel_isas()`.

    Raises:
        ValueError: A tensor is of another dtype or length, not contiguous, or not on the host.
    """
    import torch

    wide = {"weight": weight, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    for name, tensor in wide.items():
        _check(name, tensor, gradient.numel(), DTYPES[:1])
    _check("gradient", gradient, gradient.numel(), DTYPES)
    if output is not None:
        _check("output", output, gradient.numel(), DTYPES[1:])
    adam_update(
        gradient=gradient.data_ptr(),
        gradient_dtype=_name(gradient.dtype),
        **{name: tensor.data_ptr() for name, tensor in wide.items()},
        output=0 if output is None else output.data_ptr(),
        output_dtype=None if output is None else _name(output.dtype),
        numel=gradient.numel(),
        coefficients=coefficients,
        tail_numel=tail_numel,
        threads=torch.get_num_threads() if threads is None else threads,
        isa=isa,
    )


def _check(name: str, tensor: torch.Tensor, numel: int, dtypes: tuple[str, ...]) -> None:
    """Refuse what would be read or written at a wrong place: the core sees addresses alone."""
    if _name(tensor.dtype) not in dtypes:
        raise ValueError(
            f"cannot step with {name} of dtype {_name(tensor.dtype)}; known: {', '.join(dtypes)}"
        )
    if tensor.numel() != numel:
        raise ValueError(
            f"{name} has {tensor.numel()} elements and the gradient {numel}; give them one length"
        )
    if tensor.device.type != "cpu":
        raise ValueError(f"cannot step with {name} on device {tensor.device}; give host tensors")
    if not tensor.is_contiguous():
        raise ValueError(
            f"cannot step with a non-contiguous {name}: shape {tuple(tensor.shape)}, stride "
            f"{tensor.stride()}; give the contiguous buffer it is a view of"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
