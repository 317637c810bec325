"""The header of raw volumes: round trip, and that nothing an attacker writes gets through."""

from __future__ import annotations

import struct
import uuid
import zlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from memascend.volumes.header import (
    DEVICE_BYTES_MIN,
    HEADER_BYTES,
    UID_MAX,
    Header,
    HeaderError,
    new_header,
    parse,
)

DEVICE_BYTES = 1 << 40

headers = st.builds(
    Header,
    uuid=st.uuids().filter(lambda value: value.int != 0),
    size_bytes=st.integers(DEVICE_BYTES_MIN // 4096, DEVICE_BYTES // 4096).map(lambda n: n * 4096),
    owner_uid=st.integers(0, UID_MAX),
)
HEADER = Header(uuid=uuid.UUID(int=7), size_bytes=1 << 30, owner_uid=1000)


def forged(**changes: object) -> bytes:
    """A block with wrong fields and a right checksum, as an attacker would write it."""
    values: dict[str, object] = {
        "magic": b"memascend volume",
        "version": 1,
        "header_bytes": HEADER_BYTES,
        "uuid": bytes(range(16)),
        "size_bytes": 1 << 30,
        "owner_uid": 1000,
        "rest": b"",
        **changes,
    }
    rest = values.pop("rest")
    assert isinstance(rest, bytes)
    body = struct.pack("<16sII16sQI", *values.values()) + rest
    body = body.ljust(HEADER_BYTES - 4, b"\0")
    return body + struct.pack("<I", zlib.crc32(body))


@given(headers)
def test_what_is_packed_is_parsed(header):
    block = header.pack()
    assert len(block) == HEADER_BYTES
    assert parse(block, device_bytes=DEVICE_BYTES) == header


@given(headers, st.integers(0, HEADER_BYTES * 8 - 1))
def test_no_flipped_bit_gets_through(header, bit):
    block = bytearray(header.pack())
    block[bit // 8] ^= 1 << bit % 8
    try:
        assert parse(bytes(block), device_bytes=DEVICE_BYTES) is None
        assert bit < 16 * 8  # in the magic: somebody else's block
    except HeaderError:
        assert bit >= 16 * 8


@given(st.binary(max_size=HEADER_BYTES + 10))
@example(b"")
@example(b"memascend volume")
def test_no_block_is_more_than_an_error(block):
    try:
        assert parse(block, device_bytes=DEVICE_BYTES) is None
    except HeaderError:
        assert block.startswith(b"memascend volume")


@given(
    version=st.integers(0, 2**32 - 1),
    header_bytes=st.sampled_from([0, 4096, 2**32 - 1]),
    identifier=st.binary(min_size=16, max_size=16),
    size_bytes=st.integers(0, 2**64 - 1),
    owner_uid=st.integers(0, 2**32 - 1),
    device_bytes=st.integers(0, 2**50),
)
def test_what_is_forged_with_a_right_checksum_is_within_the_device(
    version, header_bytes, identifier, size_bytes, owner_uid, device_bytes
):
    block = forged(
        version=version,
        header_bytes=header_bytes,
        uuid=identifier,
        size_bytes=size_bytes,
        owner_uid=owner_uid,
    )
    try:
        header = parse(block, device_bytes=device_bytes)
    except HeaderError:
        return
    assert header is not None
    assert (version, header_bytes) == (1, HEADER_BYTES)
    assert DEVICE_BYTES_MIN <= header.size_bytes <= device_bytes
    assert header.size_bytes % 4096 == 0
    assert header.owner_uid <= UID_MAX


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": 2}, "of version 2"),
        ({"header_bytes": 512}, "512 bytes"),
        ({"size_bytes": DEVICE_BYTES + 4096}, "on a device of"),
        ({"size_bytes": 2**64 - 4096}, "on a device of"),
        ({"size_bytes": DEVICE_BYTES_MIN - 4096}, "on a device of"),
        ({"size_bytes": (1 << 30) + 1}, "on a device of"),
        ({"owner_uid": 2**32 - 1}, "not a user"),
        ({"uuid": bytes(16)}, "no uuid"),
        ({"rest": b"x"}, "unused bytes are not zero"),
    ],
)
def test_each_wrong_field_is_named(changes, reason):
    with pytest.raises(HeaderError, match=reason):
        parse(forged(**changes), device_bytes=DEVICE_BYTES)


def test_a_wrong_checksum_is_named():
    with pytest.raises(HeaderError, match="checksum"):
        parse(HEADER.pack()[:-1] + b"!", device_bytes=DEVICE_BYTES)


def test_a_new_header_covers_whole_blocks_of_the_device():
    header = new_header(device_bytes=(1 << 30) + 1000, owner_uid=5)
    assert (header.size_bytes, header.owner_uid) == (1 << 30, 5)
    assert header.uuid != new_header(device_bytes=1 << 30, owner_uid=5).uuid
