"""States in codes of 8 bits: steps in tiles, single values, checkpoints and faults."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch

from memascend.errors import StoreError
from memascend.kernels.adam import AdamCoefficients, update
from memascend.kernels.codes import SCALE_NUMEL, decode, scale_count
from memascend.nvme.store import MemoryFaults
from memascend.streaming.optimizer.low_bits import LowBits
from memascend.streaming.optimizer.sub_group import MasterForm
from tests.support.adam_steps import USUAL
from tests.support.streaming_hosts import memory_store
from tests.support.tiled_training import SIZES, Training, gradients

MOMENTS = ("exp_avg", "exp_avg_sq")
BOTH = {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8}
FIRST = {"exp_avg": torch.int8, "exp_avg_sq": torch.bfloat16}
#: Forms of moments, and the form of the low bits beside them.
FORMS = [
    (BOTH, LowBits.UNFLAGGED),
    (BOTH, LowBits.REMAINDERS),
    (FIRST, LowBits.FLAGGED),
    (FIRST, LowBits.REMAINDERS),
]
ADAM = AdamCoefficients(**USUAL, gradient_decay=None)


def fused(key: int, *, begin: int, factor: float, values: Any, **tensors: Any) -> None:
    moments = {name: values[name] for name in MOMENTS}
    update(coefficients=ADAM, rounding_key=key, first_index=begin, **moments, **tensors)


def training(
    moments: Mapping[str, torch.dtype] = BOTH,
    low_bits: LowBits = LowBits.UNFLAGGED,
    **options: Any,
) -> Training:
    found = Training(torch.optim.Adam, split=True, low_bits=low_bits, moments=moments, **options)
    for name, parameter in found.parameters.items():
        for moment, dtype in moments.items():
            found.groups.add_state(name, moment, dtype, 0.0)
        found.optimizer.state[parameter] = {}
    return found


def run(one: Training, *numbers: int) -> Training:
    for number in numbers:
        one.step(gradients(number, torch.bfloat16), 1.0, partial(fused, number))
    return one


class InMemory:
    """The same training without a store: whole tensors of one sub-group."""

    def __init__(self, one: Training, name: str) -> None:
        shape, group = one.tiles.shape, one.groups.group(name)
        self.name, numel = name, SIZES[name]
        self.high = one.initial[name].bfloat16()
        self.low = torch.zeros(numel, dtype=group.low_bits.dtype)
        self.moments = {key: torch.zeros(numel, dtype=kind) for key, kind in shape.moments.items()}
        self.scales = torch.zeros(scale_count(numel) * len(shape.coded))

    def step(self, number: int) -> None:
        gradient = gradients(number, torch.bfloat16)[self.name]
        update(
            gradient=gradient,
            weight=self.low,
            output=self.high,
            scales=self.scales,
            coefficients=ADAM,
            rounding_key=number,
            **self.moments,
        )


def stored(one: Training, name: str) -> dict[str, torch.Tensor]:
    """The stored tensors of a sub-group, by key."""
    group = one.groups.group(name)
    found = {}
    for state in (None, *group.state_names):
        dtype = one.groups._dtype(group, state)
        found[state or "low"] = torch.empty(group.stored_numel(state), dtype=dtype)
        one.store.read(key=group.key(state), target=found[state or "low"]).wait()
    return found


@pytest.mark.parametrize(("moments", "low_bits"), FORMS)
@pytest.mark.parametrize("tile_numel", [4096, 24_576])
def test_steps_in_tiles_have_the_bits_of_whole_tensors(
    moments: Mapping[str, torch.dtype], low_bits: LowBits, tile_numel: int
) -> None:
    one = training(moments, low_bits, tile_numel=tile_numel)
    expected = {name: InMemory(one, name) for name in SIZES}
    for number in range(3):
        run(one, number)
        for each in expected.values():
            each.step(number)
    for name, each in expected.items():
        found = stored(one, name)
        assert torch.equal(found["low"], each.low)
        assert torch.equal(found["scales"].isnan(), torch.zeros_like(each.scales, dtype=torch.bool))
        assert torch.equal(found["scales"], each.scales)
        assert torch.equal(one.parameter(name), each.high)
        for moment in MOMENTS:
            assert torch.equal(found[moment], each.moments[moment]), (name, moment)


def test_a_step_writes_the_bytes_of_the_format_and_the_start_none() -> None:
    one = training()
    before = one.store.stats()["bytes_written"]
    run(one, 0)
    found = one.store.stats()["bytes_written"] - before
    # Gradients and members with two bytes each, low halves, two codes and two scales.
    each = 2 + 2 + 2 + 2 + 8 / SCALE_NUMEL
    assert found == pytest.approx(each * sum(SIZES.values()), rel=0.1)


@pytest.mark.parametrize("moments", [BOTH, FIRST])
@pytest.mark.parametrize("state", MOMENTS)
def test_a_range_is_read_as_the_numbers_that_codes_are(
    moments: Mapping[str, torch.dtype], state: str
) -> None:
    one = run(training(moments, LowBits.REMAINDERS), 0, 1)
    found = stored(one, "0_3")
    if moments[state] == torch.bfloat16:
        expected = found[state].float()
    else:
        expected = torch.empty(SIZES["0_3"])
        number, kinds = one.tiles.shape.coded.index(state), len(one.tiles.shape.coded)
        decode(found[state], found["scales"][number::kinds], expected)
    for begin, count in ((0, 20_011), (5, 1), (127, 2), (4000, 5003), (20_000, 11)):
        part = torch.empty(count)
        one.groups.get("0_3", begin, part, state=state)
        assert torch.equal(part, expected[begin : begin + count]), (begin, count)
    assert expected.abs().sum() > 0


@pytest.mark.parametrize("state", MOMENTS)
def test_a_range_is_set_to_the_nearest_and_its_neighbours_stay_near(state: str) -> None:
    one = run(training(), 0, 1)
    before = {name: one.master("0_3", name) for name in MOMENTS}
    begin, count = 130, 3000
    value = torch.rand(count, generator=torch.Generator().manual_seed(0)) * 0.01
    one.groups.set("0_3", begin, value, state=state)
    after = {name: one.master("0_3", name) for name in MOMENTS}
    inside = after[state][begin : begin + count]
    own = slice(256 - begin, 3072 - begin)  # with scales of their own
    assert torch.allclose(inside[own], value[own], rtol=0.1, atol=0.01 * 2**-10)
    most = before[state].abs().max().item()
    assert torch.allclose(inside, value, rtol=0.1, atol=most / 100)
    assert not torch.equal(inside, before[state][begin : begin + count])
    whole = slice(128, 3200)  # the scales that the range has a part of
    beside = torch.ones(SIZES["0_3"], dtype=torch.bool)
    beside[whole] = False
    assert torch.equal(after[state][beside], before[state][beside])
    other = MOMENTS[1 - MOMENTS.index(state)]
    assert torch.equal(after[other], before[other])
    assert torch.allclose(after[state][3130:3200], before[state][3130:3200], atol=most / 100)


def test_a_range_set_before_the_first_step_is_kept_by_the_rest_of_zeros() -> None:
    one = training()
    one.groups.set("4_4", 300, torch.full((100,), 0.5), state="exp_avg")
    found = one.master("4_4", "exp_avg")
    assert found.nonzero().flatten().tolist() == list(range(300, 400))
    assert torch.allclose(found[300:400], torch.tensor(0.5))
    assert one.master("4_4", "exp_avg_sq").abs().sum() == 0
    run(one, 0, 1)


def test_a_second_moment_below_zero_is_refused() -> None:
    one = run(training(), 0)
    with pytest.raises(ValueError, match="exp_avg_sq of sub-group 0_3 would be -1"):
        one.groups.set("0_3", 5, torch.full((100,), -1.0), state="exp_avg_sq")
    with pytest.raises(ValueError, match="exp_avg_sq of sub-group 5_9 would be -2"):
        one.load("5_9", "exp_avg_sq", torch.tensor([1.0, -2.0, 3.0]))
    one.groups.set("0_3", 5, torch.full((100,), -1.0), state="exp_avg")


# -- checkpoints ---------------------------------------------------------------------------------


def streamed(one: Training, name: str, state: str | None) -> torch.Tensor:
    dtype = one.groups.group(name).read_dtypes.get(state or "", torch.float32)
    return torch.cat([part.clone() for part in one.groups.stream(name, state)]).view(dtype)


@pytest.mark.parametrize(("moments", "low_bits"), FORMS)
@pytest.mark.parametrize("order", list(itertools.permutations((None, *MOMENTS))))
def test_fp32_files_give_a_run_back_all_that_it_had(
    moments: Mapping[str, torch.dtype], low_bits: LowBits, order: tuple[str | None, ...]
) -> None:
    saved = run(training(moments, low_bits), 0, 1, 2)
    saved.groups.settle()
    resumed = run(training(moments, low_bits), 7)
    resumed.groups.begin_load()
    resumed.groups.discard_states()
    for state, name in itertools.product(order, SIZES):
        resumed.load(name, state, streamed(saved, name, state))
    for name in SIZES:
        assert list(resumed.groups.group(name).states.items()) == list(moments.items())
    resumed.stream.drain()
    for steps in ((), (3, 4)):
        for one in (saved, resumed):
            run(one, *steps)
        for name in SIZES:
            assert torch.equal(saved.parameter(name), resumed.parameter(name))
            assert torch.equal(saved.master(name), resumed.master(name))
            pairs = zip(stored(saved, name).items(), stored(resumed, name).items(), strict=True)
            for (key, value), (_, found) in pairs:
                # Flags have no meaning while high halves were cut off.
                is_flagged = key == "exp_avg_sq" and low_bits.has_flags
                assert is_flagged or torch.equal(value, found), (name, key)
            for moment in MOMENTS:
                assert torch.equal(saved.master(name, moment), resumed.master(name, moment))


def test_states_that_were_never_stepped_are_saved_as_zeros() -> None:
    one = training()
    one.groups.settle()
    for name, moment in itertools.product(SIZES, MOMENTS):
        assert streamed(one, name, moment).abs().sum() == 0
        assert streamed(one, name, moment).numel() == SIZES[name]


def test_dropped_states_leave_no_key() -> None:
    one = run(training(), 0)
    one.groups.discard_states()
    assert not [key for key in one.store.keys() if key.startswith("state.")]  # noqa: SIM118
    for name, moment in itertools.product(SIZES, MOMENTS):
        one.groups.add_state(name, moment, BOTH[moment], 0.0)
    run(one, 1)


# -- parameters that a script changes ------------------------------------------------------------


@pytest.mark.parametrize(("moments", "low_bits"), FORMS)
def test_a_changed_member_leaves_the_master_weights_as_they_are(
    moments: Mapping[str, torch.dtype], low_bits: LowBits
) -> None:
    changed, plain = (run(training(moments, low_bits), 0, 1) for _ in range(2))
    changed.groups.keep_high("0_3")
    for member in changed.members["0_3"]:
        assert member.key is not None
        value = torch.full((member.numel,), 3.25, dtype=torch.bfloat16)
        changed.store.write(key=member.key, source=value).wait()
    assert changed.groups.group("0_3").form is MasterForm.EXACT
    assert torch.equal(changed.master("0_3"), plain.master("0_3"))
    for one in (changed, plain):
        run(one, 2, 3)
    for name in SIZES:
        assert torch.equal(changed.master(name), plain.master(name))
        assert torch.equal(changed.parameter(name), plain.parameter(name))


@pytest.mark.parametrize(("moments", "low_bits"), FORMS)
def test_a_weight_is_set_as_near_as_the_form_can_hold_it(
    moments: Mapping[str, torch.dtype], low_bits: LowBits
) -> None:
    one = run(training(moments, low_bits), 0)
    value = torch.randn(5000, generator=torch.Generator().manual_seed(3))
    before = one.parameter("0_3")
    one.groups.set("0_3", 11, value, state=None)
    found = one.master("0_3")[11:5011]
    places = 2.0**-15 if low_bits is LowBits.REMAINDERS else 2.0**-23
    assert torch.allclose(found, value, rtol=places, atol=0)
    assert torch.equal(one.parameter("0_3"), before), "CPU offload leaves the parameter, too"
    run(one, 1)


# -- faults --------------------------------------------------------------------------------------


def test_an_error_gives_every_slot_back() -> None:
    faults = MemoryFaults()
    one = run(training(store=memory_store(faults)), 0)
    expected = one.master("0_3", "exp_avg")
    for act in (
        lambda: one.master("0_3", "exp_avg"),
        lambda: one.groups.set("0_3", 7, torch.zeros(9000), state="exp_avg"),
        lambda: list(one.groups.stream("0_3", "exp_avg_sq")),
    ):
        faults.gone = errno.EIO
        for _ in range(4):  # there are three slots
            with pytest.raises(StoreError):
                act()
        faults.gone = 0
    assert torch.equal(one.master("0_3", "exp_avg"), expected)


def test_a_reader_that_stops_early_gives_its_slot_back() -> None:
    one = run(training(), 0)
    for _ in range(4):
        with closing(one.groups.stream("0_3", "exp_avg")) as parts:  # type: ignore[type-var]
            next(iter(parts))
    one.master("0_3", "exp_avg")
