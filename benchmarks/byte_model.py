"""A small language model of bytes, whose weights are one flat tensor for an optimizer.

A decoder with normed inputs, learned positions and a head of its own. It computes in fp32, from
weights that are bf16 numbers. Knows no optimizer.
"""

from __future__ import annotations

import math
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

TEXT_BYTES_MAX = 16 * 1024 * 1024
#: One part of so many, the last one, is held out.
HELD_OUT_PART = 10
BYTES = 256


@dataclass(frozen=True, slots=True)
class Text:
    """Bytes to learn from and bytes to test with, int64."""

    learned: torch.Tensor
    held_out: torch.Tensor


def load_text(bytes_max: int = TEXT_BYTES_MAX) -> Text:
    """The demo's text: sources of Python's standard library."""
    content = bytearray()
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if len(content) < bytes_max:
            content += file.read_bytes()
    tokens = torch.frombuffer(content, dtype=torch.uint8)[:bytes_max].long()
    border = tokens.numel() - tokens.numel() // HELD_OUT_PART
    return Text(tokens[:border], tokens[border:])


def sequences(
    tokens: torch.Tensor, rows: int, length: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random windows, and the byte that follows each of theirs; both (rows, length)."""
    starts = torch.randint(tokens.numel() - length, (rows,), generator=generator)
    windows = torch.stack([tokens[start : start + length + 1] for start in starts.tolist()])
    return windows[:, :-1], windows[:, 1:]


@dataclass(frozen=True, slots=True)
class ByteModel:
    """The shape; weights are given to each call."""

    width: int
    layers: int
    heads: int
    length: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The parameters in their order in the flat tensor."""
        width = self.width
        found: dict[str, tuple[int, ...]] = {
            "bytes": (BYTES, width),
            "positions": (self.length, width),
        }
        for layer in range(self.layers):
            found |= {
                f"{layer}.norm": (width,),
                f"{layer}.attention": (3 * width, width),
                f"{layer}.out": (width, width),
                f"{layer}.norm2": (width,),
                f"{layer}.up": (4 * width, width),
                f"{layer}.down": (width, 4 * width),
            }
        return found | {"norm": (width,), "head": (BYTES, width)}

    @property
    def numel(self) -> int:
        """Parameters."""
        return sum(map(math.prod, self.shapes().values()))

    def initial(self, seed: int) -> torch.Tensor:
        """First weights, 1-D fp32: normal numbers, smaller ahead of each sum of a layer."""
        generator = torch.Generator().manual_seed(seed)
        found = []
        for name, shape in self.shapes().items():
            if "norm" in name:
                found.append(torch.ones(shape))
                continue
            small = name.endswith(("out", "down"))
            scale = 0.02 / math.sqrt(2 * self.layers) if small else 0.02
            found.append(torch.randn(shape, generator=generator) * scale)
        return torch.cat([values.flatten() for values in found])

    def loss(
        self, weights: torch.Tensor, inputs: torch.Tensor, next_: torch.Tensor
    ) -> torch.Tensor:
        """Mean cross-entropy in nats.

        Args:
            weights: 1-D fp32; what follows the last parameter is not used.
            inputs: Bytes, int64, (rows, length).
            next_: The byte that follows each, of the same shape.
        """
        shapes = self.shapes()
        parts = weights[: self.numel].split([math.prod(shape) for shape in shapes.values()])
        named = {
            name: part.view(shape)
            for (name, shape), part in zip(shapes.items(), parts, strict=True)
        }
        rows, length = inputs.shape
        hidden = named["bytes"][inputs] + named["positions"][:length]
        for layer in range(self.layers):
            normed = functional.rms_norm(hidden, (self.width,), named[f"{layer}.norm"])
            joined = functional.linear(normed, named[f"{layer}.attention"])
            heads = joined.view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
            flat = mixed.transpose(1, 2).reshape(rows, length, self.width)
            hidden = hidden + functional.linear(flat, named[f"{layer}.out"])
            normed = functional.rms_norm(hidden, (self.width,), named[f"{layer}.norm2"])
            raised = functional.gelu(functional.linear(normed, named[f"{layer}.up"]))
            hidden = hidden + functional.linear(raised, named[f"{layer}.down"])
        normed = functional.rms_norm(hidden, (self.width,), named["norm"])
        logits = functional.linear(normed, named["head"])
        return functional.cross_entropy(logits.flatten(0, 1), next_.flatten())
