"""The pinned allocations of stock ZeRO-Infinity for public models, from their architecture alone.

Follows DeepSpeed 0.19.8 with parameters and optimizer on NVMe, one rank, bf16, pinned memory, and
the values of the Hugging Face documentation (SETTINGS). `python benchmarks/pinned_shapes.py`
rewrites benchmarks/shapes/*.json; a test checks that the files are what this module gives.

The letters are those of the host ledger: A parameter pool, B 16-bit cache of max_in_cpu, C
write-back buffer, D optimizer buffers, E flat gradients, F small parameters. A, C and D are
page-locked at their exact size; B, E and F go through torch's pinned allocator, which rounds up to
a power of two.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SHAPES = Path(__file__).parent / "shapes"

SETTINGS = {
    "sub_group_size": 10**9,
    "param_buffer_count": 5,
    "optimizer_buffer_count": 4,
    "max_in_cpu": 10**9,
    "aio_block_bytes": 1 << 20,
}
PARAM_BYTES = 2
MASTER_BYTES = 4
AIO_ALIGNED_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Architecture:
    """The numbers of a decoder in the Llama family, named as in its config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    attention_bias: bool


@dataclass(frozen=True, slots=True)
class Allocation:
    """`count` allocations of `nbytes` each; `torch` if torch's pinned allocator serves them."""

    letter: str
    what: str
    nbytes: int
    count: int
    torch: bool


_HUB = "https://huggingface.co"
MODELS = {
    "llama-3.1-8b": (
        f"{_HUB}/meta-llama/Llama-3.1-8B/blob/main/config.json",
        Architecture(128256, 4096, 14336, 32, 32, 8, attention_bias=False),
    ),
    "qwen2.5-7b": (
        f"{_HUB}/Qwen/Qwen2.5-7B/blob/main/config.json",
        Architecture(152064, 3584, 18944, 28, 28, 4, attention_bias=True),
    ),
    "qwen2.5-14b": (
        f"{_HUB}/Qwen/Qwen2.5-14B/blob/main/config.json",
        Architecture(152064, 5120, 13824, 48, 40, 8, attention_bias=True),
    ),
    "qwen2.5-32b": (
        f"{_HUB}/Qwen/Qwen2.5-32B/blob/main/config.json",
        Architecture(152064, 5120, 27648, 64, 40, 8, attention_bias=True),
    ),
}


def parameters(model: Architecture) -> Iterator[tuple[int, bool]]:
    """Yield (numel, has weight decay) of every parameter, in module order, embeddings untied."""
    hidden = model.hidden_size
    kv = hidden // model.num_attention_heads * model.num_key_value_heads
    yield model.vocab_size * hidden, True
    for _ in range(model.num_hidden_layers):
        for rows in (hidden, kv, kv):
            yield rows * hidden, True
            if model.attention_bias:
                yield rows, False
        yield hidden * hidden, True
        for _ in range(3):
            yield hidden * model.intermediate_size, True
        yield hidden, False
        yield hidden, False
    yield hidden, False
    yield model.vocab_size * hidden, True


def sub_groups(model: Architecture) -> list[list[int]]:
    """Form the sub-groups: closed once they reach sub_group_size, never across groups."""
    closed = []
    for decays in (True, False):
        group: list[int] = []
        for numel in (numel for numel, decay in parameters(model) if decay == decays):
            group.append(numel)
            if sum(group) >= SETTINGS["sub_group_size"]:
                closed.append(group)
                group = []
        if group:
            closed.append(group)
    return closed


def allocations(model: Architecture) -> list[Allocation]:
    """Return every pinned allocation that lives through training, in the order of the ledger."""
    numels = [numel for numel, _ in parameters(model)]
    groups = sub_groups(model)
    largest_group = max(groups, key=sum)
    pool_bytes = SETTINGS["param_buffer_count"] * PARAM_BYTES * _aligned(max(numels), PARAM_BYTES)
    cache_numel = min(sum(numels), SETTINGS["max_in_cpu"])
    write_back_bytes = PARAM_BYTES * sum(_aligned(numel, PARAM_BYTES) for numel in largest_group)
    optimizer_bytes = MASTER_BYTES * _aligned(sum(largest_group), MASTER_BYTES)
    found = [
        Allocation("A", "parameter pool", pool_bytes, 1, torch=False),
        Allocation("B", "16-bit cache", PARAM_BYTES * cache_numel, 1, torch=True),
        Allocation("C", "write-back buffer", write_back_bytes, 1, torch=False),
        Allocation(
            "D",
            "optimizer buffer",
            optimizer_bytes,
            SETTINGS["optimizer_buffer_count"],
            torch=False,
        ),
        Allocation("E", "flat gradients", PARAM_BYTES * sum(numels), 1, torch=True),
    ]
    small = [numel * PARAM_BYTES for numel in numels]
    small = [nbytes for nbytes in small if nbytes < max(1 << 20, SETTINGS["aio_block_bytes"])]
    found += [
        Allocation("F", "small parameter", nbytes, small.count(nbytes), torch=True)
        for nbytes in sorted(set(small))
    ]
    return found


def document(name: str) -> dict[str, Any]:
    """Return the content of one file of benchmarks/shapes/."""
    source, model = MODELS[name]
    return {
        "model": name,
        "source": source,
        "architecture": asdict(model),
        "follows": "DeepSpeed 0.19.8, ZeRO-3, offload_param and offload_optimizer on nvme, 1 rank",
        "settings": SETTINGS,
        "parameters": sum(numel for numel, _ in parameters(model)),
        "largest_sub_group": max(sum(group) for group in sub_groups(model)),
        "allocations": [asdict(allocation) for allocation in allocations(model)],
    }


def load(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((SHAPES / f"{name}.json").read_text())
    return content


def _aligned(numel: int, element_bytes: int) -> int:
    step = AIO_ALIGNED_BYTES // element_bytes
    return -(-numel // step) * step


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    SHAPES.mkdir(exist_ok=True)
    for model_name in MODELS:
        text = json.dumps(document(model_name), indent=1)
        (SHAPES / f"{model_name}.json").write_text(text + "\n")
