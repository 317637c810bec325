"""The fused Adam step on host tensors: gradient, moments, weight and 16-bit weight in one pass.

Knows neither optimizers nor tiles; the caller gives the hyperparameters of the step. Callable from
any thread; releases the GIL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend._core import AdamCoefficients, KernelHelpers, adam_update
from memascend.kernels.operands import check_operand
from memascend.kernels.overflow import dtype_name

if TYPE_CHECKING:
    import torch

__all__ = ["AdamCoefficients", "KernelHelpers", "make_rounding_key", "update"]

#: Dtypes of gradients; without the first, of outputs.
DTYPES = ("float32", "float16", "bfloat16")
#: Dtypes of moments.
MOMENT_DTYPES = ("float32", "bfloat16")
#: Dtype of low halves of weights: 16 bits that are no number.
LOW_DTYPE = "int16"
_MASK_64 = (1 << 64) - 1


def update(
    *,
    gradient: torch.Tensor,
    weight: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    output: torch.Tensor | None = None,
    coefficients: AdamCoefficients,
    tail_numel: int = 0,
    rounding_key: int = 0,
    first_index: int = 0,
    threads: int | None = None,
    helpers: KernelHelpers | None = None,
    isa: str = "auto",
) -> None:
    """Step every element once, in place, without temporaries of the tensors' size.

    The arithmetic is DeepSpeedCPUAdam's, with each operation rounded as there. The bits do not
    depend on threads, instruction set or alignment, except for the payload of a NaN.

    Moments in bf16 are widened first, and rounded stochastically after the step: up or down at
    random, so that their expected value is the fp32 one.

    With weights in halves (`kernels.halves`) `weight` has the low ones, and the signs of the second
    moment are flags. The step gives the bits of whole weights.

    Args:
        gradient: fp32, fp16 or bf16; unchanged.
        weight: fp32, or the low halves in int16; as many elements as the gradient, like moments.
        exp_avg: The first moment, in fp32 or bf16.
        exp_avg_sq: The second moment, in the same dtype.
        output: fp16 or bf16; set to the new weight, rounded to nearest even. With halves it is
            bf16, and has the old one.
        coefficients: Hyperparameters of the step.
        tail_numel: Elements at the end that are computed in the other order (`csrc/kernels/`).
        rounding_key: For moments in bf16; see `make_rounding_key`.
        first_index: For moments in bf16: index of the first element in its sub-group.
        threads: None: as many as torch uses.
        helpers: Threads that are kept between calls; None: threads are started for this call.
        isa: One of `memascend._core.kernel_isas()`.

    Raises:
        ValueError: A tensor has a wrong dtype or length, is not contiguous, or not on the host.
    """
    import torch

    _check_operands(gradient, weight, exp_avg, exp_avg_sq, output)
    adam_update(
        gradient=gradient.data_ptr(),
        gradient_dtype=dtype_name(gradient.dtype),
        weight=weight.data_ptr(),
        exp_avg=exp_avg.data_ptr(),
        exp_avg_sq=exp_avg_sq.data_ptr(),
        moment_dtype=dtype_name(exp_avg.dtype),
        output=0 if output is None else output.data_ptr(),
        output_dtype=None if output is None else dtype_name(output.dtype),
        numel=gradient.numel(),
        coefficients=coefficients,
        tail_numel=tail_numel,
        rounding_key=rounding_key,
        first_index=first_index,
        threads=torch.get_num_threads() if threads is None else threads,
        helpers=helpers,
        isa=isa,
        is_split=dtype_name(weight.dtype) == LOW_DTYPE,
    )


def make_rounding_key(*numbers: int) -> int:
    """Return the 64-bit seed of a step's random bits; it depends on every number.

    Each number is mixed in by one step of SplitMix64 (Steele, Lea and Flood, 2014).
    """
    key = 0
    for number in numbers:
        key = (key ^ number) + 0x9E3779B97F4A7C15 & _MASK_64
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & _MASK_64
        key = (key ^ key >> 27) * 0x94D049BB133111EB & _MASK_64
        key ^= key >> 31
    return key


def _check_operands(
    gradient: torch.Tensor,
    weight: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    output: torch.Tensor | None,
) -> None:
    numel = gradient.numel()
    is_split = dtype_name(weight.dtype) == LOW_DTYPE
    check_operand("gradient", gradient, numel, DTYPES)
    check_operand("weight", weight, numel, (DTYPES[0], LOW_DTYPE))
    check_operand("exp_avg", exp_avg, numel, MOMENT_DTYPES)
    check_operand("exp_avg_sq", exp_avg_sq, numel, (dtype_name(exp_avg.dtype),))
    if output is not None:
        check_operand("output", output, numel, DTYPES[2:] if is_split else DTYPES[1:])
    elif is_split:
        raise ValueError(f"weight in {LOW_DTYPE} has low halves alone; output has the others")
