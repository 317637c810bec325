"""The fused Adam step on host tensors: gradient, moments, weight and 16-bit weight in one pass.

Knows neither optimizers nor tiles; the numbers of a step come from the caller. Callable from any
thread; the interpreter's lock is released meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend._core import AdamCoefficients, KernelHelpers, adam_update

if TYPE_CHECKING:
    import torch

__all__ = ["AdamCoefficients", "KernelHelpers", "make_rounding_key", "update"]

#: Of gradients; the same without the first, of outputs.
DTYPES = ("float32", "float16", "bfloat16")
#: Of moments.
MOMENT_DTYPES = ("float32", "bfloat16")
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
    """Step every element once, in place; allocate nothing of their size.

    The arithmetic is DeepSpeedCPUAdam's, each operation rounded as there. Bits depend neither on
    threads nor on instruction set nor on alignment; the payload of a NaN may.

    Moments in bf16 are widened first, and rounded stochastically once the weight is stepped: up or
    down at random, so that their mean is what it would be in fp32.

    Args:
        gradient: fp32, fp16 or bf16; unchanged.
        weight: fp32; as long as the gradient, as are the moments.
        exp_avg: The first moment, in fp32 or bf16.
        exp_avg_sq: The second moment, in the same dtype.
        output: fp16 or bf16; becomes the new weight, rounded to nearest even.
        coefficients: Numbers of the step.
        tail_numel: So many elements at the end are computed in the other order (`csrc/kernels/`).
        rounding_key: Of moments in bf16; see `make_rounding_key`.
        first_index: Of the same: number of the first element in its sub-group.
        threads: None: as many as torch uses.
        helpers: Threads that are kept between calls; None: they are started for this one.
        isa: One of `memascend._core.kernel_isas()`.

    Raises:
        ValueError: A tensor is of another dtype or length, not contiguous, or not on the host.
    """
    import torch

    numel = gradient.numel()
    _check("gradient", gradient, numel, DTYPES)
    _check("weight", weight, numel, DTYPES[:1])
    _check("exp_avg", exp_avg, numel, MOMENT_DTYPES)
    _check("exp_avg_sq", exp_avg_sq, numel, (_name(exp_avg.dtype),))
    if output is not None:
        _check("output", output, numel, DTYPES[1:])
    adam_update(
        gradient=gradient.data_ptr(),
        gradient_dtype=_name(gradient.dtype),
        weight=weight.data_ptr(),
        exp_avg=exp_avg.data_ptr(),
        exp_avg_sq=exp_avg_sq.data_ptr(),
        moment_dtype=_name(exp_avg.dtype),
        output=0 if output is None else output.data_ptr(),
        output_dtype=None if output is None else _name(output.dtype),
        numel=numel,
        coefficients=coefficients,
        tail_numel=tail_numel,
        rounding_key=rounding_key,
        first_index=first_index,
        threads=torch.get_num_threads() if threads is None else threads,
        helpers=helpers,
        isa=isa,
    )


def make_rounding_key(*numbers: int) -> int:
    """Return what the random bits of a step are made of: 64 bits that differ with every number.

    Each number is taken in by one step of SplitMix64 (Steele, Lea and Flood, 2014).
    """
    key = 0
    for number in numbers:
        key = (key ^ number) + 0x9E3779B97F4A7C15 & _MASK_64
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & _MASK_64
        key = (key ^ key >> 27) * 0x94D049BB133111EB & _MASK_64
        key ^= key >> 31
    return key


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
