"""Tiles: memory, and what is in flight on it."""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Callable

import pytest
import torch

from memascend.base.interfaces import TensorIO
from memascend.errors import StoreError
from memascend.nvme.store import MemoryFaults
from memascend.plan.knobs import choose_knobs, spare_count
from memascend.plan.request import PlanRequest
from memascend.streaming.gradients.stream import GradientStream
from memascend.streaming.optimizer.tile_memory import TileMemory, TileShape
from tests.support.plan_models import decoder
from tests.support.streaming_fakes import FakeStore
from tests.support.streaming_hosts import HostTensors, memory_store, staging_slots
from tests.support.tiled_training import Training, gradients, tile_shape

NUMEL = 4096
#: Dtypes of Adam's moments, by form.
FORMS = {
    "int8": {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8},
    "int8/bf16": {"exp_avg": torch.int8, "exp_avg_sq": torch.bfloat16},
}


def tiles_of(
    store: TensorIO,
    *,
    count: int = 2,
    state_dtype: torch.dtype = torch.float32,
    wait_idle: Callable[[], object] | None = None,
) -> TileMemory:
    shape = TileShape(
        numel=NUMEL,
        count=count,
        state_count=1,
        master_dtype=torch.float32,
        state_dtype=state_dtype,
        gradient_dtype=torch.float32,
        parameter_dtype=torch.float32,
    )
    return TileMemory(store=store, memory=HostTensors(), shape=shape, wait_idle=wait_idle)


def test_the_memory_of_the_tiles_is_what_they_say() -> None:
    training = Training(torch.optim.Adam)
    assert sum(training.memory.nbytes.values()) == training.tiles.nbytes
    training.step(gradients(0, torch.bfloat16), 1.0)
    assert sum(training.memory.nbytes.values()) == training.tiles.nbytes


def test_states_in_bf16_take_half_of_the_memory() -> None:
    wide = tiles_of(memory_store())
    narrow = tiles_of(memory_store(), state_dtype=torch.bfloat16)
    assert wide.nbytes - narrow.nbytes == 2 * NUMEL * 2  # of two tiles, two bytes an element
    tile = narrow.take("group", 0, 100)
    for number in (0, 1):  # the second is made when it appears
        block = narrow.state(tile, number, torch.bfloat16)
        assert (block.dtype, block.numel()) == (torch.bfloat16, 100)
    assert narrow.nbytes - (wide.nbytes - 2 * NUMEL * 2) == 2 * NUMEL


@pytest.mark.parametrize("numel", [4096, 3 * 4096, 1 << 17])
@pytest.mark.parametrize("form", FORMS)
def test_states_in_codes_take_the_memory_that_the_plan_says(form: str, numel: int) -> None:
    shape = tile_shape(numel=numel, count=3, moments=FORMS[form], spare_count=2)
    memory = HostTensors()
    tiles = TileMemory(store=memory_store(), memory=memory, shape=shape)
    request = PlanRequest(state_dtype=form, during_backward=True)
    knobs = choose_knobs(decoder(), request, None)
    knobs = dataclasses.replace(knobs, tile_numel=numel, tile_count=3)
    planned = knobs.host(request)["optimizer tiles"]
    spares = spare_count(request, 3) - 2
    assert memory.nbytes["optimizer tiles"] == planned - 2 * numel * spares
    tile = tiles.take("group", 0, numel)
    for number, dtype in enumerate(shape.moments.values()):
        assert tiles.state(tile, number, dtype).dtype == dtype
    assert tiles.scales(tile).numel() == len(shape.coded) * numel // 128


