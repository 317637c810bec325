"""Compiles the device kernels to machine code for several architectures; prints what became of it.

Started without TRITON_INTERPRET: neither a GPU nor CUDA is needed, triton has what it takes. Each
row has what was compiled, how wide its loads are, and the error where compiling failed.
"""

from __future__ import annotations

import itertools
import json
import re
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from memascend.kernels import overflow_triton as kernels

ARCHITECTURES = (80, 90, 100)
DTYPES = ("fp32", "fp16", "bf16")
WARP_THREADS, ALIGNMENT_BYTES = 32, 16


def compiled(
    architecture: int, kernel: Any, types: dict[str, str], constants: dict[str, Any], aligned: Any
) -> str:
    """Return the PTX, once there is machine code for it."""
    names = kernel.arg_names
    attributes = {(names.index(name),): [["tt.divisibility", ALIGNMENT_BYTES]] for name in aligned}
    signature = types | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", architecture, WARP_THREADS)
    made = triton.compile(source, target=target)
    assert made.asm["cubin"].startswith(b"\x7fELF")
    return str(made.asm["ptx"])


def scan(
    architecture: int, dtype: str, *, sums: bool = True, is_aligned: bool = True, count: str = "i32"
) -> str:
    types = {"source": f"*{dtype}", "numel": count, "blocks_each": "i32"}
    types |= {"found": "*i32", "partial": "*fp64"}
    constants = {"SUM_SQUARES": sums, "BLOCK": kernels.BLOCK_NUMEL}
    aligned = {"found", "partial"} | ({"source"} if is_aligned else set())
    return compiled(architecture, kernels._scan_kernel, types, constants, aligned)


def finish(architecture: int, *, sums: bool) -> str:
    types = {"found": "*i32", "partial": "*fp64", "program_count": "i32", "result": "*fp64"}
    constants = {"SUM_SQUARES": sums, "PROGRAMS": kernels.PROGRAMS_MAX}
    aligned = {"found", "partial", "result"}
    return compiled(architecture, kernels._finish_kernel, types, constants, aligned)


def widest_load(ptx: str) -> str:
    """Return how many words of 32 bits a load from global memory takes at most: v4, v2 or v1."""
    return "v" + max(re.findall(r"ld\.global[\w.]*?\.v(\d)", ptx), default="1")


def main() -> None:
    cases: dict[str, Callable[[int], str]] = {}
    for dtype, sums in itertools.product(DTYPES, (False, True)):
        cases[f"{dtype}, sums: {sums}"] = partial(scan, dtype=dtype, sums=sums)
    cases["fp32, not aligned"] = partial(scan, dtype="fp32", is_aligned=False)
    cases["bf16, more than 2^31"] = partial(scan, dtype="bf16", count="i64")
    cases |= {f"finish, sums: {sums}": partial(finish, sums=sums) for sums in (False, True)}
    rows = []
    for architecture, (name, make) in itertools.product(ARCHITECTURES, cases.items()):
        loads = error = ""
        try:
            loads = widest_load(make(architecture))
        except Exception:
            error = traceback.format_exc()
        rows.append([f"sm_{architecture}, {name}", loads, error])
    specialised = [
        parameter.name
        for kernel in (kernels._scan_kernel, kernels._finish_kernel)
        for parameter in kernel.params
        if not (parameter.do_not_specialize or parameter.is_constexpr)
    ]
    print(json.dumps({"rows": rows, "specialised": specialised}))


if __name__ == "__main__":
    main()
