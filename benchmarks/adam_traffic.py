"""How many bytes of memory does the fused Adam step read and write for a parameter?

Steps of a tile that no cache holds run under valgrind's cachegrind, which simulates the caches: the
lines that the last level does not have are those that memory gives. A run with one step is taken
off a run with two, and what is left is one step's. What is written back is not simulated: each line
that a step changes goes back once, which is counted. Needs valgrind; neither torch nor DeepSpeed.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from memascend._core import AdamCoefficients, adam_update

ITEMSIZES = {"float32": 4, "bfloat16": 2}
LINE_BYTES = 64
#: Size of the simulated last level, its ways, and bytes of a line.
LAST_LEVEL = (8 << 20, 16, LINE_BYTES)
NUMEL = 8 << 20
#: Master weights and two moments are changed in place; the output is new.
STATE_BYTES, OUTPUT_BYTES = 3 * 4, 2


def step(numel: int, gradient_dtype: str, steps: int) -> None:
    """Steps a tile of zeros so many times, on one thread."""
    blocks = [
        (ctypes.c_char * (numel * size))()
        for size in (ITEMSIZES[gradient_dtype], 4, 4, 4, OUTPUT_BYTES)
    ]
    gradient, weight, exp_avg, exp_avg_sq, output = map(ctypes.addressof, blocks)
    coefficients = AdamCoefficients(
        factor=1.0,
        beta1=0.9,
        beta2=0.999,
        take1=0.1,
        take2=0.001,
        root_scale=1.0,
        epsilon=1e-8,
        step_size=-1e-3,
    )
    for _ in range(steps):
        adam_update(
            gradient=gradient,
            gradient_dtype=gradient_dtype,
            weight=weight,
            exp_avg=exp_avg,
            exp_avg_sq=exp_avg_sq,
            moment_dtype="float32",
            output=output,
            output_dtype="bfloat16",
            numel=numel,
            coefficients=coefficients,
            threads=1,
        )


def missed_lines(report: str) -> int:
    """Lines that the last level lacked, from what cachegrind prints."""
    found = re.findall(r"LL misses:\s+([\d,]+)", report)
    if len(found) != 1:
        raise SystemExit(f"cachegrind printed no misses:\n{report[-2000:]}")
    return int(found[0].replace(",", ""))


def count_missed_lines(numel: int, gradient_dtype: str, steps: int) -> int:
    """The same of a process that steps so many times."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            "valgrind",
            "--tool=cachegrind",
            "--cache-sim=yes",
            f"--LL={','.join(map(str, LAST_LEVEL))}",
            f"--cachegrind-out-file={Path(folder) / 'out'}",
            *(sys.executable, __file__, "--numel", str(numel)),
            *("--dtype", gradient_dtype, "--steps", str(steps)),
        ]
        # What the interpreter does besides is the same in every run.
        environment = os.environ | {"PYTHONHASHSEED": "0"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return missed_lines(done.stderr)


def read_bytes(numel: int, gradient_dtype: str) -> float:
    """Bytes that memory gives for a parameter in a step."""
    one, two = (count_missed_lines(numel, gradient_dtype, steps) for steps in (1, 2))
    return (two - one) * LINE_BYTES / numel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numel", type=int, default=NUMEL)
    parser.add_argument("--dtype", choices=ITEMSIZES, help="of gradients (default: each)")
    parser.add_argument("--steps", type=int, help="only step, and print nothing")
    options = parser.parse_args()
    if options.steps is not None:
        step(options.numel, options.dtype, options.steps)
        return
    if shutil.which("valgrind") is None:
        raise SystemExit("this needs valgrind: apt-get install valgrind")
    for dtype in ITEMSIZES if options.dtype is None else [options.dtype]:
        read, written = read_bytes(options.numel, dtype), STATE_BYTES + OUTPUT_BYTES
        print(f"{dtype} gradients: {read:.2f} bytes read, {written} written back for a parameter")


if __name__ == "__main__":
    main()
