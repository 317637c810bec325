"""A runtime that is light on a test machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memascend.config.block import parse_block
from memascend.runtime import Runtime, StockParts

#: No huge pages, nothing locked, one worker.
LIGHT: dict[str, Any] = {
    "allocator": {"huge_pages": "off", "page_lock": False},
    "direct_nvme": {"engine": "threads"},
}


def build(
    folder: Path,
    stock: StockParts | None = None,
    *,
    block: dict[str, Any] | None = None,
    **options: Any,
) -> Runtime:
    """Build the runtime of a block; what its sections leave out is as above."""
    merged = dict(LIGHT)
    for name, value in (block or {}).items():
        merged[name] = {**LIGHT.get(name, {}), **value} if isinstance(value, dict) else value
    return Runtime(
        config=parse_block(merged),
        directory=str(folder),
        page_lock=False,
        stock=stock or StockParts(),
        **options,
    )
