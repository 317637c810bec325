"""A device is discarded in parts, so that somebody can look on; one that cannot is told as such."""

from __future__ import annotations

import struct

import pytest

from memascend.volumes import device as module
from memascend.volumes.device import DISCARD_BYTES, Device


@pytest.mark.parametrize("failing", [None, 0, 1])
def test_all_of_a_device_is_discarded_in_parts(
    monkeypatch: pytest.MonkeyPatch, failing: int | None
) -> None:
    parts: list[tuple[int, int]] = []
    told: list[int] = []

    def ioctl(descriptor: int, request: int, argument: bytes) -> None:
        if len(parts) == failing:
            raise OSError(95, "Operation not supported")
        parts.append(struct.unpack("=QQ", argument))

    monkeypatch.setattr(module.fcntl, "ioctl", ioctl)
    device = Device("/dev/x", -1, size_bytes=2 * DISCARD_BYTES + 512)
    assert device.discard(told.append) == (failing is None)
    whole = [(0, DISCARD_BYTES), (DISCARD_BYTES, DISCARD_BYTES), (2 * DISCARD_BYTES, 512)]
    assert parts == whole[:failing]
    assert told == [nbytes for _, nbytes in parts]
