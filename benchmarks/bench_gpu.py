"""What does a training step take on a GPU: host and device memory, tokens per second, waiting?

Random models in the shapes of public ones, at two sizes of a step and two divisions of it, and with
one long sequence whose checkpoints stay, go to host memory or to the drive, trained by stock and by
memascend: one process after the other, as two of them would share the device. Ratios of times are
from cases in which they take turns (`gpu_turns.py`).
Which cases run is chosen by the machine: its drive, memory and device, and the things that stock
and transformers need. The first lines name, for each model, how many cases fit; --list says why one
does not. What the device waits for is found in a profiler's trace of one more step, whose own time
does not count.

Every row is a file in --out; the table is made of those files, here or on any other machine.
Exit statuses: 75 more is to do: start it again; 0 all is done, 1 a run failed; 77 no CUDA device.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import cases
import device_trace
import gpu_lacks
import gpu_machine
import gpu_turns
import harness
from gpu_machine import Machine
from gpu_runs import (
    MODELS,
    RUNS,
    STEP_TOKENS,
    Run,
    drive_bytes,
    seconds,
    trainee_of,
    why_not,
)
from gpu_turns import TURNS, Turns

from memascend.base.units import format_nbytes
from memascend.system.memory import memory_available

BEGIN = "<!-- table of GPU runs: written by benchmarks/bench_gpu.py -->"
END = "<!-- end of table of GPU runs -->"
WARMUPS, STEPS = 2, 3
#: No more steps begin after so long; the trace is still made.
STEPS_S = 300.0
OUT = "gpu-bench-out"


# -- one run -------------------------------------------------------------------------------------


@contextmanager
def least_available(interval_s: float = 0.05) -> Iterator[list[int]]:
    """Watches the machine's free memory: yields a list whose only number is the least so far.

    Page-locked memory of a driver is in no process's resident memory, but it is missing here.
    """
    least = [memory_available()]
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(interval_s):
            least[0] = min(least[0], memory_available())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield least
    finally:
        ended.set()
        thread.join()


def measure(
    run: Run, machine: Machine, folder: Path, *, accelerator: str = "cuda"
) -> dict[str, Any]:
    """Trains, and gives the figures of a row; or why there are none."""
    started_s = time.monotonic()
    available = memory_available()
    steps: list[dict[str, Any]] = []
    trace = folder / "trace.json"
    trainee = trainee_of(run, machine, folder, accelerator=accelerator)
    with least_available() as least:
        try:
            with trainee:
                while len(steps) < WARMUPS + STEPS:
                    if len(steps) > WARMUPS and time.monotonic() - started_s > STEPS_S:
                        break
                    steps.append(trainee.step())
                trainee.ask(f"trace {trace.absolute()}", "step")
        except RuntimeError as error:
            if "OutOfMemoryError" not in str(error) and "out of memory" not in str(error):
                raise
            return {"problem": "out of memory", "text": str(error)}
    begun = [event["peak_bytes"] for name, event in trainee.events.items() if name != "baseline"]
    figures = figures_of(run, steps, world=machine.gpus)
    figures["rss_bytes"] = max(begun + [step["peak_bytes"] for step in steps])
    figures["taken_bytes"] = available - least[0]
    if accelerator != "cpu":
        figures["trace"] = trace_of(trace)
    return figures


def trace_of(path: Path) -> dict[str, Any]:
    """Return the figures of a trace; the reason as `lacks` if the profiler sees no device here."""
    try:
        return device_trace.read(path)
    except device_trace.NoKernels as error:
        return {cases.LACKS: str(error)}


def figures_of(run: Run, steps: Sequence[Mapping[str, Any]], *, world: int) -> dict[str, Any]:
    """The figures of a run's steps but the first ones."""
    counted = steps[WARMUPS:]
    seconds = harness.spread([step["training"]["wall_s"] for step in counted])
    moved = [
        sum(step["training"][way] for way in ("read_bytes", "written_bytes")) for step in counted
    ]
    device = [step["on_device"] for step in steps if step["on_device"] is not None]
    return {
        "step_s": [seconds.p20, seconds.p50, seconds.p80],
        "optimizer_s": harness.spread([step["optimizer"]["wall_s"] for step in counted]).p50,
        "tokens_per_s": world * STEP_TOKENS[run.tokens] / seconds.p50,
        "drive_bytes": harness.spread(moved).p50,
        "device_bytes": max((one["allocated_bytes"] for one in device), default=None),
        "device_reserved_bytes": max((one["reserved_bytes"] for one in device), default=None),
        "steps": len(counted),
        "losses": [step["loss"] for step in steps],
    }


