"""How much faster is the fused Adam step on a tile, against the four passes that it replaces?

Those are what memascend did before, and does for any other optimizer: the gradient is widened,
multiplied, stepped with by DeepSpeedCPUAdam, and the new weights are rounded to bf16. Both ways end
with the same bits, which is compared. Bytes for a parameter are counted: what each pass reads and
writes of memory, as if nothing of a tile stayed in a cache. A third contender reads and writes as
many bytes as one pass, in place, and computes next to nothing. `adam_traffic.py` measures bytes.
Another one is one pass on weights in halves: the bf16 weight, and the 16 bits that it lacks. The
last ones keep fewer bits of weights or moments, and end with other bits.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import harness
import torch

from memascend.kernels import adam, codes, halves, remainders
from memascend.plan.knobs import TILE_NUMEL
from memascend.streaming.optimizer.tile_memory import TileShape

QUESTION = "Adam step of a tile: one pass against widening, multiplying, stepping and rounding"
#: Elements of a tile, and tiles one after the other. No cache holds them: a tile of training comes
#: from the drive.
TILES = {"small": ((1 << 16, 2),), "large": ((TILE_NUMEL, 8), (8 * TILE_NUMEL, 1))}
MEMORY, HALVES = "memory alone", "one pass on halves"
ROUNDS = {"small": 3, "large": 15}
FACTOR = 1 / 3
FP32, BF16, LOW = torch.float32, torch.bfloat16, torch.int16
WIDE, NARROW = FP32.itemsize, BF16.itemsize
#: Dtypes of what lies in the weight's place, of both moments, and scales for each codes.SCALE_NUMEL
#: elements.
FEWER_BITS = {
    "24-bit weights": (torch.int8, (FP32, FP32), 0),
    "first moments in codes, halves": (LOW, (torch.int8, BF16), 1),
    "moments in codes, 24-bit weights": (torch.int8, (torch.int8, torch.uint8), 2),
}
COEFFICIENTS = adam.AdamCoefficients(
    factor=FACTOR,
    beta1=0.9,
    beta2=0.999,
    take1=0.1,
    take2=0.001,
    root_scale=1.0,
    epsilon=1e-8,
    step_size=-1e-3,
    weight_decay=-1e-4,
)


class Tile:
    """Memory of a tile, and an optimizer that knows it."""

    def __init__(self, numel: int, gradient_dtype: torch.dtype) -> None:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        generator = torch.Generator().manual_seed(numel)
        self.raw = torch.randn(numel, generator=generator).to(gradient_dtype)
        self.parameter = torch.nn.Parameter(torch.randn(numel, generator=generator))
        self.gradient = torch.empty(numel)
        self.cast = torch.empty(numel, dtype=BF16)
        self.optimizer = DeepSpeedCPUAdam([self.parameter], lr=1e-3, weight_decay=0.1)
        self.shape = TileShape(
            numel=numel,
            count=1,
            state_count=2,
            master_dtype=FP32,
            state_dtype=FP32,
            gradient_dtype=gradient_dtype,
            parameter_dtype=BF16,
        )

    def results(self) -> list[torch.Tensor]:
        """Gives what both ways must leave the same."""
        state = self.optimizer.state[self.parameter]
        return [self.parameter.data, state["exp_avg"], state["exp_avg_sq"], self.cast]


def four_passes(tile: Tile) -> Callable[[], None]:
    """As OptimizerStream steps a tile without a fused update; fp32 gradients need no widening."""

    def step() -> None:
        gradient = tile.raw
        if gradient.dtype != FP32:
            gradient = tile.gradient.copy_(tile.raw)
        tile.parameter.grad = gradient.mul_(FACTOR)
        tile.optimizer.step()
        tile.cast.copy_(tile.parameter.data)

    return step


class Halves:
    """The weights of a tile in halves."""

    def __init__(self, tile: Tile) -> None:
        self.high = torch.empty(tile.shape.numel, dtype=BF16)
        self.low = torch.empty(tile.shape.numel, dtype=torch.int16)
        self._tile = tile
        halves.cut(tile.parameter.data, self.high, self.low)

    def begin(self, exp_avg_sq: torch.Tensor) -> None:
        """Rounds the high halves and puts the flags where they belong."""
        halves.round_high(self.high, self.low, exp_avg_sq)

    def join(self) -> None:
        """Makes the tile what it would be if nothing had been split."""
        exp_avg_sq = self._tile.optimizer.state[self._tile.parameter]["exp_avg_sq"]
        halves.join(self.high, self.low, exp_avg_sq, self._tile.parameter.data)
        halves.clear_flags(exp_avg_sq)
        self._tile.cast.copy_(self.high)


def one_pass(tile: Tile, halved: Halves | None = None) -> Callable[[], None]:
    """As OptimizerStream steps a tile with one."""
    from memascend.deepspeed.optimizer.beta_powers import recomputes_powers
    from memascend.deepspeed.optimizer.fused_adam import FusedAdam, find_tail_width

    recomputes = recomputes_powers(tile.optimizer.ds_opt_adam)
    width = find_tail_width(tile.optimizer, tile.shape, recomputes=recomputes)
    if width is None:
        raise SystemExit("DeepSpeed's operator on this machine gives other bits: nothing is fused")
    fused = FusedAdam(tile.optimizer, width, recomputes=recomputes)
    numel = tile.shape.numel
    values: dict[str, Any] = {
        "step": 0,
        "exp_avg": torch.zeros(numel),
        "exp_avg_sq": torch.zeros(numel),
    }
    tile.optimizer.state[tile.parameter] = values
    (group,) = tile.optimizer.param_groups
    states = {"exp_avg": FP32, "exp_avg_sq": FP32}
    weight, output = tile.parameter.data, tile.cast
    if halved is not None:
        halved.begin(values["exp_avg_sq"])
        weight, output = halved.low, halved.high

    def step() -> None:
        (update,) = fused.updates([(group, values, states)])
        assert update is not None
        update(
            begin=0,
            gradient=tile.raw,
            factor=FACTOR,
            weight=weight,
            values=values,
            output=output,
        )

    return step


def fewer_bits(tile: Tile, name: str) -> Callable[[], None]:
    """One pass on the tile's gradients with weights or moments in fewer bits."""
    weight_dtype, moments, scale_share = FEWER_BITS[name]
    numel = tile.shape.numel
    weight, output = torch.empty(numel, dtype=weight_dtype), torch.empty(numel, dtype=BF16)
    exp_avg, exp_avg_sq = (torch.zeros(numel, dtype=dtype) for dtype in moments)
    if weight_dtype == LOW:
        halves.cut(tile.parameter.data, output, weight)
        halves.round_high(output, weight, exp_avg_sq)
    else:
        remainders.cut(tile.parameter.data, output, weight)
    scales = torch.zeros(scale_share * codes.scale_count(numel)) if scale_share else None
    keys = itertools.count()

    def step() -> None:
        adam.update(
            gradient=tile.raw,
            weight=weight,
            exp_avg=exp_avg,
            exp_avg_sq=exp_avg_sq,
            scales=scales,
            output=output,
            coefficients=COEFFICIENTS,
            rounding_key=adam.make_rounding_key(next(keys)),
        )

    return step


