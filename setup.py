"""Builds the native extension. Metadata lives in pyproject.toml.

The extension links the C++ standard library and libc only: no torch, CUDA, liburing, libaio or
libnuma, so one build serves every torch and nothing but a C++20 compiler is needed.
"""

import os
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

import pybind11
from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup

ROOT = Path(__file__).parent
HEADERS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.hpp"))
SOURCES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.cpp"))
WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Wconversion"]
if os.environ.get("MEMASCEND_WERROR") == "1":
    WARNINGS.append("-Werror")

# The Adam step says itself which operations are fused.
ROUNDING = ["-ffp-contract=off"]

# As system headers pybind11's own are exempt from our warnings.
SYSTEM_HEADERS = ["-isystem", pybind11.get_include()]

#: Commands that compile, or come before: pip asks for the metadata before it fetches torch.
COMPILING = {"dist_info", "bdist_wheel", "build_ext", "editable_wheel"}


def check_compiler() -> None:
    """End with the remedy if there is no C++ compiler, before anything is fetched or copied."""
    words = shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++")
    if COMPILING & {*sys.argv} and not shutil.which(words[0]):
        raise SystemExit(
            f"memascend: {words[0]!r} not found, and its core needs a C++20 compiler.\n"
            "Install one (apt-get install g++ python3-dev), name one in CXX, or install a wheel."
        )


check_compiler()
ParallelCompile("NPY_NUM_BUILD_JOBS", default=os.cpu_count() or 1).install()

setup(
    ext_modules=[
        Pybind11Extension(
            "memascend._core",
            SOURCES,
            depends=HEADERS,
            include_dirs=["csrc"],
            cxx_std=20,
            extra_compile_args=["-O2", "-g1", "-pthread", *ROUNDING, *SYSTEM_HEADERS, *WARNINGS],
            extra_link_args=["-pthread"],
        )
    ],
    cmdclass={"build_ext": build_ext},
)