def test_what_was_written_is_read_and_the_last_tile_is_shorter() -> None:
    store = memory_store()
    tiles = tiles_of(store)
    store.reserve(key="weights", nbytes=4 * (NUMEL + 5))
    for begin in tiles.begins(NUMEL + 5):
        tile = tiles.take("group", begin, NUMEL + 5)
        tile.master.fill_(begin)
        tiles.write(tile, "weights", tile.master)
        tiles.retire(tile)
    tiles.drain()
    assert tile.numel == 5
    found = torch.empty(NUMEL + 5)
    store.read(key="weights", target=found).wait()
    assert torch.equal(found, (torch.arange(NUMEL + 5) // NUMEL * NUMEL).float())


def test_an_error_is_raised_once_and_every_tile_is_idle_again() -> None:
    faults = MemoryFaults()
    store = memory_store(faults)
    tiles = tiles_of(store)
    store.reserve(key="weights", nbytes=8 * NUMEL)
    faults.gone = errno.EROFS
    taken = [tiles.take("group", begin, 2 * NUMEL) for begin in tiles.begins(2 * NUMEL)]
    for tile in taken:
        tiles.write(tile, "weights", tile.master)
        tiles.retire(tile)
    with pytest.raises(StoreError):
        tiles.drain()
    tiles.drain()
    assert not tiles.has_retired()
    assert tiles.has_idle()


def test_room_for_more_states_is_made_when_they_appear() -> None:
    tiles = tiles_of(memory_store())
    before = tiles.nbytes
    tile = tiles.take("group", 0, 100)
    assert tiles.state(tile, 2, torch.float32).shape == (100,)
    assert tiles.nbytes == before + 2 * 4 * NUMEL


def test_a_tile_that_ctrl_c_left_in_flight_is_not_lent_before_its_writes_are_over() -> None:
    store = FakeStore()
    tiles = tiles_of(store, count=1)
    tile = tiles.take("group", 0, NUMEL)
    for key in "ab":
        store.reserve(key=key, nbytes=4 * NUMEL)
        tiles.write(tile, key, tile.master.fill_(7.0))
    tiles.retire(tile)
    store.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        tiles.drain()
    store.interrupts = False
    assert not tiles.has_idle()
    tiles.take("group", 0, NUMEL).master.fill_(9.0)
    for key in "ab":
        assert torch.equal(store.value(key, torch.float32), torch.full((NUMEL,), 7.0))


def test_gradients_that_come_before_their_tile_have_blocks_of_its_own_kind() -> None:
    training = Training(torch.optim.Adam, spare_count=2)
    tiles = training.tiles
    assert sum(training.memory.nbytes.values()) == tiles.nbytes
    first, second = tiles.acquire_spare(), tiles.acquire_spare()
    assert tiles.acquire_spare() is None
    assert first is not None
    assert second is not None
    assert first.slot_bytes == tiles.take("group", 0, 100).raw.nbytes
    first.release()
    first = tiles.acquire_spare()
    assert first is not None
    del second  # Ctrl-C left it to no one
    assert tiles.acquire_spare() is not None


# -- after Ctrl-C ----------------------------------------------------------------------------------


def lost_in_flight(store: FakeStore, tiles: TileMemory, key: str) -> None:
    """Drop a tile while it is written."""
    store.reserve(key=key, nbytes=4 * NUMEL)
    tile = tiles.take("group", 0, NUMEL)
    tiles.write(tile, key, tile.master.fill_(7.0))


def test_a_tile_that_ctrl_c_left_without_a_reference_is_idle_once_its_write_is_over() -> None:
    store = FakeStore()
    tiles = tiles_of(store, count=1)
    lost_in_flight(store, tiles, "a")
    assert not tiles.has_idle()
    tiles.take("group", 0, NUMEL).master.fill_(9.0)  # waits for the store
    assert torch.equal(store.value("a", torch.float32), torch.full((NUMEL,), 7.0))


def test_a_tile_that_ctrl_c_left_without_a_reference_waits_for_copies_of_the_device() -> None:
    waits: list[str] = []
    tiles = tiles_of(FakeStore(), count=1, wait_idle=lambda: waits.append("idle"))
    tiles.retire(tiles.take("group", 0, NUMEL))
    assert tiles.has_idle()
    assert waits == []  # the events of a retired tile are known
    tiles.take("group", 0, NUMEL)
    assert tiles.has_idle()
    assert waits == ["idle"]


def test_a_read_of_a_gradient_keeps_its_tile() -> None:
    store = FakeStore()
    tiles = tiles_of(store, count=1)
    gradients = GradientStream(store=store, slots=staging_slots(store))
    gradients.put("group", 0, torch.ones(NUMEL))
    gradients.submit()
    tile = tiles.take("group", 0, NUMEL)
    [ticket] = gradients.start_read("group", 0, tile.raw, hold=tile.memory)
    del tile
    assert not tiles.has_idle()
    ticket.wait()
    assert tiles.has_idle()


def test_blocks_for_more_states_stay_with_the_slot_of_a_lost_tile() -> None:
    tiles, nbytes = tiles_of(FakeStore(), count=1), []
    for _ in range(2):
        tile = tiles.take("group", 0, NUMEL)
        tiles.state(tile, 1, torch.float32)
        nbytes.append(tiles.nbytes)
        del tile
    assert nbytes[0] == nbytes[1]


def test_when_every_tile_is_taken_one_more_is_a_mistake_and_no_endless_wait() -> None:
    tiles = tiles_of(FakeStore(), count=1)
    taken = tiles.take("group", 0, NUMEL)
    with pytest.raises(AssertionError, match="every tile is taken"):
        tiles.take("group", 0, NUMEL)
    tiles.retire(taken)