def memory_alone(nbytes: int) -> Callable[[], None]:
    """Reads so many bytes, and writes as many in their place."""
    values = torch.ones(nbytes // WIDE)

    def run() -> None:
        values.neg_()

    return run


def passes_bytes(gradient_itemsize: int) -> int:
    """Bytes for a parameter of widening, multiplying, stepping and rounding."""
    widening = gradient_itemsize + WIDE if gradient_itemsize != WIDE else 0
    multiplying = 2 * WIDE
    stepping = 4 * WIDE + 3 * WIDE
    rounding = WIDE + NARROW
    return widening + multiplying + stepping + rounding


def pass_bytes(gradient_itemsize: int) -> int:
    """Bytes for a parameter of one pass: gradient, weight and moments in, all but the first out."""
    return gradient_itemsize + 3 * WIDE + 3 * WIDE + NARROW


def halves_bytes(gradient_itemsize: int) -> int:
    """Bytes for a parameter of one pass on halves: gradient, both halves and moments in and out."""
    return gradient_itemsize + 2 * (2 * NARROW + 2 * WIDE)


def fewer_bits_bytes(gradient_itemsize: int, name: str) -> float:
    """Bytes for a parameter of one pass on fewer bits: gradient, the others in and out."""
    weight_dtype, moments, scale_share = FEWER_BITS[name]
    kept = NARROW + weight_dtype.itemsize + sum(dtype.itemsize for dtype in moments)
    return gradient_itemsize + 2 * (kept + scale_share * WIDE / codes.SCALE_NUMEL)


def run(*, small: bool) -> list[harness.Row]:
    """Measures each dtype of gradients and gives one row for each contender."""
    size = "small" if small else "large"
    circumstances = harness.machine()
    return [
        row
        for numel, count in TILES[size]
        for dtype in (BF16, FP32)
        for row in _run_dtype(dtype, numel, count, ROUNDS[size], circumstances)
    ]


def each(runs: Sequence[Callable[[], object]]) -> Callable[[], None]:
    """Runs one after the other."""

    def run() -> None:
        for one in runs:
            one()

    return run


def _run_dtype(
    dtype: torch.dtype, numel: int, count: int, rounds: int, circumstances: dict[str, object]
) -> list[harness.Row]:
    ours, theirs, split = ([Tile(numel, dtype) for _ in range(count)] for _ in range(3))
    halved = [Halves(tile) for tile in split]
    # Multiplying in place makes them smaller from round to round, so each begins with the same.
    raw = ours[0].raw.clone()
    fresh_ours, fresh_theirs = (
        each([partial(tile.raw.copy_, raw) for tile in tiles]) for tiles in (ours, theirs)
    )
    nbytes = pass_bytes(dtype.itemsize) // 2 * numel
    contenders = [
        harness.Contender("one pass", each([one_pass(tile) for tile in ours]), fresh_ours),
        harness.Contender(
            "four passes", each([four_passes(tile) for tile in theirs]), fresh_theirs
        ),
        harness.Contender(MEMORY, each([memory_alone(nbytes) for _ in range(count)])),
        harness.Contender(HALVES, each([*map(one_pass, split, halved)])),
        *(
            harness.Contender(name, each([fewer_bits(tile, name) for tile in split]))
            for name in FEWER_BITS
        ),
    ]
    counted = {name: fewer_bits_bytes(dtype.itemsize, name) for name in FEWER_BITS} | {
        "one pass": pass_bytes(dtype.itemsize),
        "four passes": passes_bytes(dtype.itemsize),
        MEMORY: pass_bytes(dtype.itemsize),
        HALVES: halves_bytes(dtype.itemsize),
    }
    samples = harness.interleave(contenders, rounds=rounds)
    each([one.join for one in halved])()
    for one, *others in zip(ours, theirs, split, strict=True):
        for other in others:
            if not all(map(torch.equal, one.results(), other.results())):
                raise SystemExit("the ways have not made the same bits")
    rows = []
    for name, taken in samples.items():
        figures = {
            "wall_ms": harness.spread([sample.wall_s * 1e3 for sample in taken]),
            "ns_per_parameter": harness.spread(
                [sample.wall_s / (count * numel) * 1e9 for sample in taken]
            ),
            "bytes_per_parameter": counted[name],
            "one_pass_speedup": harness.speedup(samples["one pass"], taken),
        }
        config = {
            "numel": numel,
            "tiles": count,
            "rounds": rounds,
            "torch_threads": torch.get_num_threads(),
        }
        case = f"{count} x {numel} elements, {str(dtype).removeprefix('torch.')} gradients"
        rows.append(harness.Row("adam", case, name, figures, config, circumstances))
    return rows


def run_and_report(options: argparse.Namespace) -> None:
    if options.without_deepspeed:
        return
    rows = run(small=options.small)
    harness.report("adam", QUESTION, rows, options.out)


if __name__ == "__main__":
    run_and_report(harness.parser(QUESTION).parse_args())
