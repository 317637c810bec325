"""`memascend doctor`: checks of this machine, with fixes, and one real write and read.

Every check is a function that returns a `Check`; none raises. Exit status: 0 without problems, 1
with at least one problem, 2 for a mistake in the command line.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import ctypes.util
import errno
import importlib.metadata
import json
import mmap
import os
import platform
import resource
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from memascend.base.interfaces import Registrar
from memascend.base.units import GIB, MIB, PAGE_BYTES, format_nbytes
from memascend.cli.arguments import folder
from memascend.cli.check import Check, print_findings
from memascend.cli.config_check import check_file, volumes_in
from memascend.cli.doctor_packages import (
    TOOLKIT_FIX,
    check_deepspeed,
    check_frameworks,
    check_torch,
    check_transformers,
)
from memascend.cli.plan_time import describe_rates, measured_rates
from memascend.config.environment import DISABLE_VARIABLE, is_disabled, malloc_settings
from memascend.config.installed import HOST_BUILDERS, is_able
from memascend.config.volumes import VolumeConfig
from memascend.errors import StoreError
from memascend.ledger.drives import NO_SMARTCTL, USED_PERCENT_HIGH, read_drives
from memascend.plan.drive_rates import DriveRates
from memascend.system.heap import examine_heap
from memascend.system.memory import group_limit
from memascend.system.mounts import (
    COPY_ON_WRITE_FIX,
    IN_MEMORY,
    PROC,
    SYSFS,
    filesystem_of,
    read_line,
    read_lines,
)

TRIAL_BYTES = MIB
CORE_FIX = "pip install --force-reinstall memascend, or make environment in a checkout"
FREE_BYTES_COMFORTABLE = 20 * GIB

_IO_URING_SETUP = 425  # the same number on every architecture that Linux has added it to


def doctor_command_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "doctor",
        help="check this machine and try one real write and read",
        description="Check this machine and try one real write and read.",
    )
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument(
        "--path",
        type=folder,
        help="folder on the drive to offload to (default: those of --config, else .)",
    )
    parser.add_argument("--config", type=Path, help="a DeepSpeed JSON to check as well")
    parser.set_defaults(run=doctor_command)


def doctor_command(args: argparse.Namespace) -> int:
    """Run every check, print them, and return the exit status."""
    checks = [Check("config", *check_file(args.config))] if args.config else []
    volumes = volumes_in(args.config) if args.config else ()
    if args.path or not volumes:
        volumes = (VolumeConfig(path=str(args.path or ".")),)
    checks += examine(volumes)
    is_healthy = all(check.state != "problem" for check in checks)
    if args.json:
        found = {"healthy": is_healthy, "checks": [asdict(check) for check in checks]}
        print(json.dumps(found, indent=2))
    else:
        print_findings(checks)
    return 0 if is_healthy else 1


def examine(volumes: Sequence[VolumeConfig]) -> list[Check]:
    """Run every check; the last ones write to each folder of the volumes."""
    checks = [
        _system(),
        check_torch(),
        check_deepspeed(),
        check_transformers(),
        check_frameworks(),
        _activation(),
        _io_uring(),
        _page_lock_limit(),
        _huge_pages(),
        _memory_limit(),
        _heap(),
        _compiler(),
        _libaio(),
        _device(),
    ]
    return checks + [check for volume in volumes for check in _examine_volume(volume)]


def _examine_volume(volume: VolumeConfig) -> list[Check]:
    if volume.raw:
        return [_raw_volume(volume)]
    path = Path(volume.path)
    if os.path.isdir(path):  # not one that may not be entered
        return [check(path) for check in (_free_space, _wear, _rates, _direct_io, _trial)]
    fix = f"mkdir -p {path}"
    if os.path.lexists(path) or str(path).startswith("/dev/"):
        fix = 'name a folder; a device needs "raw": true in memascend.volumes'
    return [Check("path", "problem", f"{path} is not a folder", fix)]


def _raw_volume(volume: VolumeConfig) -> Check:
    """Open a device as a run does, for this process alone, and read its header."""
    name = "raw volume"
    try:
        from memascend.volumes.device import formatted

        with formatted(volume.path, needed_bytes=volume.capacity or 0) as (device, _):
            return Check(name, "ok", f"{device.path}: {format_nbytes(device.size_bytes)}")
    except ImportError as error:
        return Check(name, "problem", f"the native core cannot be imported: {error}", CORE_FIX)
    except StoreError as error:
        found, _, fix = (error.strerror or str(error)).partition("\nfix: ")
        return Check(name, "problem", found, fix)


def _system() -> Check:
    if sys.platform != "linux":
        return Check("system", "problem", platform.platform(), "run it on Linux")
    if mmap.PAGESIZE != PAGE_BYTES:
        found = f"pages of {mmap.PAGESIZE} bytes, memascend is made for {PAGE_BYTES}"
        return Check("system", "problem", found, "a kernel with pages of 4 KiB")
    found = f"Linux {platform.release()} {platform.machine()}, {os.cpu_count()} cores"
    return Check("system", "ok", found)


def _activation() -> Check:
    """Check that `import torch` loads memascend, so that training scripts need not."""
    name = "activation"
    hooks = importlib.metadata.entry_points(group="torch.backends", name="memascend")
    if not hooks:
        fix = "pip install memascend (not just a folder on PYTHONPATH), or import memascend first"
        return Check(
            name, "problem", "memascend is not installed: torch finds no entry point of it", fix
        )
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "0":
        fix = "unset it, or import memascend in the training script"
        return Check(name, "problem", "TORCH_DEVICE_BACKEND_AUTOLOAD=0 switches it off", fix)
    if is_disabled():
        value = os.environ[DISABLE_VARIABLE]
        return Check(
            name, "note", f"{DISABLE_VARIABLE}={value}: DeepSpeed runs untouched", "unset it"
        )
    return Check(name, "ok", "torch loads memascend by itself")


def _io_uring() -> Check:
    """Create a ring for a moment: only an attempt shows if the system's policies allow it."""
    libc = ctypes.CDLL(None, use_errno=True)
    parameters = ctypes.create_string_buffer(120)  # struct io_uring_params
    descriptor = libc.syscall(_IO_URING_SETUP, 4, parameters)
    if descriptor >= 0:
        os.close(descriptor)
        return Check("io_uring", "ok", "available")
    reason = os.strerror(ctypes.get_errno())
    fix = "in a container: --security-opt seccomp=unconfined"
    value = read_line(PROC / "sys/kernel/io_uring_disabled")
    if value not in ("", "0"):
        reason += f" (kernel.io_uring_disabled={value})"
        fix = "sysctl kernel.io_uring_disabled=0"
    return Check("io_uring", "note", f"refused: {reason}; libaio or threads are used instead", fix)


