"""Does the drive work while layers compute, and layers while the drive works?

The layers of `sleeping_model.py` compute for a stated time without any CPU, so that what overlaps
shows on any machine. First the drive is timed with what each phase of a step moves, and nothing
else (`transfers.py`); then models train whose layers compute for a part, all, or a multiple of that
time. Stock as DeepSpeed's documentation configures it, stock pipelined, and memascend with an empty
block are alive side by side and take turns of a few steps: what a step leaves to be done behind the
next one is waited for at the end of a turn, and counts. Without clipping memascend is there a
second time, with steps that begin during backward. Each round times the drive anew.

With --emulated all train on the emulated device of the tests: the layers' compute is a kernel of
it, and copies run on streams. Forward and backward are then what its main stream takes for them.

The bound of a phase is the longer one of its compute and its drive time; that of the whole step the
longer one of all compute and all drive time. No step reaches the latter whose optimizer waits for a
norm: `training_to_least` is the time of memascend's steps by the least that their order allows.
Where steps begin during backward some tiles are left to the next forward pass. Ratios are taken
within a round.

With --one-pass a step has eight micro-steps of the stated compute: stock accumulates their
gradients, and so does memascend, which is there a second time with one pass of eight slices.

With --beside memascend trains a second model in the same rounds. Its layers are of another size and
have the same bytes and compute in all: the time of a step should not depend on the size of a layer.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
from bench_step import (
    ACCUMULATED,
    CONTENDERS,
    ONE_PASSES,
    OURS,
    PIPELINED,
    STOCK,
    WARMUPS,
    Contender,
    loss_difference,
    moved_bytes,
    table_rows,
    trainee_of,
)
from drive_rate import drive_rate
from trainee import TOKENS, Sleeping, Trainee, side_by_side
from transfers import READ, WRITTEN, Transfers

from memascend.base.sizes import LEFT_ONE_OF
from memascend.plan.step_time import DriveTime

QUESTION = "Overlap: phases of a step beside compute and drive"
BOUND = "bound"
PHASES = ("forward", "backward", "optimizer")
#: What each phase reads and writes: bytes of each element, by key.
MOVED: dict[str, tuple[Mapping[str, int], Mapping[str, int]]] = {
    "forward": ({"parameter": 2}, {}),
    "backward": ({"parameter": 2}, {"gradient": 2}),
    "optimizer": (READ, WRITTEN),
}
#: The same where tiles are stepped during backward: no gradient goes to the drive.
MOVED_EARLY = (
    {"parameter": 2} | {key: size for key, size in READ.items() if key != "gradient"},
    WRITTEN,
)
EARLY_PHASE = "backward, with the optimizer"
#: Compute of forward and backward, as a multiple of the drive's time for them.
COMPUTE = {"small": (1.0,), "large": (0.3, 1.0, 3.0)}
SIZES = {"small": (3, 1024), "large": (12, 4096)}  # layers, width
ROUNDS = {"small": 1, "large": 5}
#: At the smallest size only without it, where all contenders are: bench_step.py clips.
CLIPPING = {"small": (0.0,), "large": (1.0, 0.0)}
#: Where nothing is clipped.
OURS_EARLY = f"{OURS} during backward"
EARLY = {OURS_EARLY: Contender({}, block={"streaming": {"optimizer": {"during_backward": True}}})}
#: Steps of a turn.
IN_A_ROW = 4
#: With --one-pass.
MICRO_STEPS = 8
#: Times of the drive alone that say how long layers compute; the middle one counts.
DRIVE_ROUNDS = 3


def run(options: argparse.Namespace) -> Iterator[harness.Row]:
    """Trains each model with all contenders, in turns; with --beside, two models with memascend."""
    size = "small" if options.small else "large"
    idle = Sleeping(*(options.size or SIZES[size]))
    circumstances = harness.machine(options.directory) | {"drive_gb_per_s": options.drive_rate}
    compare, computes = beside_stock, COMPUTE[size]
    if options.beside is not None:
        compare, computes = beside_another, (1.0,)
    elif options.one_pass:
        compare = in_one_pass
    with Transfers(idle.numel, options.directory) as transfers:
        drive_s = median_of([time_drive(transfers) for _ in range(DRIVE_ROUNDS)])
        for name, model in models(idle, drive_s, options.layer_ms, computes).items():
            for clipping in CLIPPING[size] if options.clipping is None else options.clipping:
                case = f"{name}, clip {clipping:g}"
                for contender, found, config in compare(model, clipping, transfers, options):
                    yield harness.Row("overlap", case, contender, found, config, circumstances)


#: A contender, its figures, and the setting.
Found = tuple[str, dict[str, Any], dict[str, Any]]


def beside_stock(
    model: Sleeping, clipping: float, transfers: Transfers, options: argparse.Namespace
) -> Iterator[Found]:
    """Trains one model with all contenders."""
    accelerator, rounds = accelerator_and_rounds(options)
    runs = contenders_of(model, clipping, options.directory, accelerator)
    steps, drives = take_steps(runs, rounds, transfers)
    bounds = [bounds_of(model, drive) for drive in drives]
    least = [least_of(model, drive) for drive in drives]
    losses = {tuple(step["loss"] for step in taken) for taken in steps.values()}
    config = {
        "model": model.shape,
        "accelerator": accelerator,
        "clipping": clipping,
        "drive_s": median_of(drives),
        "losses_equal": len(losses) == 1,
    }
    yield BOUND, {f"{p}_s": harness.spread([one[p] for one in bounds]) for p in bounds[0]}, {}
    for contender, taken in steps.items():
        least_s = [one[contender] for one in least if contender in one]
        yield contender, figures(taken, steps[STOCK], bounds, least_s), config


def beside_another(
    model: Sleeping, clipping: float, transfers: Transfers, options: argparse.Namespace
) -> Iterator[Found]:
    """Trains two models of equal bytes and compute, in few large layers and in many small ones."""
    accelerator, rounds = accelerator_and_rounds(options)
    both = [model, beside(model, *options.beside)]
    runs = [
        replace(run, name=f"{run.name}, {layout(one)}")
        for one in both
        for run in contenders_of(one, clipping, options.directory, accelerator)
        if run.name not in (STOCK, PIPELINED)
    ]
    steps, drives = take_steps(runs, rounds, transfers)
    bounds = [bounds_of(model, drive) for drive in drives]
    for name, taken in steps.items():
        found = figures(taken, steps[name.replace(*map(layout, both))], bounds)
        found["training_to_beside"] = found.pop("training_to_stock")
        yield name, found, {"accelerator": accelerator, "clipping": clipping}


def in_one_pass(
    model: Sleeping, clipping: float, transfers: Transfers, options: argparse.Namespace
) -> Iterator[Found]:
    """Trains one model with accumulation and in one pass, on equal tokens."""
    accelerator, rounds = accelerator_and_rounds(options)
    runs = [
        trainee_of(
            name,
            contender,
            model,
            options.directory,
            tokens=TOKENS,
            micro_steps={"gradient_accumulation_steps": MICRO_STEPS},
            clipping=clipping,
            accelerator=accelerator,
            checkpoints=True,
        )
        for name, contender in ONE_PASSES.items()
    ]
    steps, drives = take_steps(runs, rounds, transfers)
    # Checkpointing computes forward twice.
    compute_s = MICRO_STEPS * sum(model.compute_s(phase) for phase in ("forward", *PHASES[:2]))
    config = {"model": model.shape, "accelerator": accelerator, "clipping": clipping}
    config |= {"micro_steps": MICRO_STEPS, "drive_s": median_of(drives)}
    for name, taken in steps.items():
        found = figures(taken, steps[STOCK], [dict.fromkeys((*PHASES, "training"), 0.0)] * rounds)
        walls = [
            [step["training"]["wall_s"] for step in one] for one in (taken, steps[ACCUMULATED])
        ]
        found["training_to_accumulation"] = _ratios(*walls)
        found["training_to_compute"] = _ratios(walls[0], [compute_s] * rounds) if compute_s else 0.0
        nbytes = [moved_bytes(step["training"]) for step in taken]
        found["training_bytes_per_parameter"] = harness.spread(nbytes).p50 / model.numel
        found["training_loss_difference"] = loss_difference(taken, steps[STOCK])
        yield name, found, config


def accelerator_and_rounds(options: argparse.Namespace) -> tuple[str, int]:
    rounds = options.rounds or ROUNDS["small" if options.small else "large"]
    return "sim" if options.emulated else "cpu", rounds


def beside(model: Sleeping, layers: int, width: int) -> Sleeping:
    """A model of layers of another size, with the same compute in all of them.

    Raises:
        ValueError: It has another number of parameters.
    """
    share = model.layers / layers
    other = replace(
        model,
        layers=layers,
        width=width,
        forward_s=share * model.forward_s,
        backward_s=share * model.backward_s,
    )
    if other.numel != model.numel:
        raise ValueError(
            f"--beside {layers} {width} has {other.numel} parameters, --size {model.layers} "
            f"{model.width} has {model.numel}. Make them equal: twice the width, a quarter of the "
            "layers"
        )
    return other


def layout(model: Sleeping) -> str:
    """Names a model by its layers."""
    return f"{model.layers} x {model.width}^2"


def models(
    idle: Sleeping,
    drive_s: Mapping[str, float],
    layer_ms: Sequence[float] | None,
    multiples: Sequence[float],
) -> dict[str, Sleeping]:
    """The models by name: of the stated compute, or of multiples of the drive's time."""
    if layer_ms is not None:
        forward_ms, backward_ms = layer_ms
        name = f"{forward_ms:g}+{backward_ms:g} ms"
        return {name: replace(idle, forward_s=forward_ms / 1e3, backward_s=backward_ms / 1e3)}
    forward_s, backward_s = (drive_s[phase] / idle.layers for phase in PHASES[:2])
    return {
        f"{m:g}x": replace(idle, forward_s=m * forward_s, backward_s=m * backward_s)
        for m in multiples
    }


