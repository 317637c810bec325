"""The registry of sub-groups: states of one value, single values, loads, and space given back."""

from __future__ import annotations

import errno

import torch

from memascend.nvme.store import MemoryFaults
from memascend.streaming.optimizer.sub_group import Member
from tests.support.streaming_hosts import memory_store
from tests.support.tiled_training import SIZES, Training, gradients


def test_states_that_begin_as_one_value_are_not_written_before_they_change() -> None:
    training = Training(torch.optim.Adam)
    for name in SIZES:
        training.groups.add_state(name, "exp_avg", torch.float32, 0.0)
        training.groups.add_state(name, "exp_avg_sq", torch.float32, 0.5)
        training.optimizer.state[training.parameters[name]] = {"step": torch.tensor(0.0)}
    assert training.master("0_3", "exp_avg_sq").unique().tolist() == [0.5]
    training.step(gradients(0, torch.bfloat16), 1.0)
    expected = 0.5 * 0.999 + 0.001 * gradients(0, torch.bfloat16)["4_4"].float().square()
    assert torch.allclose(training.master("4_4", "exp_avg_sq"), expected)


def test_single_values_are_read_and_replaced() -> None:
    training = Training(torch.optim.Adam)
    training.groups.add_state("0_3", "exp_avg", torch.float32, 2.0)
    value = torch.full((5000,), 7.0)
    training.groups.set("0_3", 3000, value, state="exp_avg")
    training.groups.set("0_3", 11, value, state=None)
    expected = torch.full((SIZES["0_3"],), 2.0)
    expected[3000:8000] = 7.0
    assert torch.equal(training.master("0_3", "exp_avg"), expected)
    expected = training.initial["0_3"].clone()
    expected[11:5011] = 7.0
    assert torch.equal(training.master("0_3"), expected)


def test_discarding_gives_the_space_back() -> None:
    training = Training(torch.optim.Adam)
    training.step(gradients(0, torch.bfloat16), 1.0)
    training.groups.discard()
    training.gradient_stream.discard()
    assert all(key.startswith("param.") for key in training.store.keys())  # noqa: SIM118


def test_after_a_drive_failed_discarding_is_no_second_error() -> None:
    faults = MemoryFaults()
    training = Training(torch.optim.AdamW, store=memory_store(faults))
    training.step(gradients(0, torch.bfloat16), 1.0)
    tile = training.tiles.take("0_3", 0, SIZES["0_3"])
    faults.gone = errno.EROFS
    training.tiles.write(tile, "master.0_3", tile.master)
    training.tiles.retire(tile)
    training.groups.discard()
    assert all(key.startswith(("param.", "grad")) for key in training.store.keys())  # noqa: SIM118


def test_master_weights_are_the_values_of_members_on_the_drive_and_in_memory() -> None:
    training = Training(torch.optim.Adam)
    members = []
    for index, numel in enumerate((5000, 6001)):
        value = torch.arange(numel, dtype=torch.float32).bfloat16()
        key = f"param.{index}"
        training.store.reserve(key=key, nbytes=value.nbytes)
        training.store.write(key=key, source=value).wait()
        where = {"tensor": value} if index else {"key": key}
        members.append(Member(5000 * index, numel, value.dtype, **where))
    counts: list[int] = []
    training.groups.create("new", 11_001, members, counts.append)
    assert sum(counts) == 4 * 11_001
    assert len(counts) > 1, "of each tile"
    found = torch.empty(11_001)
    training.groups.get("new", 0, found, state=None)
    parts = [torch.arange(numel).float().bfloat16().float() for numel in (5000, 6001)]
    assert torch.equal(found, torch.cat(parts))


def test_what_is_loaded_takes_the_place_of_a_value_not_written_yet() -> None:
    training = Training(torch.optim.Adam)
    name = "4_4"
    training.groups.add_state(name, "exp_avg", torch.float32, 2.0)
    training.groups.load(
        name, state="exp_avg", dtype=torch.float32, source=lambda _, target: target.zero_()
    )
    training.groups.settle()
    assert not training.master(name, "exp_avg").any()


# -- states that tiles do not have -----------------------------------------------------------------


def apart(training: Training, name: str = "4_4") -> torch.Tensor:
    """Give a sub-group such a state, and return the values that are written to it."""
    training.groups.group(name).apart = frozenset({"momentum"})
    training.groups.add_state(name, "momentum", torch.bfloat16, 0.0)
    numel = SIZES[name]
    return torch.randn(numel, generator=torch.Generator().manual_seed(0)).bfloat16()


def test_a_step_neither_reads_nor_writes_a_state_apart() -> None:
    training = Training(torch.optim.AdamW)
    value = apart(training)
    training.groups.set("4_4", 0, value, state="momentum")
    training.groups.add_state("4_4", "exp_avg", torch.float32, 0.0)
    training.groups.add_state("4_4", "exp_avg_sq", torch.float32, 0.0)
    parameter = training.parameters["4_4"]
    training.optimizer.state[parameter] = {"step": torch.tensor(0.0)}
    training.step(gradients(0, torch.bfloat16), 1.0)
    assert training.master("4_4", "exp_avg").any()
    assert torch.equal(training.master("4_4", "momentum"), value.float())
    assert "momentum" not in training.groups.group("4_4").tile_states


def test_a_step_leaves_a_state_apart_that_was_not_written_yet() -> None:
    training = Training(torch.optim.SGD)
    apart(training)
    training.groups.group("4_4").note_stepped()
    assert not training.master("4_4", "momentum").any()
