"""Whole training runs on the device in modes that are chosen by name: guesses, 8 bits, Muon.

As in `training`, each run is a fresh process, and losses and a digest of the final weights are
compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from trainee import Trainee

from . import Figures
from .training import (
    LEARNING_RATE,
    MISTAKE,
    differences,
    judge_parity,
    result,
    start,
    trained,
)

#: No norm is above the one, each is above the other.
HIGH_CLIPPING, LOW_CLIPPING = 1e3, 1e-2
#: All but the first are begun during backward.
GUESSED_STEPS = 6
GUESSING = {"streaming": {"optimizer": {"during_backward": True}}}
ALWAYS = ("--always-guess",)
#: Enough for a run to time its steps, and to begin some during backward.
AUTO_STEPS = 26
AUTO = {"streaming": {"optimizer": {"during_backward": "auto"}}}
#: 8 bits in tiles of two sizes: the tiles that a tensor is cut into must not show.
EIGHT_BITS = {"state_dtype": "int8", "master_dtype": "bf16+8"}
TILE_BYTES = ("256KiB", "1MiB")
#: The part of a loss that 8 bits may change.
EIGHT_BITS_TOLERANCE = 0.02
#: Compiling Muon's kernels takes minutes, and is torch's part.
EAGER = {"TORCH_COMPILE_DISABLE": "1"}
MUON_CLIPPING = 1000.0


# -- guesses -------------------------------------------------------------------------------------


def measure_guesses(folder: Path, broken: bool) -> dict[str, Any]:
    """The numbers of CPU offload and of steps begun during backward, all rightly or all wrongly."""
    commands = ["step"] * GUESSED_STEPS
    figures = {}
    for name, clipping in (("right", HIGH_CLIPPING), ("wrong", LOW_CLIPPING)):
        clipped = partial(start, folder, clipping=clipping)
        ours = clipped(block=GUESSING, options=ALWAYS, mistake=MISTAKE if broken else 0.0)
        figures[name] = {
            "oracle": result(clipped(offload="cpu"), commands),
            "ours": result(ours, commands),
        }
    return figures


def judge_guesses(figures: Figures) -> list[str]:
    """Wants the numbers of CPU offload, and every guess as right or wrong as it was made to be."""
    problems = []
    for name in ("right", "wrong"):
        runs = figures[name]
        problems += differences(f"{name} guesses differ", runs["oracle"], runs["ours"])
        wanted = {"right": 0, "wrong": 0} | {name: GUESSED_STEPS - 1}
        if runs["ours"]["guesses"] != wanted:
            problems.append(f"guesses are {runs['ours']['guesses']}, and not {wanted}")
    return problems


def measure_auto(folder: Path, broken: bool) -> dict[str, Any]:
    """The numbers of CPU offload, and of a run that times its steps in both modes and decides."""
    commands = ["step"] * AUTO_STEPS
    clipped = partial(start, folder, clipping=HIGH_CLIPPING)
    ours = clipped(block=AUTO, mistake=MISTAKE if broken else 0.0)
    return {
        "oracle": result(clipped(offload="cpu"), commands),
        "ours": result(ours, commands),
    }


def judge_auto(figures: Figures) -> list[str]:
    """Wants the numbers of CPU offload, and steps that were begun during backward."""
    problems = differences("auto differs", figures["oracle"], figures["ours"])
    guesses = figures["ours"]["guesses"]
    if not guesses or not guesses["right"]:
        problems.append(f"no step was begun during backward: {guesses}")
    return problems


# -- 8 bits --------------------------------------------------------------------------------------


def measure_eight_bits(folder: Path, broken: bool) -> dict[str, Any]:
    """The numbers of 8 bits in tiles of two sizes, and those of fp32."""
    runs = {}
    for index, nbytes in enumerate(TILE_BYTES):
        block = {"streaming": {"optimizer": {**EIGHT_BITS, "tile_bytes": nbytes}}}
        mistake = MISTAKE if broken and index else 0.0
        runs[nbytes] = result(start(folder, block=block, mistake=mistake))
    return {"fp32": result(start(folder)), **runs}


def judge_eight_bits(figures: Figures) -> list[str]:
    """Wants equal numbers for tiles of each size, and losses near those of fp32."""
    small, large = (figures[nbytes] for nbytes in TILE_BYTES)
    problems = differences("tiles of another size differ", small, large)
    for exact, found in zip(_losses(figures["fp32"]), _losses(small), strict=True):
        if not math.isclose(exact, found, rel_tol=EIGHT_BITS_TOLERANCE):
            problems.append(f"a loss of 8 bits is {found}, that of fp32 {exact}")
    if figures["fp32"]["weights"] == small["weights"]:
        problems.append("8 bits have the weights of fp32: they were not in use")
    return problems


def _losses(run: Figures) -> list[float]:
    return [float(loss) for loss in ",".join(run["losses"]).split(",")]


# -- Muon ----------------------------------------------------------------------------------------


def muon(folder: Path, *, mistake: float = 0.0, **more: Any) -> Trainee:
    """A run of DeepSpeed's Muon that is not started yet."""
    run = start(folder, clipping=MUON_CLIPPING, environment=EAGER, **more)
    rates: Mapping[str, float] = {"lr": 100 * LEARNING_RATE, "adam_lr": LEARNING_RATE}
    wrong = {name: rate * (1 + mistake) for name, rate in rates.items()}
    run.config["zero_optimization"]["reduce_scatter"] = False  # which it refuses
    run.config["optimizer"] = {
        "type": "Muon",
        "params": {**wrong, "momentum": 0.95, "weight_decay": 0.1},
    }
    return run


def measure_muon(folder: Path, broken: bool) -> dict[str, Any]:
    """The numbers of Muon with CPU offload, twice, and matrix by matrix from the drive."""
    ours = muon(folder, mistake=MISTAKE if broken else 0.0)
    return {
        "oracle": result(muon(folder, offload="cpu")),
        "again": result(muon(folder, offload="cpu")),
        "ours": result(ours),
    }


WRONG_RATE = f"a learning rate that is wrong by {MISTAKE:.0%}"

CHECKS = (
    trained(
        "guesses",
        "losses and weights are those of CPU offload where guesses are right, and where wrong",
        measure_guesses,
        judge_guesses,
        WRONG_RATE,
        noticed_min=4,
        runs=8,
    ),
    trained(
        "muon",
        "losses and weights of DeepSpeed's Muon are those of CPU offload",
        measure_muon,
        judge_parity,
        WRONG_RATE,
        noticed_min=2,
        runs=6,
    ),
    trained(
        "eight-bits",
        "8 bits give the same numbers whatever the tiles, and losses near those of fp32",
        measure_eight_bits,
        judge_eight_bits,
        f"{WRONG_RATE} in one of the two",
        noticed_min=2,
        runs=6,
    ),
    trained(
        "auto",
        "losses and weights are those of CPU offload in a run that times its steps and decides",
        measure_auto,
        judge_auto,
        WRONG_RATE,
        noticed_min=2,
        runs=6,
    ),
)
