"""Runs all benchmarks one after the other, or those named; `make bench` is this file."""

from __future__ import annotations

import bench_adam
import bench_allocator
import bench_lanes
import bench_nvme
import bench_overflow
import bench_verify
import harness

BENCHES = {
    "overflow": bench_overflow,
    "adam": bench_adam,
    "allocator": bench_allocator,
    "nvme": bench_nvme,
    "verify": bench_verify,
    "lanes": bench_lanes,
}


def main(arguments: list[str] | None = None) -> None:
    parser = harness.parser(__doc__ or "")
    parser.add_argument("--only", choices=sorted(BENCHES), action="append", help="may be repeated")
    options = parser.parse_args(arguments)
    for name, bench in BENCHES.items():
        if options.only is None or name in options.only:
            bench.run_and_report(options)


if __name__ == "__main__":
    main()
