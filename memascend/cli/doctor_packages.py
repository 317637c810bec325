"""The checks of `memascend doctor` that read installed packages: releases, and their code."""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import sys

from memascend.cli.check import Check
from memascend.config.installed import ABILITIES, HOST_BUILDERS, RANGE, is_able
from memascend.deepspeed.seams import transformers as transformers_seams
from memascend.deepspeed.seams.compare import compare
from memascend.deepspeed.seams.fingerprints import VERSIONS
from memascend.deepspeed.seams.refusal import advice

#: The oldest torch, as in pyproject.toml.
TORCH_OLDEST = (2, 5)
#: Training frameworks that have a recipe or an example, by their distributions.
FRAMEWORKS = ("accelerate", "trl", "llamafactory", "ms-swift", "axolotl", "openrlhf")

TOOLKIT_FIX = (
    "set CUDA_HOME to a CUDA toolkit of torch's release, or install DeepSpeed "
    f"{HOST_BUILDERS.since}, which needs none, if your framework takes it"
)


def _package(name: str) -> Check:
    try:
        return Check(name, "ok", importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        wanted = f"{name}=={VERSIONS[-1]}" if name == "deepspeed" else name
        return Check(name, "problem", "missing", f"pip install {wanted}")


def check_torch() -> Check:
    """Compare torch's version with the oldest one that loads memascend by itself."""
    check = _package("torch")
    numbers = tuple(map(int, re.findall(r"\d+", check.found)[:2]))
    if check.state != "ok" or numbers >= TORCH_OLDEST:
        return check
    oldest = ".".join(map(str, TORCH_OLDEST))
    found = f"{check.found} is older than {oldest}, which memascend needs"
    return Check("torch", "problem", found, f"pip install 'torch>={oldest}'")


def check_deepspeed() -> Check:
    """Compare DeepSpeed's code with the known fingerprints, as training does at its start."""
    check = _package("deepspeed")
    if check.state != "ok":
        return check
    try:
        with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed prints while it is imported
            import deepspeed  # noqa: F401

            compared = compare()
    except Exception as error:
        found = f"{check.found} cannot be imported: {error}"
        fix = TOOLKIT_FIX if "CUDA_HOME" in str(error) else f"pip install 'deepspeed{RANGE}'"
        return Check("deepspeed", "problem", found, fix)
    if compared.differing:
        found = f"{check.found} is refused: {len(compared.differing)} definitions differ"
        return Check("deepspeed", "problem", found, advice(check.found))
    fix = f"pip install deepspeed=={VERSIONS[-1]}, if your framework takes it"
    if check.found not in VERSIONS:
        found = (
            f"{check.found} was not tested, but has the code of {compared.release} where it matters"
        )
        return Check("deepspeed", "note", found, fix)
    lacking = [f"{one.what} ({one.since})" for one in ABILITIES if not is_able(one)]
    if lacking:
        return Check("deepspeed", "note", f"{check.found}, without {', '.join(lacking)}", fix)
    return check


def check_transformers() -> Check:
    """Compare the loader of transformers with the known ones, as training does at its start."""
    check = _package("transformers")
    if check.state != "ok":
        return Check("transformers", "ok", "not installed: a training loop without it needs none")
    with contextlib.redirect_stdout(sys.stderr):
        unknown = transformers_seams.unknown_definitions()
    if not unknown:
        return check
    found = (
        f"{check.found} loads pretrained weights with unknown code ({', '.join(unknown)}): training"
        " is the same, but while weights are loaded host memory grows with their files"
    )
    fix = f"transformers {transformers_seams.known_releases()}, if your framework takes it"
    return Check("transformers", "note", found, fix)


def check_frameworks() -> Check:
    """Name the training frameworks that are installed."""
    checks = [_package(name) for name in FRAMEWORKS]
    found = [f"{check.name} {check.found}" for check in checks if check.state == "ok"]
    return Check("frameworks", "ok", ", ".join(found) or f"none of {', '.join(FRAMEWORKS)}")
