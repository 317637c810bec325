"""Builds the native extension. Metadata lives in pyproject.toml.

The extension links the C++ standard library and libc only: no torch, CUDA, liburing, libaio or
libnuma, so one build serves every torch and nothing but a C++20 compiler is needed.
"""

import os
import re
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


#: The public address of the repository, in pyproject.toml (Python 3.10 reads no TOML).
ADDRESS = re.compile(r'^Repository = "(https://.+?)/?"', re.MULTILINE)
#: A link of a document, or a picture, that leads to a file beside it.
LINK = re.compile(r"(?P<words>(?P<picture>!?)\[[^\]]*\]\()(?P<file>(?!#|[a-z]+:)[^)\s]+)")


def read_description() -> str:
    """Return README as a package index shows it.

    An index has no file of the repository. If that has an address, links lead there.
    """
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    address = ADDRESS.search((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link["picture"] else "blob"
        return f"{link['words']}{address[1]}/{kind}/HEAD/{link['file']}"

    return LINK.sub(absolute, text) if address else text


check_compiler()
ParallelCompile("NPY_NUM_BUILD_JOBS", default=os.cpu_count() or 1).install()

setup(
    long_description=read_description(),
    long_description_content_type="text/markdown",
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
