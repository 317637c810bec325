"""What is counted equals what a look at all of it finds."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from memascend.ledger.traffic import ActivationTraffic
from memascend.streaming.activations.records import Activation, Record, State
from memascend.streaming.activations.saved_sizes import RunningMaximum, SavedSizes
from tests.support.activation_streams import activation_stream, numbers


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans(), st.integers(0, 99)), max_size=90))
def test_the_largest_before_a_number_is_that_of_a_scan(steps: list[tuple[int, bool, int]]) -> None:
    maximum, sizes = RunningMaximum(), {}
    for number, (nbytes, removes, which) in enumerate(steps):
        maximum.add(2 * number, nbytes)
        sizes[2 * number] = nbytes
        if removes:
            removed = list(sizes)[which % len(sizes)]
            del sizes[removed]
            maximum.remove(removed)
            maximum.remove(removed)
        assert maximum.largest() == max(sizes.values(), default=0)
        for end in (which, 2 * number, 2 * number + 1):
            before = [size for one, size in sizes.items() if one < end]
            assert maximum.largest(end) == max(before, default=0)


def test_what_is_removed_leaves_its_place_to_others() -> None:
    maximum = RunningMaximum()
    for number in range(1000):
        maximum.add(number, 7)
        if number:  # one stays
            maximum.remove(number)
    assert len(maximum._tree) <= 64
    assert maximum.largest() == maximum.largest(1) == 7


def test_each_is_counted_once_however_often_it_is_told() -> None:
    sizes = SavedSizes(ActivationTraffic())
    data = torch.empty(5, dtype=torch.uint8)
    record = Record(0, 5, None, data, None, torch.device("cpu"), 0)
    sizes.add(record)
    for _ in range(2):
        sizes.count(record, is_held=True, is_ahead=True)
        sizes.note_device(record)
        assert (sizes.held_bytes, sizes.ahead_bytes, sizes.device_bytes) == (5, 5, 5)
    for _ in range(2):
        sizes.remove(record)
        assert (sizes.held_bytes, sizes.ahead_bytes, sizes.device_bytes) == (0, 0, 0)
    assert sizes.largest() == 0


ACTIONS = ("put", "take", "release", "drop")


@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 20)), max_size=30))
def test_a_stream_counts_what_a_scan_of_its_records_finds(steps: list[tuple[str, int]]) -> None:
    stream = activation_stream(device_bytes=1000)
    saved: list[Activation] = []
    peak_bytes = 0
    for action, which in steps:
        if action == "put":
            saved.append(stream.put(numbers(0, 50 + 10 * which)))
        elif saved and action == "drop":
            del saved[which % len(saved)]
        elif saved and (action == "take" or saved[which % len(saved)].record.is_taken):
            getattr(stream, action)(saved[which % len(saved)])
        stream.settle()
        records, sizes = stream._records.values(), stream._sizes
        on_device = sum(one.nbytes for one in records if one.data is not None)
        peak_bytes = max(peak_bytes, on_device)
        assert sizes.device_bytes == on_device
        assert sizes.largest() == max((one.nbytes for one in records), default=0)
        unread = [
            one.number
            for one in records
            if one.state is State.STORED and one.data is None and not one.was_taken
        ]
        assert stream._ahead._numbers == unread
    assert stream.traffic.device_bytes_peak >= peak_bytes
    stream.close()