def time_drive(transfers: Transfers) -> dict[str, float]:
    """Seconds that the drive needs now for what each phase moves."""
    moves = (MOVED | {EARLY_PHASE: MOVED_EARLY}).items()
    return {
        phase: harness.measure(functools.partial(transfers.run, read, written)).wall_s
        for phase, (read, written) in moves
    }


def median_of(drives: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The middle one of several times of each phase."""
    return {phase: harness.spread([one[phase] for one in drives]).p50 for phase in drives[0]}


def bounds_of(model: Sleeping, drive_s: Mapping[str, float]) -> dict[str, float]:
    """The bound of each phase, and of the whole step."""
    bounds = {phase: max(drive_s[phase], model.compute_s(phase)) for phase in PHASES}
    drive = sum(drive_s[phase] for phase in PHASES)
    whole = max(drive, sum(model.compute_s(phase) for phase in PHASES))
    return bounds | {"training": whole}


def least_of(model: Sleeping, drive_s: Mapping[str, float]) -> dict[str, float]:
    """The least time of a step of a turn, by contender, as its parts depend on each other.

    The optimizer begins behind backward, and the next forward pass comes to its last layer no
    sooner than the optimizer. The first of a turn has no optimizer before it, the last one's is
    waited for. Tiles that are stepped during backward share its time, the others are left.
    """
    compute = [model.compute_s(phase) for phase in PHASES[:2]]
    found = {}
    for contender, left in ((OURS, 1.0), (OURS_EARLY, 1 / LEFT_ONE_OF)):
        backward_s = left * drive_s["backward"] + (1 - left) * drive_s[EARLY_PHASE]
        left_s = left * drive_s["optimizer"]
        behind = DriveTime(
            first_forward_s=drive_s["forward"],
            backward_s=backward_s,
            last_backward_s=backward_s,
            optimizer_s=left_s,
            behind_s=drive_s["forward"] + left_s,
        )
        waited_for = replace(behind, goes_behind=False)
        turn_s = waited_for.step_s(*compute)
        turn_s += (IN_A_ROW - 1) * behind.step_s(*compute, last_layer_s=model.forward_s)
        found[contender] = turn_s / IN_A_ROW
    return found


def contenders_of(
    model: Sleeping, clipping: float, directory: Path, accelerator: str = "cpu"
) -> list[Trainee]:
    """The contenders, none of which has started."""
    return [
        trainee_of(
            name,
            contender,
            model,
            directory,
            tokens=TOKENS,
            clipping=clipping,
            accelerator=accelerator,
        )
        for name, contender in (CONTENDERS if clipping else CONTENDERS | EARLY).items()
    ]


def take_steps(
    runs: Sequence[Trainee], rounds: int, transfers: Transfers
) -> tuple[dict[str, list[dict[str, Any]]], list[dict[str, float]]]:
    """The steps of each contender, and the drive's times, of each round but the first ones.

    They start in rotating order; the drive is timed before them.
    """
    drives: list[dict[str, float]] = []
    taken = take_turns(runs, rounds, lambda: drives.append(time_drive(transfers)))
    return taken, drives[WARMUPS:]


def take_turns(
    runs: Sequence[Trainee], rounds: int, before_round: Callable[[], object] = lambda: None
) -> dict[str, list[dict[str, Any]]]:
    """The steps of each run, of each round but the first ones; they start in rotating order."""
    taken: dict[str, list[dict[str, Any]]] = {run.name: [] for run in runs}
    with side_by_side(runs):
        for index in range(WARMUPS + rounds):
            before_round()
            for one in harness.in_turn(runs, index):
                step = one.step(IN_A_ROW)
                if index >= WARMUPS:
                    taken[one.name].append(step)
    return taken


def figures(
    ours: Sequence[Mapping[str, Any]],
    stock: Sequence[Mapping[str, Any]],
    bounds: Sequence[Mapping[str, float]],
    least_s: Sequence[float] = (),
) -> dict[str, Any]:
    """Seconds of each phase, how often its bound that is, and the whole beside stock's.

    Args:
        ours: Steps, one of each round; so are the others.
        stock: Stock's.
        bounds: By phase.
        least_s: The least time of a step, if known.
    """
    found: dict[str, Any] = {}
    for part in (*PHASES, "training"):
        walls = [step[part]["wall_s"] for step in ours]
        part_bounds = [one[part] for one in bounds]
        found[f"{part}_s"] = harness.spread(walls)
        if min(part_bounds) > 0:
            found[f"{part}_to_bound"] = _ratios(walls, part_bounds)
    walls = [step["training"]["wall_s"] for step in ours]
    if least_s:
        found["training_to_least"] = _ratios(walls, least_s)
    found["training_to_stock"] = _ratios(walls, [step["training"]["wall_s"] for step in stock])
    return found


def _ratios(ours: Sequence[float], theirs: Sequence[float]) -> harness.Spread:
    return harness.spread([our / their for our, their in zip(ours, theirs, strict=True)])


def parser_of_model(question: str) -> argparse.ArgumentParser:
    """The arguments of a bench that trains a Sleeping model beside a drive."""
    parser = harness.parser(question)
    parser.add_argument(
        "--layer-ms",
        type=float,
        nargs=2,
        metavar=("FORWARD", "BACKWARD"),
        help="compute of a layer (default: as the bench says)",
    )
    parser.add_argument(
        "--size", type=int, nargs=2, metavar=("LAYERS", "WIDTH"), help="of the model"
    )
    parser.add_argument("--rounds", type=int, help="that count")
    parser.add_argument(
        "--emulated",
        action="store_true",
        help="compute is a kernel of the emulated device, and copies run on its streams",
    )
    parser.add_argument(
        "--drive-rate",
        type=float,
        nargs=2,
        metavar=("READ", "WRITE"),
        help="GB/s that the drive is held to, for all (default: as fast as it is)",
    )
    return parser


def arguments() -> argparse.Namespace:
    """The command line; layers compute for 0.3, 1 and 3 times the drive's time by default."""
    parser = parser_of_model(QUESTION)
    parser.add_argument(
        "--beside",
        type=int,
        nargs=2,
        metavar=("LAYERS", "WIDTH"),
        help="of a second model with as many parameters and equal compute; without stock",
    )
    parser.add_argument(
        "--one-pass", action="store_true", help="slices in the place of micro-steps, beside these"
    )
    parser.add_argument(
        "--clipping", type=float, nargs="+", metavar="NORM", help="0: none (default: 1 and 0)"
    )
    return parser.parse_args()


def main() -> None:
    options = arguments()
    with drive_rate(options.directory, options.drive_rate):
        rows = harness.collect(run(options))
    for part in (*PHASES, "training"):
        harness.report("overlap", f"{QUESTION}: {part}", table_rows(rows, part), None)
    harness.write("overlap", rows, options.out)


if __name__ == "__main__":
    main()
