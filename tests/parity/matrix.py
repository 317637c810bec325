"""The covering choice: which of the many thousand combinations are run, and why these.

- Every pair of values of two different dimensions below occurs in at least one case (pairwise
  covering; the choice is greedy and seeded, so it is the same everywhere). Faults of offloading
  need one or two circumstances to meet - odd shapes and two ranks, checkpointing and one rank -
  seldom three.
- Every section alone, all together and none, on both engines, on two quite different trainings.
- Limits so small that embeddings and layer tensors travel in chunks, and so large that a part of
  the tensors, or all, stays in memory.
- Tensors striped over several directories of different weights.
- Everything compared with checksums, on the streams, over several drives, and without the streams.
- The streams on what they could get wrong: scales that fall and grow, clipping that bites, sums
  over micro-batches however their end is announced and in another dtype than gradients, frozen and
  tied weights, optimizers of every kind, each stream without the others, and with each other
  section off.
- Resuming: saved and loaded by every way of stepping, by stock and by CPU offload, and beyond the
  step from which on CPU offload's own resumed run differs in the last bit (6, with these betas).
- Steps that are over first, and steps that begin behind their caller when they are first waited for
  (walks.py): with one, four and eight micro-batches, overflows, LoRA, parameters without a
  gradient, checkpoints in the middle, tensors changed by hand, and parameters lent where they are.
- Scripts that cast modules after zero.Init, gather lists of several models' parameters, and use
  weights outside their modules.
- Inference apart, since it has neither optimizer nor gradients.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from .cases import SECTIONS, SUB_GROUP_LARGE_NUMEL, SUB_GROUP_SMALL_NUMEL, WHOLE, Case

BILLION = 1_000_000_000
LIMIT_SMALL_BYTES = 10 << 20
LIMIT_LARGE_BYTES = 24 << 20
# Above what the defaults of the llama case need (66 MiB) a part stays in memory: half of what is
# first, gradients where they are added up; all parameters and some gradients; everything.
LIMIT_HALF_BYTES = 76 << 20
LIMIT_ALL_PARAMETERS_BYTES = 92 << 20
LIMIT_EVERYTHING_BYTES = 512 << 20
# Above what the defaults of gpt2 need: some master weights, which gradients come behind.
LIMIT_SOME_MASTERS_BYTES = 86 << 20
TRANSFORMERS = ("llama", "qwen", "gpt2", "mixtral")


# Values of one dimension may set several fields at once.
DIMENSIONS: dict[str, list[dict[str, Any]]] = {
    "family": [{"family": name} for name in (*TRANSFORMERS, "odd", "unused", "alternating")],
    "ranks": [{"world": 1}, {"world": 2}],
    "dtype": [{"dtype": "bf16"}, {"dtype": "fp16", "steps": 5}, {"dtype": "fp32"}],
    "accumulation": [{"accumulation": 1}, {"accumulation": 3}],
    "clipping": [{"clipping": 0.0}, {"clipping": 1.0}],
    "checkpointing": [{"checkpointing": how} for how in ("off", "reentrant", "nonreentrant")],
    "offload": [
        {"params": "nvme", "optimizer": "nvme"},
        {"params": "nvme", "optimizer": "nvme", "pipeline": True},
        {"params": "nvme", "optimizer": "cpu"},
        {"params": "cpu", "optimizer": "nvme"},
        {"params": "none", "optimizer": "nvme"},
    ],
    "construction": [{"zero_init": True}, {"zero_init": False}],
    "sub_groups": [
        {"sub_group_numel": SUB_GROUP_SMALL_NUMEL},
        {"sub_group_numel": SUB_GROUP_LARGE_NUMEL},
    ],
    "distances": [
        {"reuse_numel_max": 0, "live_numel_max": BILLION},
        {"reuse_numel_max": BILLION, "live_numel_max": BILLION},
        {"reuse_numel_max": 0, "live_numel_max": 0},
    ],
    "prefetch": [{"prefetch_numel": 3_000_000}, {"prefetch_numel": 0}, {"prefetch_numel": BILLION}],
    "persistence": [{"persistence_numel": 10_000}, {"persistence_numel": 2_000_000}],
    "pool": [{"buffer_count": 24}, {"buffer_count": 5}, {"resident_numel_max": 4_000_000}],
    "gradients": [{"gradients_in_fp32": False}, {"gradients_in_fp32": True}],
    "disturbance": [{}, {"modify_weights": True}, {"gather_all": True}],
    "engine": [{"engine": None}, {"engine": "uring"}, {"engine": "threads"}],
}

#: Sections, each alone, that serve every rank by itself, or that two ranks have beside others.
ALONE = tuple((name,) for name in SECTIONS if name != "overflow_check")

Row = tuple[int, ...]
Pair = tuple[tuple[int, int], tuple[int, int]]


def training_cases() -> list[Case]:
    return [_case(row) for row in covering_rows()]


def section_cases() -> list[Case]:
    # Without the section buffer_pool stock's pool serves, and what kills it would.
    trainings = (
        Case(prefetch_numel=0),
        Case(family="gpt2", world=2, dtype="fp16", accumulation=2, steps=5, prefetch_numel=0),
    )
    cases = []
    for training in trainings:
        choices = [*((name,) for name in SECTIONS), (), SECTIONS]
        # Sections and engines serve one rank each; with two they are in other cases beside others.
        cases += [
            replace(training, sections=one, repeats=training.world == 2 and one in ALONE)
            for one in choices
        ]
        engines = replace(training, repeats=training.world == 2)
        cases += [
            replace(engines, sections=("direct_nvme",), engine="threads"),
            replace(engines, engine="threads"),
            replace(engines, engine="libaio"),
            replace(engines, engine="uring"),
        ]
    return cases


def limit_cases() -> list[Case]:
    # Little above the smallest limit: embeddings and most layer tensors travel in chunks.
    tight = Case(limit_bytes=LIMIT_SMALL_BYTES)
    roomy = replace(tight, limit_bytes=LIMIT_LARGE_BYTES)
    resident = replace(tight, limit_bytes=LIMIT_EVERYTHING_BYTES)
    return [
        tight,
        replace(tight, world=2, prefetch_numel=BILLION),
        replace(tight, checkpointing="reentrant", dtype="fp16", steps=5),
        replace(tight, world=2, family="gpt2", modify_weights=True, reuse_numel_max=BILLION),
        replace(tight, family="mixtral", gather_all=True, persistence_numel=2_000_000),
        replace(tight, family="odd", zero_init=False, resident_numel_max=4_000_000),
        replace(tight, optimizer="absent", family="qwen", gather_all=True, repeats=True),
        replace(tight, world=2, family="odd", modify_weights=True, gather_all=True, repeats=True),
        replace(
            tight, family="gpt2", modify_weights=True, clipping=1.0, accumulation=4, repeats=True
        ),
        replace(tight, world=2, optimizer="absent", modify_weights=True, engine="threads"),
        replace(tight, family="unused", params="none", clipping=1.0, repeats=True),
        replace(roomy, world=2, family="mixtral", checkpointing="nonreentrant", accumulation=4),
        replace(roomy, dtype="fp32", pipeline=True, repeats=True),
        replace(resident, limit_bytes=LIMIT_HALF_BYTES, accumulation=4),
        replace(resident, limit_bytes=LIMIT_ALL_PARAMETERS_BYTES, modify_weights=True),
        replace(
            resident,
            family="alternating",
            accumulation=4,
            clipping=1.0,
            modify_weights=True,
            repeats=True,
        ),
        replace(resident, world=2, family="gpt2", dtype="fp16", steps=5, zero_init=False),
    ]


def volume_cases() -> list[Case]:
    several = Case(volumes=("3", "1", "2"))
    return [
        several,
        replace(several, world=2, family="gpt2", accumulation=4, dtype="fp16", steps=5),
        replace(several, engine="threads", family="mixtral"),
        replace(several, resume_at=2, steps=4, repeats=True),
        replace(several, world=2, limit_bytes=LIMIT_SMALL_BYTES, modify_weights=True),
    ]


def verify_cases() -> list[Case]:
    return [
        Case(verify="reads", world=2, family="odd", limit_bytes=LIMIT_SMALL_BYTES, accumulation=4),
        Case(verify="full", volumes=("3", "1", "2"), resume_at=2, steps=4),
        Case(verify="full", sections=WHOLE, family="gpt2", dtype="fp16", steps=5),
    ]


def streaming_cases() -> list[Case]:
    # A scale that overflows at once, recovers, and grows again every other step.
    scaled = Case(family="unused", dtype="fp16", steps=50, scale_power=24, scale_window=4)
    cases = [
        scaled,
        replace(scaled, family="odd", world=2, accumulation=4, steps=12),
        Case(family="odd", world=2, clipping=0.05, accumulation=4),
        Case(family="mixtral", world=2, clipping=0.05, repeats=True),
        Case(family="lora", clipping=0.05),
        Case(family="lora", world=2, accumulation=4, checkpointing="nonreentrant"),
        Case(family="lora", limit_bytes=LIMIT_SMALL_BYTES),
    ]
    for world, boundary in ((1, "stated"), (2, "stepped")):
        cases += [
            Case(family="alternating", world=world, accumulation=4, boundary=boundary),
            Case(
                **{"dtype": "fp16", "steps": 5, "world": world, "accumulation": 3},
                boundary=boundary,
                repeats=world == 1,
            ),
        ]
    for name in ("TorchAdamW", "Lion", "Adagrad", "client"):
        cases += [
            Case(family="odd", optimizer_type=name, clipping=1.0),
            Case(world=2, optimizer_type=name, repeats=name in ("Lion", "Adagrad")),
        ]
    # Counts its steps in its groups: the order of sub-groups shows.
    counting = Case(optimizer_type="schedule-free", accessors="read", clipping=1.0)
    return [
        *cases,
        replace(counting, world=2, resume_at=2, steps=4),
        replace(counting, family="odd", sections=WHOLE, repeats=True),
    ]


def sum_cases() -> list[Case]:
    """Sums in fp32 of narrower gradients, which wait on the drive to be added up."""
    eight = Case(gradients_in_fp32=True, accumulation=8)
    four = replace(eight, accumulation=4)
    # Some steps are left out, the scale grows in some.
    fp16 = replace(four, dtype="fp16", steps=6, scale_window=2)
    return [
        replace(eight, family="alternating", world=2, clipping=1.0),
        replace(fp16, family="unused", boundary="stepped"),
        replace(eight, accumulation=1),
        replace(eight, accumulation=1, boundary="stepped", world=2, repeats=True),
        replace(eight, accumulation=17, family="odd", boundary="stepped", steps=2),
        replace(
            eight, accumulation=9, family="alternating", boundary="stated", steps=3, repeats=True
        ),
        replace(fp16, family="alternating", world=2),
        replace(fp16, during_backward=True),
        replace(four, family="alternating", during_backward=True, world=2, steps=4),
        replace(four, accessors="change", steps=4),
        replace(four, accessors="read", boundary="stepped", world=2, steps=4),
        replace(four, limit_bytes=LIMIT_SMALL_BYTES, checkpointing="nonreentrant"),
        replace(four, limit_bytes=LIMIT_ALL_PARAMETERS_BYTES, family="alternating", repeats=True),
        replace(four, limit_bytes=LIMIT_EVERYTHING_BYTES, world=2, repeats=True),
        replace(four, sections=tuple(name for name in SECTIONS if name != "streaming.optimizer")),
        replace(four, resume_at=2, steps=4),
        replace(four, verify="full", volumes=("3", "1"), repeats=True),
    ]


def stream_choice_cases() -> list[Case]:
    """Every choice of streams, and all of them with one other section off."""
    streams = [name for name in SECTIONS if name.startswith("streaming.")]
    others = [name for name in SECTIONS if name not in streams]
    choices = [
        (*others, *chosen)
        for count in range(len(streams) + 1)
        for chosen in itertools.combinations(streams, count)
    ]
    choices += [tuple(name for name in SECTIONS if name != off) for off in others]
    training = Case(family="unused", world=2, accumulation=2, clipping=1.0, prefetch_numel=0)
    # Two streams, and all: the training cases have these as well.
    often = tuple(choices[number] for number in (4, 6, 7))
    return [replace(training, sections=one, repeats=one in often) for one in choices]


def early_cases() -> list[Case]:
    """Steps that begin during backward, and what decides against them, or half of them."""
    early = Case(during_backward=True, steps=4)
    fp16 = replace(early, dtype="fp16", steps=8, scale_window=2)
    auto = Case(during_backward="auto", steps=14)
    return [
        early,
        replace(fp16, world=2, accumulation=4),  # some steps are left out, the scale grows in some
        replace(early, family="odd", world=2, persistence_numel=0, modify_weights=True),
        replace(early, family="alternating", accumulation=4),
        replace(early, family="unused", sub_group_numel=SUB_GROUP_LARGE_NUMEL, repeats=True),
        replace(early, family="lora", world=2),
        replace(early, accumulation=8, scheduler=True, checkpointing="reentrant"),
        # Gradients are looked at in the second step; later they may be used up.
        replace(early, accessors="change", steps=3),
        # Guesses, of which some are wrong: norms are 20 to 26, and 9.8 to 10.1.
        replace(early, clipping=25.97, steps=14),
        replace(early, clipping=10.04, steps=14, world=2, family="gpt2", accessors="change"),
        replace(fp16, clipping=9.42, steps=16, family="odd", scheduler=True),
        replace(early, clipping=30.0, steps=12, resume_at=6, repeats=True),
        replace(early, clipping=30.0, steps=8, modify_weights=True, gather_all=True),
        replace(early, clipping=30.0, steps=6, boundary="stepped", accumulation=2, repeats=True),
        replace(early, clipping=30.0, steps=7, accessors="read", walk="off", world=2),
        replace(early, clipping=30.0, steps=8, limit_bytes=LIMIT_SMALL_BYTES, split_master=False),
        # Where it pays: with norms on both sides of the limit, and without one.
        replace(auto, clipping=25.97),
        replace(auto, accessors="change", scheduler=True, accumulation=2, world=2),
        replace(auto, clipping=1000.0, family="alternating", world=2, repeats=True),
        replace(auto, accessors="read", boundary="stepped", accumulation=3),
        replace(auto, dtype="fp16", scale_window=2, steps=18, world=2, modify_weights=True),
        replace(auto, resume_at=6, steps=18),
        replace(early, clipping=1000.0, resume_at=6, steps=14, limit_bytes=LIMIT_HALF_BYTES),
        replace(early, accessors="read", boundary="stepped", accumulation=3, repeats=True),
        replace(early, resume_at=3, steps=6, saver="whole"),
        # Nothing goes on behind its caller: no tile is left to the next forward pass.
        replace(early, walk="off", family="alternating", accumulation=4, repeats=True),
        replace(early, walk="off", world=2, repeats=True),
        replace(early, limit_bytes=LIMIT_SMALL_BYTES, gather_all=True, prefetch_numel=BILLION),
        replace(early, limit_bytes=LIMIT_HALF_BYTES, repeats=True),
        replace(early, limit_bytes=LIMIT_SOME_MASTERS_BYTES, family="gpt2"),
        replace(early, verify="full", volumes=("3", "1"), repeats=True),
    ]


def activation_cases() -> list[Case]:
    """What forward saves on the drive: every way of checkpointing, and every family."""
    drive = Case(saved_bytes=0)
    fp16 = replace(drive, dtype="fp16", steps=5)
    return [
        replace(drive, checkpointing="reentrant"),
        replace(drive, checkpointing="nonreentrant", world=2, accumulation=4),
        replace(drive, checkpointing="offload", family="qwen"),
        replace(drive, checkpointing="deepspeed", family="mixtral"),
        replace(drive, family="mixtral", world=2, accumulation=4),
        replace(drive, family="lora", world=2, checkpointing="nonreentrant"),
        replace(fp16, family="gpt2", checkpointing="reentrant"),
        replace(drive, saved_bytes=20 << 10, limit_bytes=LIMIT_SMALL_BYTES, walk="late"),
        replace(drive, verify="full", volumes=("3", "1"), resume_at=2, during_backward=True),
        replace(fp16, params="none", clipping=1.0, family="unused", repeats=True),
        replace(drive, params="cpu", family="odd", gather_all=True, repeats=True),
        replace(drive, family="tiled", accumulation=4),
        replace(drive, family="liger", checkpointing="nonreentrant"),
    ]


def compiled_cases() -> list[Case]:
    """What torch.compile makes of the modules between DeepSpeed's hooks, with ours among them."""
    return [
        Case(compiled="aot_eager", family="qwen", saved_bytes=0, checkpointing="nonreentrant"),
        Case(
            **{"compiled": "eager", "family": "mixtral", "world": 2, "accumulation": 2},
            saved_bytes=0,
            repeats=True,
        ),
        Case(compiled="inductor", during_backward=True),
    ]


