"""Cases of DeepSpeed's Muon: their own variations beside matrix.py's, and the runs that resume.

- Matrices that ranks cut, and that get no gradient in some steps.
- Updates that are written, with clipping or a loss scale, and applied as they are made, also during
  backward.
- Runs that end in one mode and go on in another: clipped and not, master weights whole and in
  halves, CPU offload's and ours.
- Batches and lists of experts, fewer heads of keys than of queries, a head alone.

Matrices of "odd" and "gpt2" are cut by two ranks at odd places, those of "llama" by none; two ranks
say as much as one of heads, of experts in lists, and of gradients that are set. The others repeat.
"""

from __future__ import annotations

from dataclasses import replace

from .cases import CLIPPING_NEVER, SUB_GROUP_LARGE_NUMEL, Case
from .matrix import LIMIT_EVERYTHING_BYTES, LIMIT_LARGE_BYTES, LIMIT_SMALL_BYTES

FAMILIES = ("llama", "qwen", "gpt2", "mixtral", "odd")


def muon_cases() -> list[Case]:
    """Muon, whose matrices are updated one by one: a matrix may be cut by ranks, and be stale."""
    plain = Case(optimizer_type="Muon")
    clipped = replace(plain, clipping=1.0)
    return [
        replace(clipped, limit_bytes=LIMIT_LARGE_BYTES),
        replace(clipped, world=2, family="odd", accumulation=3),
        *muon_family_cases(),
        plain,
        replace(plain, dtype="fp16", steps=6, scale_power=16, scale_window=2, clipping=1.0),
        replace(plain, dtype="fp16", world=2, steps=5, repeats=True),
        replace(plain, family="alternating", accumulation=3, steps=5, world=2),
        replace(clipped, family="alternating", steps=5, repeats=True),
        replace(plain, gradients_in_fp32=True, accumulation=2),
        replace(
            plain,
            family="mixtral",
            params="cpu",
            sub_group_numel=SUB_GROUP_LARGE_NUMEL,
            repeats=True,
        ),
        replace(plain, family="unused", params="none"),
        replace(
            plain, family="qwen", dtype="fp32", world=2, limit_bytes=LIMIT_LARGE_BYTES, repeats=True
        ),
        replace(plain, family="lora"),
        replace(plain, accessors="read"),
        # After the third step: in the fourth one some matrices get no gradient.
        replace(plain, accessors="set", family="alternating", steps=5, repeats=True),
        replace(plain, accessors="set", family="alternating", steps=5, world=2),
        # Batches of experts, which ranks cut.
        replace(plain, accessors="change", world=2, family="mixtral"),
        replace(plain, verify="full", volumes=("3", "1", "2"), resume_at=2, steps=4, repeats=True),
        replace(plain, saver="cpu", resume_at=2, steps=4, repeats=True),
        replace(plain, saver="other tiles", resume_at=3, steps=5, accumulation=2),
        *muon_resumed_cases(),
        # Heads of queries, and fewer of keys and values.
        replace(plain, optimizer_type="MuonPerHead", repeats=True),
        replace(plain, optimizer_type="MuonPerHead", family="qwen", world=2, clipping=1.0),
        # Experts in lists, some without a token.
        replace(plain, family="leaves", steps=4, repeats=True),
        replace(plain, family="leaves", world=2, clipping=1.0, resume_at=2, steps=4),
        replace(plain, limit_bytes=LIMIT_EVERYTHING_BYTES, accumulation=4, repeats=True),
        replace(clipped, gather_all=True, modify_weights=True),
    ]


def muon_family_cases() -> list[Case]:
    """Every family with one rank and two, in runs that resume."""
    plain = Case(optimizer_type="Muon", resume_at=2, steps=4)
    alone = ("llama", 1), ("odd", 2)
    return [
        replace(plain, family=name, world=world, repeats=(name, world) not in alone)
        for name in FAMILIES
        for world in (1, 2)
    ]


def muon_resumed_cases() -> list[Case]:
    """Muon's runs that end in one mode and go on in another.

    Updates are written with a limit of norms that none reaches, and applied without.
    """
    plain = Case(optimizer_type="Muon", resume_at=2, steps=4)
    clipped = replace(plain, clipping=CLIPPING_NEVER)
    return [
        replace(plain, saver="clipped", repeats=True),
        replace(clipped, saver="not clipped", world=2, family="odd"),
        replace(clipped, saver="cpu", world=2, family="gpt2"),
        replace(plain, saver="whole masters", repeats=True),
        replace(plain, is_portable=False, family="odd"),
        replace(plain, saver="halves", split_master=False, world=2, family="odd"),
        replace(plain, saver="limit", world=2, repeats=True),
        replace(plain, family="alternating", resume_at=3, steps=5, repeats=True),
    ]


def muon_early_cases() -> list[Case]:
    """Muon whose steps begin during backward, and reasons for steps after it."""
    early = Case(optimizer_type="Muon", during_backward=True, steps=5)
    return [
        early,
        # Some steps are left out, the scale grows in some.
        replace(early, dtype="fp16", steps=8, scale_power=16, scale_window=2, accumulation=2),
        replace(early, family="unused", accumulation=3, scheduler=True),
        replace(early, resume_at=3, steps=7),
        replace(early, family="alternating", accumulation=4),
        replace(early, family="mixtral", sub_group_numel=SUB_GROUP_LARGE_NUMEL, repeats=True),
        replace(early, gradients_in_fp32=True, accumulation=2, modify_weights=True),
        replace(early, limit_bytes=LIMIT_SMALL_BYTES, gather_all=True),
        replace(early, limit_bytes=LIMIT_LARGE_BYTES, repeats=True),
        # Gradients are looked at in the second step; later they may be used up.
        replace(early, accessors="change", steps=3),
        replace(early, boundary="stepped", accumulation=3, repeats=True),
        replace(early, verify="full", volumes=("3", "1", "2"), split_master=False, repeats=True),
        replace(
            early, saver="cpu", resume_at=2, dtype="fp16", scale_power=10, steps=6, repeats=True
        ),
        replace(early, family="odd", walk="off", persistence_numel=0, repeats=True),
        # After backward: with clipping, several ranks, and where nobody demands it.
        replace(early, clipping=1.0, repeats=True),
        replace(early, world=2),
        replace(early, during_backward="auto", steps=14),
    ]
