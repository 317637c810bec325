"""What is counted equals what a look at all of it finds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memascend.ledger.traffic import ActivationTraffic
from memascend.streaming.activations.records import AHEAD, HELD, Act, Activation, State
from memascend.streaming.activations.saved import Saved
from tests.support.activation_streams import activation_stream, numbers

NBYTES = numbers(0).nbytes


def test_each_state_counts_and_queues_what_it_stands_for() -> None:
    saved = Saved(ActivationTraffic())
    activation = saved.add(numbers(0), None)
    record = activation.record
    expected = {
        Act.START_WRITE: (1, 0, 1, False, False),
        Act.END_WRITE: (0, 0, 0, False, True),
        Act.START_PREFETCH: (0, 1, 1, False, False),
        Act.END_READ: (0, 1, 1, False, False),
        Act.TAKE: (0, 0, 1, False, False),
    }
    assert list(saved.waiting) == [0]
    for act, (held, ahead, device, waits, is_next) in expected.items():
        saved.change(record, act)
        counted = (saved.held_bytes, saved.ahead_bytes, saved.device_bytes)
        assert counted == (held * NBYTES, ahead * NBYTES, device * NBYTES), act
        assert (0 in saved.waiting, saved.stack.prefetches(0)) == (waits, is_next), act


def test_a_storage_that_was_taken_is_not_prefetched_again() -> None:
    saved = Saved(ActivationTraffic())
    record = saved.add(numbers(0), None).record
    record.was_taken = True
    for act in (Act.TAKE, Act.RELEASE, Act.START_WRITE, Act.END_WRITE):
        saved.change(record, act)
    assert record.state is State.STORED
    assert saved.stack.next_before(1) is None


def test_giving_up_can_be_repeated() -> None:
    saved = Saved(ActivationTraffic())
    record = saved.add(numbers(0), None).record
    for _ in range(2):
        saved.remove(record)
        assert (saved.held_bytes, saved.device_bytes, saved.waiting, saved.records) == (
            0,
            0,
            {},
            {},
        )
    assert saved.stack.largest() == 0


def test_the_urgent_one_is_read_first() -> None:
    saved = Saved(ActivationTraffic())
    records = [saved.add(numbers(seed), None).record for seed in range(3)]
    saved.reads.extend(records)
    saved.read_first(records[2])
    assert list(saved.reads) == [records[2], records[0], records[1]]


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
        elif saved and (action == "take" or saved[which % len(saved)].record.was_taken):
            getattr(stream, action)(saved[which % len(saved)])
        stream.drain()
        book = stream._saved
        records = book.records.values()
        on_device = sum(one.nbytes for one in records if one.data is not None)
        peak_bytes = max(peak_bytes, on_device)
        assert book.device_bytes == on_device
        assert book.held_bytes == sum(one.nbytes for one in records if one.state in HELD)
        assert book.ahead_bytes == sum(one.nbytes for one in records if one.state in AHEAD)
        assert book.stack.largest() == max((one.nbytes for one in records), default=0)
        waiting = {one.number for one in records if one.state is State.WAITING}
        assert set(book.waiting) == waiting
        unread = [o.number for o in records if o.state is State.STORED and not o.was_taken]
        assert [one.number for one in records if book.stack.prefetches(one.number)] == unread
    assert stream.traffic.device_bytes_peak >= peak_bytes
    stream.close()
