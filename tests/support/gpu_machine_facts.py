"""What a machine with a GPU says of itself in the records of benchmarks and checks."""

from __future__ import annotations

MACHINE = {
    "versions": {"torch": "2.13.0", "driver": "570.1"},
    "gpu": "NVIDIA H200",
    "gpus": 1,
    "cpu": "EPYC",
    "cpus_usable": 16,
    "kernel": "6.18",
    "memory_bytes": 128 << 30,
    "filesystem": {"type": "ext4", "device": "/dev/nvme0n1"},
}