# -- the table -----------------------------------------------------------------------------------

HEADER = (
    "| model | tokens | divided | contender | peak RSS | taken of the host | device peak "
    "| tokens/s | step, s | device waits | for |\n" + "|---" * 11 + "|"
)


def table(records: Mapping[str, Mapping[str, Any]]) -> str:
    """All finished cases as Markdown, GB of 10^9 bytes; the machines above them.

    Args:
        records: By the name of the case.
    """
    machines = dict.fromkeys(gpu_machine.describe(record["machine"]) for record in records.values())
    rows = [_row(run, records[run.name]) for run in RUNS if run.name in records]
    alone = ["", HEADER, *rows] if rows else []
    return "\n".join([*machines, *alone]) + gpu_turns.table(records)


def _row(run: Run, record: Mapping[str, Any]) -> str:
    start = [run.model, run.tokens, f"x{run.accumulation}", run.contender]
    if record["state"] != cases.DONE:
        return _cells([*start, f"{record['state']}: {record['why'].splitlines()[0]}", *[""] * 6])
    figures = record["answers"][""]
    if "problem" in figures:
        return _cells([*start, figures["problem"], *[""] * 6])
    p20, p50, p80 = figures["step_s"]
    return _cells(
        [
            *start,
            *(
                f"{figures[name] / 1e9:.1f}"
                for name in ("rss_bytes", "taken_bytes", "device_bytes")
            ),
            f"{figures['tokens_per_s']:.0f}",
            f"{p50:.2f} ({p20:.2f} - {p80:.2f})",
            *_waits(figures["trace"]),
        ]
    )


def _waits(trace: Mapping[str, Any]) -> tuple[str, str]:
    if cases.LACKS in trace:
        return cases.NOT_HERE, trace[cases.LACKS]
    causes = [f"{cause} {share:.0%}" for cause, share in trace["waits"].items() if share >= 0.01]
    return f"{trace['waiting_share']:.0%}", ", ".join(causes)


def _cells(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def written_into(document: str, text: str) -> str:
    """A document with the table between its two marks exchanged.

    Raises:
        ValueError: It does not have the marks.
    """
    if document.count(BEGIN) != 1 or document.count(END) != 1:
        raise ValueError(f"the document has not both of {BEGIN!r} and {END!r}, once")
    head, rest = document.split(BEGIN)
    return f"{head}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}"


def report(options: Any) -> bool:
    """Writes table.md, and the table into a document if asked; False when a run failed."""
    every = [*map(case_of, RUNS), *map(case_of_turns, TURNS)]
    found = {case.name: cases.load(case, options.out) for case in every}
    records = {name: record for name, record in found.items() if record is not None}
    text = table(records)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "table.md").write_text(text + "\n", encoding="utf-8")
    cases.pack(options, text)
    print(text)
    if options.document is not None:
        document = options.document.read_text(encoding="utf-8")
        options.document.write_text(written_into(document, text), encoding="utf-8")
    return all(record["state"] != cases.FAILED for record in records.values())


def case_of(run: Run, machine: Machine | None = None) -> cases.Case:
    """A run as a case, judged by what a machine has."""
    if machine is None:
        return cases.Case(run.name)
    lack = why_not(run, machine) or lack_of(run)
    return cases.Case(run.name, lack, seconds=seconds(run, WARMUPS + STEPS + 1))


