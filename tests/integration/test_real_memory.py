"""Host memory that the kernel limits: huge pages of a group, groups below the root.

`make test-root` runs these.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.loop_devices import control_group
from tests.support.seccomp import DENY_POPULATE, on_x86_64
from tests.support.store_programs import start

pytestmark = pytest.mark.root

MEBIBYTE = 1 << 20
HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")
SURPLUS = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/surplus_hugepages")
TRIES = 10  # other tests, which take what there is, may be faster
ALLOCATED = """
from memascend import _core
core = _core.Allocator(huge_pages="auto", lock=False, register_device=False)
print("ready", flush=True)
input()
block = core.allocate(nbytes=4 << 20, component="pool")
memoryview(block)[:] = bytes(block.nbytes)
[line] = [line for line in open("/proc/self/status") if line.startswith("HugetlbPages:")]
print(line.split()[1])
"""


def surplus_pages() -> int:
    """Return the explicit huge pages that a process has and the kernel takes back after it."""
    return int(SURPLUS.read_text())


@on_x86_64
@pytest.mark.parametrize(("head", "kib"), [("", 4096), (DENY_POPULATE, 0)], ids=["asked", "before"])
def test_explicit_huge_pages_are_only_taken_where_they_can_be_asked_for(
    tmp_path: Path, head: str, kib: int
) -> None:
    before = int(HUGE_PAGES.read_text())
    try:
        for _ in range(TRIES):
            # It has started before the pages are there: others have but a moment to take them.
            with start(tmp_path, head + ALLOCATED) as process:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
                # Others may still have pages that were to go: these count first.
                wanted = before + surplus_pages() + 8
                HUGE_PAGES.write_text(str(wanted))
                spare = int(HUGE_PAGES.read_text()) >= wanted
                output, errors = process.communicate("\n", timeout=60)
            if not spare:
                pytest.skip("this kernel has no eight huge pages to spare")
            if output == f"{kib}\n":
                break
    finally:
        HUGE_PAGES.write_text(str(before))
    assert output == f"{kib}\n", errors


def test_what_a_control_group_does_not_leave_is_not_taken(tmp_path: Path) -> None:
    with control_group("memory") as group:
        (group / "memory.limit_in_bytes").write_text(str(256 * MEBIBYTE))
        join = f"Path({str(group / 'cgroup.procs')!r}).write_text(str(os.getpid()))\n"
        script = """
        from memascend import _core
        core = _core.Allocator(huge_pages="off", lock=False, register_device=False)
        try:
            core.allocate(nbytes=512 << 20, component="pool")
        except HostMemoryError as error:
            print(error.requested_bytes)
        """
        process = start(tmp_path, join + script.replace("\n        ", "\n"))
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (0, f"{512 << 20}\n"), errors