def step_cases() -> list[Case]:
    plain = Case(steps=4, clipping=1.0)
    # Overflows at once, recovers, grows, and overflows again.
    scaled = Case(family="unused", dtype="fp16", steps=10, scale_window=2)
    lora = Case(family="lora", steps=4)
    trainings = [
        plain,
        replace(plain, accumulation=8, checkpointing="nonreentrant", family="gpt2"),
        scaled,
        replace(scaled, accumulation=4, family="odd"),
        lora,
        replace(lora, resume_at=2, steps=6),
        replace(plain, family="alternating", accumulation=8),
        replace(plain, save_at=2, accumulation=4, family="unused", repeats=True),
        replace(scaled, save_at=6, repeats=True),
        replace(scaled, resume_at=5, steps=12),
        replace(plain, modify_weights=True, gather_all=True, repeats=True),
        replace(plain, modify_weights=True, split_master=False),
        replace(plain, accessors="change", steps=5),
        replace(plain, limit_bytes=LIMIT_SMALL_BYTES, accumulation=4, repeats=True),
        replace(plain, limit_bytes=LIMIT_EVERYTHING_BYTES, modify_weights=True),
        Case(during_backward=True, limit_bytes=LIMIT_ALL_PARAMETERS_BYTES, steps=4),
        replace(scaled, limit_bytes=LIMIT_EVERYTHING_BYTES, accumulation=4, repeats=True),
    ]
    # In turn: what a training shows with one rank, or late, it seldom shows otherwise.
    ways = itertools.cycle(((1, "late"), (2, "off"), (2, "late"), (1, "off")))
    return [
        replace(training, world=world, walk=walk)
        for training, (world, walk) in zip(trainings, ways, strict=False)
    ]


