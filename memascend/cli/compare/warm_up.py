"""The work of a comparison before its runs, once, in a process of its own.

It measures how much memory a process holds that has only imported the libraries (the baseline), and
has DeepSpeed compile its operators, which otherwise takes minutes inside the first run and counts
against it. Run as a module it is that process; `warm_up` starts it and listens.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from memascend.base.units import GIB
from memascend.cli.compare.run import child_environment, start
from memascend.deepspeed.seams.arm import check_fingerprints
from memascend.errors import UnsupportedDeepSpeedError
from memascend.system.files import open_anew
from memascend.system.memory import process_status

# Operators that a CPU or GPU run with NVMe offload loads, and the purpose of each.
OPERATORS = {
    "AsyncIOBuilder": "DeepSpeed's own I/O",
    "PinMemoryBuilder": "DeepSpeed's page-locking",
    "CPUAdamBuilder": "Adam on the CPU",
    "ShareMemCommBuilder": "communication between CPU ranks",
}
JOB_MEMORY_BYTES = 2 * GIB  # one compiler reading torch's headers

_PREFIX = "memascend-warm-up "


@dataclass(slots=True)
class WarmUp:
    """The outcome of the warm-up."""

    baseline_bytes: int = 0  # resident bytes of a process that has only imported; 0: not measured
    unavailable: dict[str, str] = field(default_factory=dict)  # operators that cannot be built: why
    refusal: str = ""  # why memascend refuses this DeepSpeed, empty when it does not
    problem: str = ""  # why the process did not get to its end, empty when it did


def warm_up(log: Path, on_news: Callable[[str], None]) -> WarmUp:
    """Run the warm-up; call `on_news` with the name of each step that takes time."""
    found = WarmUp()
    environment = child_environment({"MEMASCEND_DISABLE": "1"})
    environment.setdefault("MAX_JOBS", str(_compile_jobs()))
    command = [sys.executable, "-m", "memascend.cli.compare.warm_up"]
    with open(open_anew(log), "w", encoding="utf-8") as output:
        process = start(command, environment)
        assert process.stdout is not None
        for line in process.stdout:
            output.write(line)
            if line.startswith(_PREFIX):
                news = json.loads(line.removeprefix(_PREFIX))
                found.baseline_bytes = news.get("baseline_bytes", found.baseline_bytes)
                found.unavailable.update(news.get("unavailable", {}))
                found.refusal = news.get("refusal", found.refusal)
                on_news(news.get("text", ""))
    if process.wait() != 0:
        found.problem = f"exit status {process.returncode}"
    return found


def _compile_jobs() -> int:
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(os.cpu_count() or 1, memory_bytes // JOB_MEMORY_BYTES))


def _say(**news: object) -> None:
    print(_PREFIX + json.dumps(news), flush=True)


def _build_folder(name: str) -> str:
    """Return where torch compiles an operator; a killed process leaves its lock there."""
    from torch.utils import cpp_extension

    return str(cpp_extension._get_build_directory(name, verbose=False))


def _main() -> int:
    _say(text="importing torch and DeepSpeed")
    import deepspeed  # noqa: F401
    import torch  # noqa: F401
    from deepspeed.accelerator import get_accelerator

    if importlib.util.find_spec("transformers") is not None:
        import transformers.modeling_utils  # noqa: F401
    _say(baseline_bytes=process_status(os.getpid()).get("VmRSS", 0))
    try:
        check_fingerprints()
    except UnsupportedDeepSpeedError as error:
        _say(refusal=str(error))
    for name, purpose in OPERATORS.items():
        builder = get_accelerator().create_op_builder(name)
        if builder is None:
            continue
        _say(text=f"{builder.NAME} ({purpose}): DeepSpeed compiles it once, for up to minutes")
        lock = Path(_build_folder(builder.NAME), "lock")
        if lock.exists():
            _say(text=f"waiting for {lock}: if no other program compiles, remove that file")
        started_s = time.monotonic()
        try:
            builder.load(verbose=False)
        except Exception as error:  # any error of the build goes into the report
            _say(unavailable={name: str(error).strip() or type(error).__name__})
        else:
            _say(text=f"{builder.NAME} is ready after {time.monotonic() - started_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(_main())
