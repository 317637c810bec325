"""Ports for groups of ranks, which bind them seconds after they were chosen."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

#: Whoever asks the kernel for any port gets one above these.
PORTS = range(10_000, 32_768)


def free_port() -> int:
    """Return a port that nobody listens on, and that nobody is given by chance meanwhile."""
    chance = random.SystemRandom()  # several test processes must not choose alike
    while True:
        port = chance.choice(PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