def _page_lock_limit() -> Check:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return Check("page lock", "ok", "unlimited")
    found = f"at most {format_nbytes(limit)} per process"
    if _has_ipc_lock():
        return Check("page lock", "ok", f"{found}, but CAP_IPC_LOCK lifts it")
    fix = "ulimit -l unlimited; in a container: --ulimit memlock=-1"
    return Check("page lock", "note", f"{found}; beyond it memory is used unlocked", fix)


def _has_ipc_lock() -> bool:
    cap_ipc_lock = 14
    for line in read_lines(PROC / "self/status"):
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> cap_ipc_lock & 1)
    return False


def _huge_pages() -> Check:
    setting = SYSFS / "kernel/mm/transparent_hugepage/enabled"
    transparent = read_line(setting).partition("[")[2].partition("]")[0] or "not supported"
    counts = (line.split() for line in read_lines(PROC / "meminfo"))
    explicit = next((words[1] for words in counts if words[0] == "HugePages_Free:"), "0")
    found = f"transparent: {transparent}, explicit and free: {explicit}"
    if transparent in ("never", "not supported") and explicit == "0":
        fix = f"echo madvise > {setting}"
        return Check("huge pages", "note", f"{found}; I/O costs more CPU without", fix)
    return Check("huge pages", "ok", found)


def _memory_limit() -> Check:
    total_bytes, limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), group_limit()
    if limit is None or limit >= total_bytes:
        return Check("host memory", "ok", f"{format_nbytes(total_bytes)}, no lower cgroup limit")
    found = f"{format_nbytes(limit)} by cgroup, {format_nbytes(total_bytes)} in the machine"
    return Check("host memory", "ok", found)


def _heap() -> Check:
    settings = malloc_settings()
    heap = examine_heap(settings)
    if not heap.why_left:
        return Check("heap", "ok", f"{heap.allocator}: freed memory goes back to the system")
    fix = "run with glibc's malloc (LD_PRELOAD), or see to it that this one gives memory back"
    if settings and heap.is_glibc:
        fix = f"unset {' and '.join(settings)}, unless it gives back more than memascend's own"
    return Check("heap", "note", heap.describe(), fix)