def case_of_turns(
    turns: Turns, machine: Machine | None = None, rounds: int = gpu_turns.ROUNDS
) -> cases.Case:
    """Contenders that take turns as a case, judged by what a machine has."""
    if machine is None:
        return cases.Case(turns.name)
    runs, lack = gpu_turns.able(turns, machine, lack_of)
    steps = gpu_turns.WARMUPS + rounds
    return cases.Case(turns.name, lack, seconds=sum(seconds(run, steps) for run in runs))


def lack_of(run: Run) -> str:
    """Return what a run needs besides room and this machine lacks, "" if it has all."""
    if reason := gpu_lacks.training():
        return reason
    if run.is_stock and (reason := gpu_lacks.async_io()):
        return reason
    return gpu_lacks.checkpoint_offload() if run.offloads_checkpoints else ""


def overview(wanted: Sequence[cases.Case]) -> Iterator[str]:
    """Yield a line for each model: how many of its cases fit, on how much of the drive; or why not.

    Args:
        wanted: Cases that were asked for.
    """
    runs = {run.name: run for run in RUNS}
    for model in MODELS:
        alone = [case for case in wanted if case.name in runs]
        of_model = [case for case in alone if runs[case.name].model == model]
        fitting = [case for case in of_model if not case.why_not]
        if fitting:
            most = max(drive_bytes(runs[case.name]) for case in fitting)
            yield (
                f"{model}: {len(fitting)} of {len(of_model)} cases fit, each with at most "
                f"{format_nbytes(most)} on the drive"
            )
        elif of_model:
            yield f"{model}: none of {len(of_model)} cases fits: {of_model[0].why_not}"


def measured(name: str, machine: Machine, folder: Path, rounds: int) -> dict[str, Any]:
    """Measure the case of this name."""
    for turns in TURNS:
        if turns.name == name:
            runs, _ = gpu_turns.able(turns, machine, lack_of)
            return gpu_turns.measure(runs, machine, folder, rounds=rounds)
    (run,) = (run for run in RUNS if run.name == name)
    return measure(run, machine, folder)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = cases.parser(__doc__ or "", out=OUT)
    parser.add_argument("--gpus", type=int, help="ranks (default: 1)", default=1)
    parser.add_argument(
        "--rounds",
        type=int,
        default=gpu_turns.ROUNDS,
        help=f"rounds that count of a case in turns (default: {gpu_turns.ROUNDS})",
    )
    parser.add_argument("--document", type=Path, help="put the table there, between its marks")
    options = parser.parse_args(arguments)
    if options.child is None:
        cases.unpack(options)
    if options.render:
        return cases.status(is_all=True, is_well=report(options))
    machine = gpu_machine.look(options.nvme_path, gpus=options.gpus)
    if options.child is not None:
        child = partial(measured, options.child, machine, options.nvme_path, options.rounds)
        cases.answer(child)
        return cases.STATUS_OK
    every = [case_of(run, machine) for run in RUNS]
    every += [case_of_turns(turns, machine, options.rounds) for turns in TURNS]
    wanted = cases.chosen(every, options.names, options.first)
    if options.list:
        cases.show(wanted, options.out)
        return cases.STATUS_OK
    if machine.gpus == 0:
        print(cases.NO_DEVICE, file=sys.stderr)
        return cases.STATUS_NO_DEVICE
    print(*overview(wanted), sep="\n", flush=True)
    facts = gpu_machine.facts(options.nvme_path, machine)
    passed_on = ["--gpus", str(machine.gpus), "--rounds", str(options.rounds)]
    is_all = cases.run(wanted, Path(__file__), options, facts, child_arguments=passed_on)
    is_well = report(options)
    return cases.status(is_all=is_all, is_well=is_well)


if __name__ == "__main__":
    sys.exit(main())
