"""A short measurement of the drive for `memascend plan --path`; the last one is used again.

It needs the native core. Where that, or the drive, cannot be used, the plan assumes its rates.
"""

from __future__ import annotations

import sys
from pathlib import Path

from memascend.base.units import MIB
from memascend.config.environment import cache_directory
from memascend.errors import MemAscendError
from memascend.system.mounts import IN_MEMORY, filesystem_of
from memascend.volumes.kept import SHORT_RATES_FILE, KeptRates, keep_rates, kept_rates

#: Seconds of reads, of writes and of both, after the span was written once.
SECONDS = 0.7
SPAN_BYTES = 512 * MIB
_GB = 10**9


def short_rates(path: Path) -> KeptRates | None:
    """Return the rates of the drive below a folder: those kept, else measured now.

    None if the folder is missing or in memory, or the measurement fails, which is printed.
    """
    cache = cache_directory()
    found = kept_rates([str(path)], cache=cache, name=SHORT_RATES_FILE)
    if found is not None or not path.is_dir() or filesystem_of(path) in IN_MEMORY:
        return found
    print(
        f"memascend: measuring the drive of {path} for some seconds, once; "
        "--drive-read and --drive-write state its rates instead",
        file=sys.stderr,
    )
    try:
        found = measure(path)
    except (MemAscendError, OSError, ValueError, ImportError) as error:
        print(f"memascend: the drive was not measured: {error}", file=sys.stderr)
        return None
    keep_rates(str(path), found, cache=cache, name=SHORT_RATES_FILE)
    return found


def measure(path: Path) -> KeptRates:
    """Measure the drive of a folder for some seconds, with the load of training.

    Raises:
        OSError, ValueError, MemAscendError: The drive cannot be used.
        ImportError: Without the native core.
    """
    from memascend.cli.volume.bench import opened_volumes
    from memascend.config.block import DirectNvmeConfig
    from memascend.volumes.speed import Bench, Load

    defaults = DirectNvmeConfig()
    load = Load(
        defaults.chunk_bytes,
        defaults.queue_depth,
        span_bytes=SPAN_BYTES,
        fill_seconds=2 * SECONDS,
    )
    with opened_volumes([path]) as volumes, Bench(volumes, load) as bench:
        [read], [write], [mixed] = (bench.run(mode, SECONDS) for mode in ("read", "write", "mixed"))
    return KeptRates(read / _GB, write / _GB, mixed / _GB)
