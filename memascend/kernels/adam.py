"""The fused Adam step on host tensors: gradient, moments, weight and 16-bit weight in one pass.

Knows neither optimizers nor tiles; the caller gives the hyperparameters of the step. Callable from
any thread; releases the GIL.

Moments and weights of fewer bits than fp32 are widened first and rounded last, stochastically: up
or down at random, so that their expected value is the fp32 one.

- Moments are in bf16 or in codes of 8 bits (`kernels.codes`), either both of them or the first one
  alone beside a second one in bf16. With codes a tile begins at a multiple of `codes.SCALE_NUMEL`
  elements of its sub-group.
- Weights in halves (`kernels.halves`) lose nothing: the signs of second moments are flags, and the
  step gives the bits of whole weights. Second moments in codes have no flags: there one weight in
  131072 moves by its last place.
- Weights of 24 bits (`kernels.remainders`) lose their last 8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend._core import AdamCoefficients, KernelHelpers, adam_update
from memascend.kernels.codes import CODE_DTYPES, scale_count
from memascend.kernels.operands import check_operand
from memascend.kernels.overflow import dtype_name

if TYPE_CHECKING:
    import torch

__all__ = ["AdamCoefficients", "KernelHelpers", "make_rounding_key", "update"]

#: Dtypes of gradients; without the first, of outputs.
DTYPES = ("float32", "float16", "bfloat16")
#: Dtypes of moments.
MOMENT_DTYPES = ("float32", "bfloat16")
#: Dtypes in place of whole weights: low halves (16 bits that are no number) and remainders.
LOW_DTYPE, REMAINDER_DTYPE = "int16", "int8"
_MASK_64 = (1 << 64) - 1


def update(
    *,
    gradient: torch.Tensor,
    weight: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    scales: torch.Tensor | None = None,
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

    Args:
        gradient: fp32, fp16 or bf16; unchanged.
        weight: fp32, or the low halves in int16, or the remainders in int8; as many elements as the
            gradient, like moments.
        exp_avg: The first moment, in fp32, bf16 or int8 codes.
        exp_avg_sq: The second moment, in the same dtype; beside codes in uint8 codes or bf16.
        scales: fp32, for codes alone: 2 for each `codes.SCALE_NUMEL` elements, side by side, of
            the first and the second moment; beside a second moment in bf16 only the first.
        output: fp16 or bf16; set to the new weight, rounded to nearest even. Unless weights are
            whole it is bf16, and has the old one.
        coefficients: Hyperparameters of the step.
        tail_numel: Elements at the end that are computed in the other order (`csrc/kernels/`); 0
            with codes.
        rounding_key: For all but whole weights and moments in fp32; see `make_rounding_key`.
        first_index: The same: index of the first element in its sub-group.
        threads: None: as many as torch uses.
        helpers: Threads that are kept between calls; None: threads are started for this call.
        isa: One of `memascend._core.kernel_isas()`.

    Raises:
        ValueError: A tensor has a wrong dtype or length, is not contiguous, or not on the host;
            with codes, the tile begins inside a scale, or has a tail.
    """
    import torch

    _check_operands(gradient, weight, exp_avg, exp_avg_sq, output)
    _check_scales(exp_avg, exp_avg_sq, scales)
    adam_update(
        gradient=gradient.data_ptr(),
        gradient_dtype=dtype_name(gradient.dtype),
        weight=weight.data_ptr(),
        weight_dtype=dtype_name(weight.dtype),
        exp_avg=exp_avg.data_ptr(),
        exp_avg_sq=exp_avg_sq.data_ptr(),
        moment_dtype=_moment_dtype(exp_avg, exp_avg_sq),
        scales=0 if scales is None else scales.data_ptr(),
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


def _moment_dtype(exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> str:
    """Return the core's name of both moments' dtypes."""
    first, second = dtype_name(exp_avg.dtype), dtype_name(exp_avg_sq.dtype)
    return first if first != CODE_DTYPES[0] or second == CODE_DTYPES[1] else f"{first}/{second}"


def _check_operands(
    gradient: torch.Tensor,
    weight: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    output: torch.Tensor | None,
) -> None:
    numel = gradient.numel()
    is_whole = dtype_name(weight.dtype) == DTYPES[0]
    check_operand("gradient", gradient, numel, DTYPES)
    check_operand("weight", weight, numel, (DTYPES[0], LOW_DTYPE, REMAINDER_DTYPE))
    check_operand("exp_avg", exp_avg, numel, (*MOMENT_DTYPES, CODE_DTYPES[0]))
    in_codes = dtype_name(exp_avg.dtype) == CODE_DTYPES[0]
    second = (CODE_DTYPES[1], MOMENT_DTYPES[1]) if in_codes else (dtype_name(exp_avg.dtype),)
    check_operand("exp_avg_sq", exp_avg_sq, numel, second)
    if output is not None:
        check_operand("output", output, numel, DTYPES[1:] if is_whole else DTYPES[2:])
    elif not is_whole:
        raise ValueError(
            f"weight in {dtype_name(weight.dtype)} has low bits alone; output has the others"
        )


def _check_scales(
    exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, scales: torch.Tensor | None
) -> None:
    in_codes = [
        dtype_name(moment.dtype) == dtype
        for moment, dtype in zip((exp_avg, exp_avg_sq), CODE_DTYPES, strict=True)
    ]
    if scales is None:
        if any(in_codes):
            raise ValueError("scales are missing: moments in codes have them")
        return
    if not any(in_codes):
        raise ValueError(f"scales are for moments in codes; exp_avg is {dtype_name(exp_avg.dtype)}")
    check_operand("scales", scales, sum(in_codes) * scale_count(exp_avg.numel()), DTYPES[:1])
