"""Names of the streams between the drive and the host, by which drive bytes are counted."""

from __future__ import annotations

PARAMETERS, GRADIENTS = "parameters", "gradients"
MASTER, STATE = "master weights", "optimizer state"
