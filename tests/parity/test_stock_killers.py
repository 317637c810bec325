"""Configurations in which DeepSpeed's NVMe offload dies or destroys data, run with the block.

Each test says first how stock 0.19.8 fails. Surviving is not enough: the bits must be the oracle's.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from .cases import Case, deepspeed_json
from .workers import CASE_TIMEOUT_S, Bench, Facts, WorkerGroup, differences

pytestmark = pytest.mark.deepspeed

BILLION = 1_000_000_000
MIB = 1 << 20
PAUSED_TIMEOUT_S = 450.0


def assert_parity(bench: Bench, case: Case) -> list[Facts]:
    facts = bench.run(case, "memascend")
    assert differences(facts, bench.run(case, "oracle")) == []
    return facts


@contextlib.contextmanager
def closing_all(*groups: WorkerGroup) -> Iterator[None]:
    try:
        yield
    finally:
        for group in groups:
            group.stop()


@pytest.mark.full
def test_buffer_size_below_the_embedding_does_not_matter(bench: Bench) -> None:
    # Stock: AssertionError "More elements 1048576 than buffer size 600000" while the model is
    # built.
    assert_parity(bench, Case(buffer_numel=600_000))


@pytest.mark.full
def test_five_buffers_suffice_under_gradient_checkpointing(bench: Bench) -> None:
    # Stock: AssertionError "Not enough buffers 0 for swapping 1". A gathered tensor holds its
    # buffer, the reuse distance of Hugging Face's example keeps tensors gathered, and recomputation
    # gathers a layer before backward has released the one behind it.
    case = Case(checkpointing="reentrant", buffer_count=5, reuse_numel_max=BILLION)
    assert_parity(bench, case)


def test_all_parameters_can_be_gathered_at_once(bench: Bench) -> None:
    # Stock: AssertionError "Not enough buffers 5 for swapping 8", in user code such as generation
    # with an unwrapped model or merging LoRA weights.
    assert_parity(bench, Case(gather_all=True, buffer_count=5, prefetch_numel=0))


@pytest.mark.full
@pytest.mark.parametrize("buffer_count", [24, 40])
def test_a_prefetch_list_may_name_a_parameter_twice(bench: Bench, buffer_count: int) -> None:
    # Stock: AssertionError "param 20 already assigned swap buffer id 16": with buffers in plenty
    # the prefetch window reaches over the use of a tensor in forward and in backward.
    case = Case(buffer_count=buffer_count, reuse_numel_max=BILLION, prefetch_numel=BILLION)
    assert_parity(bench, case)


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_second_model_leaves_the_first_alone(bench: Bench, world: int) -> None:
    # Stock: the second zero.Init removes the folder of the first; the first then aborts the process
    # on reading a file that is gone, or trains on what the second wrote.
    case = Case(world=world, second_model=True)
    facts = assert_parity(bench, case)
    alone = bench.run(Case(world=world, steps=1), "oracle")
    assert differences([rank["second"] for rank in facts], alone) == []


@pytest.mark.full
def test_two_processes_may_share_one_nvme_path(bench: Bench, tmp_path: Path) -> None:
    # Stock: as with a second model; the process that starts later removes the folder of the other.
    folders = [tmp_path / name for name in ("first", "second", "nvme", "signals")]
    for folder in folders:
        folder.mkdir()
    first, second = (WorkerGroup(world=1, folder=folder) for folder in folders[:2])
    case = Case()
    paused_case = replace(case, pause_folder=str(tmp_path / "signals"))
    config = deepspeed_json(case, "memascend", str(tmp_path / "nvme"))
    with ThreadPoolExecutor(1) as thread, closing_all(first, second):
        first_run = thread.submit(first.run, paused_case, config, timeout_s=PAUSED_TIMEOUT_S)
        while not first_run.done() and not (tmp_path / "signals" / "paused").exists():
            time.sleep(0.02)
        second_facts = second.run(case, config, timeout_s=CASE_TIMEOUT_S)
        (tmp_path / "signals" / "go").touch()
        first_facts = first_run.result()
    oracle = bench.run(case, "oracle")
    assert differences(first_facts, oracle) == []
    assert differences(second_facts, oracle) == []
    # Stock: both leave their tensors on the drive.
    assert [path for path in (tmp_path / "nvme").rglob("*") if path.is_file()] == []


@pytest.mark.full
def test_an_unprivileged_user_with_little_lockable_memory_can_train(
    bench: Bench, tmp_path: Path
) -> None:
    # Stock: SIGABRT "nullptr != pinned_buffer" when mlock of the 64 MiB pool is refused, which no
    # script can catch. 8 MiB is what most distributions and `docker run` allow.
    case = Case(buffer_count=8, buffer_numel=4 * MIB)
    assert case.buffer_count * case.buffer_numel * 2 == 64 * MIB
    group = WorkerGroup(world=1, folder=tmp_path, memlock_bytes=8 * MIB)
    config = deepspeed_json(case, "memascend", str(bench.new_nvme_path()))
    with closing_all(group):
        facts = group.run(case, config, timeout_s=CASE_TIMEOUT_S)
    assert differences(facts, bench.run(case, "oracle")) == []