def script_cases() -> list[Case]:
    """What scripts do with parameters: cast them, list those of several models, touch them."""
    cast = Case(cast=("norm", "embed", "lm_head"))
    return [
        # The embedding is the first parameter: DeepSpeed trains all of them in its dtype.
        replace(cast, averages=True, touched=True, steps=7),
        Case(cast=("norm", "lm_head"), world=2, averages=True, touched=True, steps=7),
        replace(cast, limit_bytes=LIMIT_SMALL_BYTES, world=2),
        replace(cast, resident_numel_max=4_000_000, clipping=1.0),
        replace(cast, sections=tuple(n for n in SECTIONS if n != "streaming.parameters")),
        replace(cast, sections=WHOLE, resume_at=2, steps=4, repeats=True),
        Case(averages=True, limit_bytes=LIMIT_SMALL_BYTES, modify_weights=True),
        Case(averages=True, touched=True, steps=7, prefetch_numel=1_000_000, family="qwen"),
    ]


def inference_cases() -> list[Case]:
    plain = Case(optimizer="absent")
    return [
        plain,
        replace(plain, world=2, family="mixtral"),
        replace(plain, family="qwen", dtype="fp32", gather_all=True, buffer_count=5),
        replace(plain, world=2, family="odd", modify_weights=True, zero_init=False),
    ]