def _compiler() -> Check:
    """Look for the build requirements of DeepSpeed's operators, which our wheel does not ship."""
    lacking = []
    if not shutil.which(os.environ.get("CXX", "c++")):
        lacking.append("a C++ compiler")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        lacking.append("Python's headers")
    fixes = ["apt-get install g++ python3-dev"] if lacking else []
    if not is_able(HOST_BUILDERS) and _lacks_toolkit():
        lacking.append("the CUDA toolkit")
        fixes.append(TOOLKIT_FIX)
    if not lacking:
        return Check("compiler", "ok", "DeepSpeed can build its operators, once, in some minutes")
    found = f"{' and '.join(lacking)} missing: a run fails where DeepSpeed has to build operators"
    return Check("compiler", "note", found, "; ".join(fixes))


def _lacks_toolkit() -> bool:
    """Return whether torch is one for CUDA and finds no toolkit, as it does for DeepSpeed."""
    try:
        import torch
        from torch.utils import cpp_extension
    except Exception:  # another check says so
        return False
    return torch.version.cuda is not None and cpp_extension.CUDA_HOME is None


def _libaio() -> Check:
    library = ctypes.util.find_library("aio")
    headers = [Path("/usr/include/libaio.h"), Path(sysconfig.get_path("include"), "libaio.h")]
    if library and any(header.exists() for header in headers) and shutil.which("g++"):
        return Check("libaio", "ok", f"{library}; DeepSpeed's own I/O can be built to compare with")
    fix = "apt-get install libaio-dev g++"
    return Check("libaio", "note", "missing; only stock DeepSpeed needs it, to compare with", fix)


