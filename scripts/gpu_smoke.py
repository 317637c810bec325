#!/usr/bin/env python3
"""Checks memascend on a machine with CUDA devices: what no emulation can show.

Every check runs twice, each time in a fresh process: as it is, and with something deliberately
broken, which must be noticed. A check passes if the first is well and the second is not. One that
needs something the machine lacks is "not here", with the reason. Checks that teach more for their
time come first. Finished checks leave a file each in --out; gpu_smoke.json and the page
gpu_smoke.txt are made of them, and --results is one file of everything.

Exit statuses: 75 more is to do (start it again); 0 every check passed that this machine can run, 1
one failed; 77 no CUDA device.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "benchmarks")]

import cases  # noqa: E402
import gpu_machine  # noqa: E402
from gpu_checks import Check, memory, modes, order, suite, training  # noqa: E402

CHECKS = {
    check.name: check
    for check in (*memory.CHECKS, *order.CHECKS, *suite.CHECKS, *training.CHECKS, *modes.CHECKS)
}
WHOLE, BROKEN = "whole", "broken"
OUT = "gpu-smoke-out"
PASSED, FAILED = "passed", "FAILED"


def case_of(check: Check, gpus: int) -> cases.Case:
    """A check as a case, judged by the devices there are."""
    lack = f"needs {check.gpus} devices, this machine has {gpus}" if gpus < check.gpus else ""
    return cases.Case(check.name, lack or check.needs(), (WHOLE, BROKEN), check.seconds)


def outcome(check: Check, record: Mapping[str, Any]) -> dict[str, Any]:
    """What became of a check: passed, failed or not here, why, and all figures."""
    found = {"check": check.name, "promise": check.promise, "control": check.control}
    if record["state"] == cases.NOT_HERE:
        return {**found, "result": cases.NOT_HERE, "why": [record["why"]]}
    if record["state"] == cases.FAILED:
        return {**found, "result": FAILED, "why": [record["why"]]}
    whole, broken = (record["answers"][variant] for variant in (WHOLE, BROKEN))
    problems = check.problems(whole, broken)
    return {
        **found,
        "result": FAILED if problems else PASSED,
        "why": problems,
        "noticed": check.verdict(broken),
        "figures": {WHOLE: whole, BROKEN: broken},
    }


def page(outcomes: Sequence[Mapping[str, Any]], machine: Mapping[str, Any] | None) -> str:
    """One page of text: a line for each check, what is wrong with it, and the machine."""
    lines = ["memascend on a GPU", gpu_machine.describe(machine) if machine else "nothing was run"]
    for one in outcomes:
        lines += ["", f"{one['result']:8} {one['check']}: {one['promise']}"]
        if one["result"] == PASSED:
            lines.append(
                f"         control: {one['control']}: noticed, {_short(one['noticed'][0])}"
            )
        lines += [f"         {_short(problem)}" for problem in one["why"]]
    counts = {
        result: sum(one["result"] == result for one in outcomes)
        for result in (PASSED, FAILED, cases.NOT_HERE)
    }
    lines += ["", ", ".join(f"{count} {result}" for result, count in counts.items())]
    return "\n".join(lines) + "\n"


def _short(text: str, length: int = 300) -> str:
    """The end of a text on one line: what a process printed last says why."""
    flat = " ".join(text.split())
    return flat if len(flat) <= length else f"... {flat[-length:]}"


def report(options: argparse.Namespace) -> bool:
    """Write the JSON and the page of the records there are; return False when a check failed."""
    out = options.out
    records = {name: cases.load(cases.Case(name), out) for name in CHECKS}
    known = {name: record for name, record in records.items() if record is not None}
    outcomes = [outcome(CHECKS[name], record) for name, record in known.items()]
    machine = next((record["machine"] for record in known.values()), None)
    out.mkdir(parents=True, exist_ok=True)
    whole = {"machine": machine, "checks": outcomes}
    (out / "gpu_smoke.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    text = page(outcomes, machine)
    (out / "gpu_smoke.txt").write_text(text, encoding="utf-8")
    cases.pack(options, text)
    print(text, end="")
    return all(one["result"] != FAILED for one in outcomes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the checks that are asked for, and gives the exit status."""
    options = cases.parser(__doc__ or "", out=OUT).parse_args(arguments)
    if options.child is not None:
        check = CHECKS[options.child]
        cases.answer(lambda: check.measure(options.nvme_path, options.variant == BROKEN))
        return cases.STATUS_OK
    cases.unpack(options)
    if options.render:
        return cases.status(is_all=True, is_well=report(options))
    machine = gpu_machine.look(options.nvme_path)
    wanted = cases.chosen(
        [case_of(check, machine.gpus) for check in CHECKS.values()], options.names, options.first
    )
    if options.list:
        cases.show(wanted, options.out)
        return cases.STATUS_OK
    if machine.gpus == 0:
        print(cases.NO_DEVICE, file=sys.stderr)
        return cases.STATUS_NO_DEVICE
    facts = gpu_machine.facts(options.nvme_path, machine)
    is_all = cases.run(wanted, Path(__file__), options, facts)
    return cases.status(is_all=is_all, is_well=report(options))


if __name__ == "__main__":
    sys.exit(main())