def resume_cases() -> list[Case]:
    plain = Case(resume_at=2, steps=4)
    fp16 = replace(plain, dtype="fp16", resume_at=4, steps=8, scale_window=2, clipping=1.0)
    return [
        replace(plain, resume_at=7, steps=9, scheduler=True),
        replace(plain, sections=WHOLE, repeats=True),
        replace(plain, sections=WHOLE, pipeline=True, resume_at=7, steps=9, repeats=True),
        replace(plain, sections=WHOLE, saver="streamed", world=2),
        replace(plain, saver="whole", family="odd", world=2),
        replace(plain, saver="other tiles", accumulation=2),
        replace(plain, saver="limit"),
        replace(plain, limit_bytes=LIMIT_HALF_BYTES, repeats=True),
        replace(plain, limit_bytes=LIMIT_HALF_BYTES, saver="whole"),
        replace(plain, saver="stock"),
        replace(plain, saver="stock", sections=WHOLE, repeats=True),
        replace(plain, saver="cpu"),
        replace(plain, saver="cpu", sections=WHOLE, world=2),
        fp16,
        replace(fp16, saver="whole", accumulation=2, world=2),
        replace(fp16, saver="stock", repeats=True),
        replace(plain, optimizer_type="TorchAdamW"),
        replace(plain, optimizer_type="Lion", saver="whole"),
        replace(plain, optimizer_type="Adagrad", repeats=True),
        replace(plain, params="cpu", dtype="fp32"),
        replace(plain, optimizer="cpu", repeats=True),
        replace(plain, params="none", zero_init=False, repeats=True),
        replace(plain, family="unused"),
        replace(plain, family="alternating", resume_at=3, steps=5),
        replace(plain, family="alternating", resume_at=3, steps=5, sections=WHOLE, repeats=True),
        replace(plain, masters="states", accumulation=2, clipping=1.0),
        replace(plain, masters="weights", world=2, limit_bytes=LIMIT_SMALL_BYTES),
        replace(fp16, masters="weights", repeats=True),
        replace(plain, resume_at=7, steps=12, cycle=True),
        replace(plain, resume_at=7, steps=12, cycle=True, sections=WHOLE, repeats=True),
    ]