def _device() -> Check:
    """Register some memory with the device, as an arena does: else copies to the device block."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed prints while it is imported
            from deepspeed.accelerator import get_accelerator

            from memascend.deepspeed.attach.device import device_of

            accelerator = get_accelerator()
            device = device_of(accelerator)
            if not device.registers:
                return _host_as_device(accelerator.device_name())
            return _registration(accelerator.current_device_name(), device.registrar)
    except Exception as error:
        return Check("device", "note", f"cannot be asked: {error}", "see the checks above")


def _host_as_device(device_name: str) -> Check:
    if os.environ.get("DS_ACCELERATOR") == device_name:
        return Check("device", "ok", f"{device_name}: memory of the host")
    found = f"{device_name}: torch {importlib.metadata.version('torch')} finds no GPU here"
    fix = "with a GPU: its driver, and a build of torch for it (python -m torch.utils.collect_env)"
    return Check("device", "note", found, fix)


def _registration(device_name: str, registrar: Registrar | None) -> Check:
    from memascend import _core

    core = _core.Allocator(huge_pages="off", lock=False, register_device=True, registrar=registrar)
    block = core.allocate(nbytes=TRIAL_BYTES, component="trial")
    if core.stats().registered_bytes >= block.nbytes:
        return Check("device", "ok", f"{device_name}: host memory can be registered with it")
    fix = 'lift the cause, or "allocator": {"enabled": false} takes the pinned memory of torch'
    return Check("device", "note", f"{device_name}: {'; '.join(core.notes())}", fix)


def _free_space(path: Path) -> Check:
    free = shutil.disk_usage(path).free
    kind = filesystem_of(path)
    found = f"{format_nbytes(free)} free on {path.resolve()} ({kind})"
    if kind in IN_MEMORY:
        return Check("disk", "problem", f"{found}: this is memory", "choose a folder on an SSD")
    largest = _largest_file(path)
    if largest < free:
        found += (
            f", but a file of it has at most {format_nbytes(largest)}, and a volume is one file"
        )
        return Check("disk", "note", found, "name several directories on it in volumes, to use all")
    if free < FREE_BYTES_COMFORTABLE:
        fix = (
            "plan for 14 bytes per parameter in bf16: weights, master weights, Adam's states, "
            "gradients; for 26 with steps during backward"
        )
        return Check("disk", "note", found, fix)
    return Check("disk", "ok", found)


def _largest_file(path: Path) -> int:
    """Return the largest file size in bytes of a file system; sys.maxsize if it is unknown."""
    try:
        from memascend import _core

        with tempfile.TemporaryFile(dir=path, prefix="memascend-doctor-") as file:
            return _core.largest_file_bytes(descriptor=file.fileno())
    except (ImportError, OSError):
        return sys.maxsize  # the trial reports the reason


def _wear(path: Path) -> Check:
    """Read the SMART data of the drives under the folder."""
    reading = read_drives([path])
    found = [drive.describe() for drive in reading.drives]
    if reading.silent:
        found.append(f"no SMART data of {reading.why_silent()}")
    text = "; ".join(found)
    if any((drive.used_percent or 0) >= USED_PERCENT_HIGH for drive in reading.drives):
        return Check("wear", "note", text, "plan for a new drive, or offload to another one")
    if not reading.silent:
        return Check("wear", "ok", text)
    fix = "run as root on the machine itself, or state memascend.wear.endurance"
    if NO_SMARTCTL in reading.silent.values():
        fix = "apt-get install smartmontools, or state memascend.wear.endurance"
    return Check("wear", "note", text, fix)


def _rates(path: Path) -> Check:
    """Tell the rates that `memascend plan` counts with for the drive under the folder."""
    measured = measured_rates([str(path)])
    if measured is not None:
        return Check("speed", "ok", f"{describe_rates(measured.rates)}, {measured.source}")
    found = (
        f"not measured: memascend plan assumes {describe_rates(DriveRates())}, those of a modest "
        "consumer drive whose write cache is full"
    )
    return Check("speed", "note", found, f"memascend volume bench --sustained {path}")


def _direct_io(path: Path) -> Check:
    """Write one page with direct I/O, as every transfer does."""
    name = "direct I/O"
    page = mmap.mmap(-1, mmap.PAGESIZE)
    try:
        with tempfile.TemporaryFile(dir=path, prefix="memascend-doctor-") as file:
            # Reopens the same file, also if it was renamed meanwhile.
            again = f"/proc/self/fd/{file.fileno()}"
            descriptor = os.open(again, os.O_RDWR | os.O_DIRECT)
            try:
                os.write(descriptor, page)
                smallest = _smallest_transfer(descriptor, page)
            finally:
                os.close(descriptor)
    except OSError as error:
        local = "choose a folder on a local drive: ext4, xfs; not tmpfs, overlayfs, a network share"
        fix = "choose a folder that you may write" if error.errno == errno.EACCES else local
        return Check(name, "problem", f"O_DIRECT on {path.resolve()}: {error.strerror}", fix)
    return Check(name, "ok", f"smallest transfer {smallest} bytes")


def _smallest_transfer(descriptor: int, page: mmap.mmap) -> int:
    for nbytes in (512, 1024, 2048):
        with contextlib.suppress(OSError), memoryview(page)[:nbytes] as part:
            if os.pwrite(descriptor, part, 0) == nbytes:
                return nbytes
    return mmap.PAGESIZE


def _trial(path: Path) -> Check:
    """Write, read and compare with the engine that a training run would choose."""
    name = "trial"
    try:
        from memascend import _core
    except ImportError as error:
        return Check(name, "problem", f"the native core cannot be imported: {error}", CORE_FIX)
    with (
        mmap.mmap(-1, TRIAL_BYTES) as source,
        mmap.mmap(-1, TRIAL_BYTES) as target,
        mmap.mmap(-1, TRIAL_BYTES) as bounce,
    ):
        source.write(os.urandom(TRIAL_BYTES))
        try:
            opened = _core.Store(
                volumes=[str(path.resolve())],
                bounce_address=_address(bounce),
                bounce_nbytes=TRIAL_BYTES,
                bounce_hold=None,
            )
            with contextlib.closing(opened) as store:
                for transfer, memory in ((store.write, source), (store.read, target)):
                    transfer(key="trial", address=_address(memory), nbytes=TRIAL_BYTES).wait()
                engine = f"{store.engine_name} ({store.engine_reason})"
                copies_on_write = store.volume_stats()[0].copies_on_write
        except OSError as error:
            return Check(name, "problem", str(error), "see the checks above, or another --path")
        if source[:] != target[:]:
            found = f"{engine}: the data read differs from the data written"
            return Check(name, "problem", found, "do not train on this drive")
    found = f"{format_nbytes(TRIAL_BYTES)} written, read and compared by {engine}"
    if copies_on_write:
        found += "; the file system is copy-on-write: slower, and may run full in a step"
        return Check(name, "note", found, COPY_ON_WRITE_FIX)
    return Check(name, "ok", found)


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
