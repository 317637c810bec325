"""The things that checks and runs on a GPU need and a machine may lack, each with the reason.

Each function returns the reason as text, or "" if the thing is there. Bare images and sandboxes
(gVisor, locked-down containers) lack some: a case that needs one is "not here" then and has not
failed. Nothing here uses a device.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from memascend.cli import doctor
from memascend.config.volumes import VolumeConfig

#: DeepSpeed's async_io needs these to compile; the flags are those of its builder.
ASYNC_IO_SOURCE = "#include <libaio.h>\n#include <cuda_runtime.h>\nint main() { return 0; }\n"
ASYNC_IO_LIBRARIES = ("aio", "cuda", "cudart")


@functools.cache
def compiler() -> str:
    """A C++ compiler and the headers of Python, for DeepSpeed's operators and for Triton."""
    if not any(map(shutil.which, (os.environ.get("CXX", ""), "g++", "c++", "clang++"))):
        return "needs a C++ compiler: neither g++, c++ nor clang++ is on PATH"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return "" if header.exists() else f"needs the headers of Python: there is no {header}"


def packages(*names: str) -> str:
    """Python packages that can be found; none of them is imported."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return f"needs Python packages that are not installed: {', '.join(missing)}" if missing else ""


def training() -> str:
    """The needs of every training run: CPU offload compiles DeepSpeed's Adam, without nvcc."""
    return packages("deepspeed", "transformers", "accelerate", "ninja") or compiler()


@functools.cache
def async_io() -> str:
    """The needs of stock's NVMe offload: DeepSpeed compiles its async_io with CUDA and libaio."""
    from torch.utils.cpp_extension import CUDA_HOME

    if reason := compiler():
        return reason
    if reason := _architectures():
        return reason
    if CUDA_HOME is None:
        return "stock's async_io needs the CUDA toolkit: CUDA_HOME is not set and nvcc not found"
    command = [os.environ.get("CXX", "g++"), "-x", "c++", "-", "-o", "program"]
    command += [f"-I{CUDA_HOME}/include", f"-L{CUDA_HOME}", f"-L{CUDA_HOME}/lib64"]
    command += [f"-l{library}" for library in ASYNC_IO_LIBRARIES]
    with tempfile.TemporaryDirectory() as scratch:
        done = subprocess.run(
            command, cwd=scratch, input=ASYNC_IO_SOURCE, capture_output=True, text=True
        )
    if done.returncode == 0:
        return ""
    errors = [line for line in done.stderr.splitlines() if "error" in line or "cannot find" in line]
    return (
        f"stock's async_io cannot be built: {'; '.join(errors) or done.stderr.strip()}. "
        f"Fix: install libaio-dev; for -lcuda set LIBRARY_PATH={CUDA_HOME}/lib64/stubs"
    )


def _architectures() -> str:
    """CUDA architectures that DeepSpeed's builder can read: it takes the parts for numbers."""
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    for name in listed.replace(";", " ").split():
        if not all(part.isdigit() for part in name.split("+")[0].split(".")):
            plain = "".join(sign for sign in name if sign.isdigit() or sign == ".")
            return (
                f"stock's async_io cannot be built: DeepSpeed cannot read {name!r} in "
                f"TORCH_CUDA_ARCH_LIST={listed!r}. Fix: set TORCH_CUDA_ARCH_LIST={plain}"
            )
    return ""


@functools.cache
def checkpoint_offload() -> str:
    """A switch of transformers that keeps checkpoints of activations in page-locked memory."""
    if reason := packages("transformers"):
        return reason
    import transformers

    enable = transformers.PreTrainedModel.gradient_checkpointing_enable
    if "offload" in inspect.signature(enable).parameters:
        return ""
    return f"transformers {transformers.__version__} has no gradient_checkpointing_enable(offload=)"


def circumstances(directory: Path) -> dict[str, str]:
    """Return the things that no case fails for, but that its figures depend on, if missing.

    These are the findings of `memascend doctor` (io_uring, page lock, libaio, ...) and the tools of
    CUDA; `kernel_counts.lacks` has those of the kernel's counts.
    """
    checks = doctor.examine([VolumeConfig(path=str(directory))])
    found = {check.name: check.found for check in checks if check.state != "ok"}
    for tool in ("nvcc", "nvidia-smi"):
        found[tool] = "" if shutil.which(tool) else "not on PATH"
    return {name: reason for name, reason in found.items() if reason}