def covering_rows() -> list[Row]:
    """Rows of value numbers, one per dimension, in which every possible pair occurs."""
    generator = random.Random(0)
    sizes = [len(values) for values in DIMENSIONS.values()]
    wanted = possible_pairs()
    rows: list[Row] = []
    while wanted:
        (one, one_value), (other, other_value) = min(wanted)
        candidates = []
        for _ in range(200):
            row = [generator.randrange(size) for size in sizes]
            row[one], row[other] = one_value, other_value
            candidates.append(_allowed(row))
        best = max(candidates, key=lambda row: len(wanted & set(_pairs(row))))
        wanted -= set(_pairs(best))
        rows.append(best)
    return rows


def possible_pairs() -> set[Pair]:
    sizes = [len(values) for values in DIMENSIONS.values()]
    pairs = set()
    for one, other in itertools.combinations(range(len(sizes)), 2):
        for values in itertools.product(range(sizes[one]), range(sizes[other])):
            row = [0] * len(sizes)
            row[one], row[other] = values
            allowed = _allowed(row)
            if (allowed[one], allowed[other]) == values:
                pairs.add(((one, values[0]), (other, values[1])))
    return pairs


def _pairs(row: Row) -> Iterator[Pair]:
    return itertools.combinations(enumerate(row), 2)  # type: ignore[return-value]


def _allowed(row: list[int]) -> Row:
    """The nearest row that can be run: only transformers can checkpoint."""
    names = list(DIMENSIONS)
    family = DIMENSIONS["family"][row[names.index("family")]]["family"]
    if family not in TRANSFORMERS:
        row[names.index("checkpointing")] = 0
    return tuple(row)


def _case(row: Row) -> Case:
    fields: dict[str, Any] = {}
    for values, number in zip(DIMENSIONS.values(), row, strict=True):
        fields |= values[number]
    return Case(**fields)
