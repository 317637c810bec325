"""The GPU benches' stand-ins: a machine as its records have it, and a model a CPU can train."""

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
#: Numbers of a model of which a CPU trains some steps in seconds.
SMALL = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 4096,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
