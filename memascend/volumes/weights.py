"""The weights of several volumes: stated by the user, or measured once and cached.

A measurement is about a second of mixed reads and writes on all volumes at the same time. Its
result is kept in a file in the user's cache folder, keyed by the identity and size of the drives,
the kernel, and the size and number of requests. The weights only determine where bytes are stored:
results of training do not depend on them, and ranks need not agree.
"""

from __future__ import annotations

import contextlib
import json
import logging
import platform
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from memascend import _core
from memascend.base.progress import byte_progress
from memascend.base.units import MIB
from memascend.config.environment import local_rank
from memascend.system.locks import release_lock_file, take_lock_file
from memascend.volumes.kept import identity, read_kept, write_kept
from memascend.volumes.speed import Bench, Load

log = logging.getLogger(__name__)

CACHE_FILE = "volume-weights.json"
#: Maximum time to write the span, and time of each measurement. The median of the measurements
#: counts, since another program may use a drive for a moment.
PROBE_SECONDS = 0.2
PROBE_COUNT = 3
PROBE_SPAN_BYTES = 256 * MIB
#: Drives closer than this count as equal: a short measurement does not resolve less.
ALIKE_RATIO = 1.25
#: Maximum time that a rank waits for another rank's measurement.
LOCK_SECONDS = 20.0


def measured_weights(
    volumes: Sequence[_core.VolumeOptions], *, load: Load, cache: Path
) -> list[float]:
    """Return the weights of several volumes, from the cache or by measuring now; log them.

    If the measurement fails, all volumes get the same weight, with a warning; opening the store
    then raises the error.
    """
    identities = [identity(volume.path) for volume in volumes]
    if len(set(identities)) == 1:
        log.info("volumes: equal weights, since all are on one drive (%s)", identities[0])
        return [1.0] * len(volumes)
    setting = f"{load.engine}, {load.chunk_bytes} x {load.queue_depth}"
    key = json.dumps([*identities, f"Linux {platform.release()}, {setting}"])
    with _locked(cache):
        known = read_kept(cache / CACHE_FILE)
        weights = known.get(key, [])
        if len(weights) == len(volumes):
            log.info("volumes: weights %s, measured before, in %s", _text(volumes, weights), cache)
            return weights
        try:
            with (
                byte_progress("measuring the volumes", None, leads=local_rank() == 0) as advance,
                Bench(volumes, load, advance) as bench,
            ):
                rounds = [bench.run("mixed", PROBE_SECONDS) for _ in range(PROBE_COUNT)]
        except (OSError, ValueError) as error:
            log.warning("volumes: not measured, so all get equal weights: %s", error)
            return [1.0] * len(volumes)
        rates = [statistics.median(of_volume) for of_volume in zip(*rounds, strict=True)]
        weights = weights_of(rates)
        log.info(
            "volumes: weights %s, measured now: %s mixed reads and writes, all at the same time",
            _text(volumes, weights),
            ", ".join(f"{rate / 1e9:.2f} GB/s" for rate in rates),
        )
        write_kept(cache / CACHE_FILE, known | {key: weights})
    return weights


def weights_of(rates: Sequence[float]) -> list[float]:
    """Return weights for bytes per second: 1 for the slowest, and the same for similar drives."""
    slowest = min(rates)
    if slowest <= 0:
        return [1.0] * len(rates)
    if max(rates) < slowest * ALIKE_RATIO:
        return [1.0] * len(rates)
    return [min(1000.0, round(rate / slowest, 2)) for rate in rates]


def _text(volumes: Sequence[_core.VolumeOptions], weights: Sequence[float]) -> str:
    return ", ".join(
        f"{volume.path}={weight:g}" for volume, weight in zip(volumes, weights, strict=True)
    )


@contextlib.contextmanager
def _locked(cache: Path) -> Iterator[None]:
    """Let one rank measure at a time, so that the others find its result. Best effort."""
    path = cache / f"{CACHE_FILE}.lock"
    descriptor = None
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = take_lock_file(path, LOCK_SECONDS)
    except OSError as error:
        log.debug("volumes: no lock in %s: %s", cache, error)
    try:
        yield
    finally:
        if descriptor is not None:
            release_lock_file(descriptor, path)
