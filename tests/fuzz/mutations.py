"""Changes to inputs that keep them nearly right: most of what random bytes become is refused at
once, and says nothing of what lies behind.
"""

from __future__ import annotations

import json
import random
import struct
import zlib
from collections.abc import Callable
from typing import Any

Mutate = Callable[[bytes, random.Random], bytes]

#: Replaced in the text by what no JSON value can be.
_RAW = {
    "@deep list@": "[" * 1500 + "]" * 1500,
    "@deep object@": '{"a":' * 1200 + "1" + "}" * 1200,
    "@long number@": "9" * 5000,
    "@4300 digits@": "9" * 4300,
    "@1e400@": "1e400",
    "@surrogate@": "\\ud800",
    "@cut@": "",
}
_NUMBERS = (0, 1, -1, 7, 100, 400, 1024, 4096, 2**31, 2**53, 2**63, 2**64, -(2**63), 10**300)
_FLOATS = (0.5, 1.0, -0.0, 1e-320, 1e308, float("nan"), float("inf"), -float("inf"))
_TEXTS = (
    *("", ".", "..", "../secret", "/etc/passwd", "inside", "inside/file", "link", "link/secret"),
    *("loop/x", "a/../../b", "a\\b", "x\0y", "a" * 300, "\x1b[31m", "é²٣", "²", "~"),
    *("6GiB", "9" * 400 + "TiB", "1e5GB", "-1", "0", "0.0B", "1.5 gb", "NaN", "inf"),
    *("warn", "stop", "uring", "threads", "float32", "float64", "llama", "gpt2", "mixtral", "F32"),
    *("memascend checkpoint", "00c0ffee", "layers.10", "enabled"),
)
#: Rare, for they take time.
_LONG_TEXTS = ("a" * 5000, "9" * 5000, "layers." + "7" * 5000, "1" + " " * 5000 + "!")
_LONG_ONE_IN = 100
_MANY = (2, 3, 65, 300)
_PLACES_MAX = 500
_LETTERS_MAX = 1 << 13


def any_value(rng: random.Random, depth: int = 2) -> Any:
    """A value that somebody may not have thought of."""
    kinds: tuple[Callable[[], Any], ...] = (
        lambda: rng.choice(_NUMBERS) + rng.choice((0, 0, 1, -1)),
        lambda: rng.choice(_FLOATS),
        lambda: _any_text(rng),
        lambda: rng.choice((None, True, False, [], {}, [[]], [None], {"": None})),
        lambda: rng.choice(tuple(_RAW)),
        lambda: rng.randrange(1 << rng.randrange(1, 80)),
        lambda: [any_value(rng, depth - 1) for _ in range(rng.randrange(3))],
        lambda: {_any_text(rng): any_value(rng, depth - 1)},
        lambda: [any_value(rng, 0)] * rng.choice(_MANY),
    )
    return rng.choice(kinds if depth > 0 else kinds[:-3])()


def _any_text(rng: random.Random) -> str:
    return rng.choice(_LONG_TEXTS if rng.randrange(_LONG_ONE_IN) == 0 else _TEXTS)


def mutate_json(content: bytes, rng: random.Random) -> bytes:
    """Changes a node or some of a document; sometimes the text itself."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return mutate_bytes(content, rng)
    if rng.randrange(12) == 0:
        return mutate_bytes(content, rng)
    box = [value]
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        _mutate_node(box, rng)
    if _letters(box, 0) > _LETTERS_MAX:
        return content
    try:
        text = json.dumps(box[0])
    except (ValueError, RecursionError):
        return content
    for name, raw in _RAW.items():
        text = text.replace(f'"{name}"', raw)
    if rng.randrange(30) == 0:  # a key twice
        text = text.replace("{", '{"rank": 0, ', 1)
    return text.encode("utf-8", "surrogatepass")


def _mutate_node(box: list[Any], rng: random.Random) -> None:
    places = list(_places(box, 0))
    if len(places) > _PLACES_MAX:
        box[0] = any_value(rng)
        return
    holder, key = rng.choice(places)
    action = rng.randrange(8)
    if action == 0 and holder is not box:
        del holder[key]
    elif action == 1:
        other, other_key = rng.choice(places)
        holder[key] = other[other_key]
        if _contains(holder[key], holder):
            holder[key] = None
    elif action == 2 and isinstance(holder[key], list):
        holder[key] = holder[key] * rng.choice(_MANY)
    elif action == 3 and isinstance(holder[key], dict):
        holder[key] = {**holder[key], _any_text(rng): any_value(rng)}
    elif action == 4 and isinstance(holder[key], str):
        at = rng.randrange(len(holder[key]) + 1)
        holder[key] = holder[key][:at] + _any_text(rng) + holder[key][at:]
    elif action == 5 and isinstance(holder[key], int):
        holder[key] = holder[key] + rng.choice((-1, 1, 4096, -(1 << 63)))
    else:
        holder[key] = any_value(rng)


def _letters(node: Any, depth: int) -> int:
    """About as many as its text has."""
    if isinstance(node, str):
        return len(node)
    if depth > 12 or not isinstance(node, list | dict):
        return 8
    items = node if isinstance(node, list) else [*node, *node.values()]
    return 2 + sum(_letters(item, depth + 1) for item in items)


def _places(node: Any, depth: int) -> Any:
    """(holder, key) of everything in it; not below many levels."""
    if depth > 12:
        return
    keys = range(len(node)) if isinstance(node, list) else list(node)
    for key in keys:
        yield node, key
        if isinstance(node[key], list | dict):
            yield from _places(node[key], depth + 1)


def _contains(value: Any, holder: Any, depth: int = 0) -> bool:
    if value is holder:
        return True
    if depth > 12 or not isinstance(value, list | dict):
        return False
    items = value if isinstance(value, list) else value.values()
    return any(_contains(item, holder, depth + 1) for item in items)


def mutate_bytes(content: bytes, rng: random.Random) -> bytes:
    """Flips, inserts, removes and repeats."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(data) + 1)
        action = rng.randrange(5)
        if action == 0 and data:
            data[min(at, len(data) - 1)] ^= 1 << rng.randrange(8)
        elif action == 1:
            data[at:at] = rng.randbytes(rng.choice((1, 2, 4, 8)))
        elif action == 2:
            del data[at : at + rng.choice((1, 2, 8, 1000))]
        elif action == 3:
            data[at : at + 8] = struct.pack("<q", rng.choice(_NUMBERS[:-1]) % (1 << 63))
        else:
            data[at:at] = data[at : at + rng.choice((1, 8, 64))]
    return bytes(data)


def mutate_header(content: bytes, rng: random.Random) -> bytes:
    """A volume's header: mostly with the right size and checksum, as an attacker would."""
    data = mutate_bytes(content[:60], rng) + content[60:]
    if rng.randrange(4) == 0:
        return data
    body = data[:4092].ljust(4092, b"\0")
    return body + struct.pack("<I", zlib.crc32(body))


def mutate_safetensors(content: bytes, rng: random.Random) -> bytes:
    """A safetensors file: mostly with the right length in front of its header."""
    nbytes = int.from_bytes(content[:8], "little")
    header, rest = content[8 : 8 + nbytes], content[8 + nbytes :]
    header = mutate_json(header, rng)
    if rng.randrange(10) == 0:
        return mutate_bytes(content[:8] + header + rest, rng)
    return struct.pack("<Q", len(header)) + header + rest
