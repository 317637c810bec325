"""The header of a raw volume: one block at its start that marks it as memascend's.

Pure: bytes to values and back. Any program that can write to the device may have written it, so
every field is checked before one is used. It only determines if the device may be used, by whose
runs, and how much of it.
"""

from __future__ import annotations

import struct
import uuid
import zlib
from dataclasses import dataclass

HEADER_BYTES = 4096
#: Offset of the data: behind the signatures that other programs look for at a device's start.
START_BYTES = 1 << 20
#: The smallest device that is accepted.
DEVICE_BYTES_MIN = 64 << 20
VERSION = 1
UID_MAX = (1 << 32) - 2  # (1 << 32) - 1 means "no user"

_MAGIC = b"memascend volume"
_FIELDS = struct.Struct("<16sII16sQI")  # magic, version, header bytes, uuid, size, owner
_CRC = struct.Struct("<I")
_SIZE_MULTIPLE = 4096


class HeaderError(ValueError):
    """The block begins like our header but is invalid; the message has the reason."""


@dataclass(frozen=True, slots=True)
class Header:
    """The content of a header."""

    uuid: uuid.UUID  # random, made when the device was formatted
    size_bytes: int  # bytes of the device that belong to memascend, header included
    owner_uid: int  # the user whose runs may use it; root may, too

    def pack(self) -> bytes:
        """Return the header block, as it is on the device."""
        fields = _FIELDS.pack(
            _MAGIC, VERSION, HEADER_BYTES, self.uuid.bytes, self.size_bytes, self.owner_uid
        )
        body = fields.ljust(HEADER_BYTES - _CRC.size, b"\0")
        return body + _CRC.pack(zlib.crc32(body))


def new_header(*, device_bytes: int, owner_uid: int) -> Header:
    """Return a header for a whole device."""
    size_bytes = device_bytes // _SIZE_MULTIPLE * _SIZE_MULTIPLE
    return Header(uuid=uuid.uuid4(), size_bytes=size_bytes, owner_uid=owner_uid)


def parse(block: bytes, *, device_bytes: int) -> Header | None:
    """Parse the start of a device; return None if the block does not begin with our magic.

    Raises:
        HeaderError: The block begins with our magic, but is invalid.
    """
    if not block.startswith(_MAGIC):
        return None
    if len(block) != HEADER_BYTES:
        raise HeaderError(f"the header has {len(block)} bytes instead of {HEADER_BYTES}")
    body, crc = block[: -_CRC.size], _CRC.unpack(block[-_CRC.size :])[0]
    if zlib.crc32(body) != crc:
        raise HeaderError("the header's checksum is wrong")
    _, version, header_bytes, identifier, size_bytes, owner_uid = _FIELDS.unpack_from(body)
    if version != VERSION:
        raise HeaderError(f"the header is of version {version}; this memascend knows {VERSION}")
    if header_bytes != HEADER_BYTES:
        raise HeaderError(f"the header states {header_bytes} bytes of its own, not {HEADER_BYTES}")
    if any(body[_FIELDS.size :]):
        raise HeaderError("the header's unused bytes are not zero")
    if not DEVICE_BYTES_MIN <= size_bytes <= device_bytes or size_bytes % _SIZE_MULTIPLE:
        raise HeaderError(
            f"the header states a volume of {size_bytes} bytes, on a device of {device_bytes}"
        )
    if owner_uid > UID_MAX:
        raise HeaderError(f"the header's owner is not a user: {owner_uid}")
    if identifier == bytes(16):
        raise HeaderError("the header has no uuid")
    return Header(uuid=uuid.UUID(bytes=identifier), size_bytes=size_bytes, owner_uid=owner_uid)
