"""Builds the native extension. Metadata lives in pyproject.toml.

The extension links the C++ standard library and libc only: no torch, CUDA, liburing, libaio or
libnuma, so one build serves every torch and nothing but a C++20 compiler is needed.
"""

import os
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
