"""How much faster is the fused overflow check, and how many temporary bytes does it save?

Against both forms that DeepSpeed 0.19.8 uses: isinf().any() and isnan().any() on the flat gradient
buffer (its ZeRO stage 3), and amax() and amin() (its has_inf_or_nan). All elements are finite, as
in nearly every step, so nobody stops early.
"""

from __future__ import annotations

import argparse

import harness
import torch

from memascend.kernels import overflow

QUESTION = "overflow check: time and temporary bytes against DeepSpeed's two forms"
NBYTES = {"small": 8 << 20, "large": 256 << 20}
ROUNDS = {"small": 3, "large": 9}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def isinf_isnan(tensor: torch.Tensor) -> bool:
    """As DeepSpeedZeroOptimizer_Stage3.has_overflow does it."""
    return bool(torch.isinf(tensor).any()) | bool(torch.isnan(tensor).any())


def amax_amin(tensor: torch.Tensor) -> bool:
    """As deepspeed.runtime.utils.has_inf_or_nan does it."""
    finite = torch.isfinite(tensor.amax()).logical_and(torch.isfinite(tensor.amin()))
    return bool(finite.logical_not())


def run(*, small: bool) -> list[harness.Row]:
    """Measures every dtype and gives one row for each contender."""
    size = "small" if small else "large"
    circumstances = harness.machine()
    return [
        row
        for dtype in DTYPES
        for row in _run_dtype(dtype, NBYTES[size], ROUNDS[size], circumstances)
    ]


def _run_dtype(
    dtype: torch.dtype, nbytes: int, rounds: int, circumstances: dict[str, object]
) -> list[harness.Row]:
    tensor = torch.randn(nbytes // dtype.itemsize).to(dtype)
    contenders = [
        harness.Contender("memascend, flag", lambda: overflow.scan(tensor)),
        harness.Contender("memascend, flag + sum", lambda: overflow.scan(tensor, sum_squares=True)),
        harness.Contender("isinf, isnan", lambda: isinf_isnan(tensor)),
        harness.Contender("amax, amin", lambda: amax_amin(tensor)),
    ]
    samples = harness.interleave(contenders, rounds=rounds)
    ours = samples["memascend, flag + sum"]
    rows = []
    for contender in contenders:
        taken = samples[contender.name]
        walls = [sample.wall_s for sample in taken]
        figures = {
            "wall_ms": harness.spread([wall_s * 1e3 for wall_s in walls]),
            "gb_per_s": harness.spread([nbytes / wall_s / 1e9 for wall_s in walls]),
            "flag_and_sum_speedup": harness.speedup(ours, taken),
            "temporary_bytes": harness.peak_rss_growth(contender.run),
        }
        config = {"nbytes": nbytes, "rounds": rounds, "torch_threads": torch.get_num_threads()}
        case = str(dtype).removeprefix("torch.")
        rows.append(harness.Row("overflow", case, contender.name, figures, config, circumstances))
    return rows


def run_and_report(options: argparse.Namespace) -> None:
    rows = run(small=options.small)
    harness.report("overflow", QUESTION, rows, options.out)


if __name__ == "__main__":
    run_and_report(harness.parser(QUESTION).parse_args())
