"""The promise of the product: with the block, training gives the bits it gave without.

Losses, gradient norms, loss scales, skipped steps, 16-bit weights and fp32 master weights are
compared with DeepSpeed's CPU offload, not with its NVMe offload, which is wrong in the cases that
test_stock_parity.py lists. matrix.py says which combinations are run and why these.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from memascend.plan.derive import derive
from memascend.plan.request import PlanRequest
from memascend.plan.shapes import from_module
from tests.support.parity_cases import (
    assert_activations_went,
    assert_memascend_did_it,
    assert_steps_went_behind,
    case_name,
    quick,
)

from . import matrix, models, muon
from .cases import Case, deepspeed_json
from .workers import Bench, differences

pytestmark = pytest.mark.deepspeed


@pytest.mark.parametrize("case", quick(matrix.training_cases(), 1, 3, 17), ids=case_name)
def test_training_gives_the_bits_of_cpu_offload(bench: Bench, case: Case) -> None:
    facts = bench.run(case, "memascend")
    assert differences(facts, bench.run(case, "oracle")) == []
    assert_memascend_did_it(case, facts)


@pytest.mark.parametrize(
    "case",
    quick(matrix.section_cases(), *range(12), 20),
    ids=case_name,
)
def test_every_section_alone_gives_the_bits_of_cpu_offload(bench: Bench, case: Case) -> None:
    facts = bench.run(case, "memascend")
    assert differences(facts, bench.run(case, "oracle")) == []
    for rank in facts:
        armed = "memascend." if case.sections else "deepspeed."
        assert rank["optimizer_class"].startswith(armed)


@pytest.mark.parametrize("case", quick(matrix.limit_cases(), 0), ids=case_name)
def test_within_a_limit_training_gives_the_bits_of_cpu_offload(bench: Bench, case: Case) -> None:
    facts = bench.run(case, "memascend")
    assert differences(facts, bench.run(case, "oracle")) == []
    for rank in facts:
        assert all(name.startswith("memascend.") for name in rank["swapper_classes"])
        if case.params == "nvme":
            assert set(rank["placement"]) == {"nvme"}
        ledger = rank["ledger"]
        assert 0 < ledger["held_bytes_peak"] <= case.limit_bytes
        if case.optimizer == "nvme":
            assert ledger["live_bytes"] == pytest.approx(ledger["planned_bytes"], rel=0.02)
        stays = case.limit_bytes >= matrix.LIMIT_HALF_BYTES
        assert (ledger["drive"]["resident_bytes_read"] > 0) == stays


@pytest.mark.parametrize("case", quick(matrix.resume_cases(), 9, 13, 28), ids=case_name)
def test_a_resumed_run_gives_the_bits_of_one_never_interrupted(bench: Bench, case: Case) -> None:
    facts = bench.run(case, "memascend")
    assert differences(facts, bench.run(case, "oracle")) == []
    for rank in facts:
        assert rank["optimizer_class"].startswith("memascend.")


@pytest.mark.parametrize("case", quick(matrix.volume_cases(), 4), ids=case_name)
def test_over_several_drives_training_gives_the_bits_of_cpu_offload(
    bench: Bench, case: Case
) -> None:
    facts = bench.run(case, "memascend")
    assert differences(facts, bench.run(case, "oracle")) == []
    assert_memascend_did_it(case, facts)


@pytest.mark.parametrize("case", quick(matrix.verify_cases(), 1), ids=case_name)
def test_with_everything_compared_training_gives_the_bits_of_cpu_offload(
    bench: Bench, case: Case
) -> None:
    facts = bench.run(case, "memascend")
    assert differences(facts, bench.run(case, "oracle")) == []
    assert_memascend_did_it(case, facts)
    for rank in facts:
        drive = rank["ledger"]["drive"]
        assert drive["bytes_verified"] > 0
        assert (drive["bytes_read_back"] > 0) == (case.verify == "full")
        assert drive["mismatches"] == 0
        rows = {row["component"]: row for row in rank["ledger"]["rows"]}
        if case.sections == matrix.SECTIONS:  # without the streams there is no plan
            assert rows["checksums"]["planned_bytes"] == rows["checksums"]["peak_bytes"]


@pytest.mark.parametrize("case", quick(matrix.streaming_cases(), 4, 7, 11, 17), ids=case_name)
def test_streams_give_the_bits_of_cpu_offload(bench: Bench, case: Case) -> None:
    facts = bench.run(case, "memascend")
    assert differences(facts, bench.run(case, "oracle")) == []
    assert_memascend_did_it(case, facts)


@pytest.mark.parametrize("case", quick(muon.muon_cases(), 0, 1, 2), ids=case_name)
def test_muon_matrix_by_matrix_gives_the_bits_of_cpu_offload(bench: Bench, case: Case) -> None:
    facts = bench.run(case, "memascend")
    assert differences(facts, bench.run(case, "oracle")) == []
    assert_memascend_did_it(case, facts)
    for rank in facts:
        assert not any("not used" in line for line in rank["warnings"])
        ledger = rank["ledger"]
        rows = {row["component"] for row in ledger["rows"] if row["peak_bytes"] > 0}
        assert "optimizer tiles" in rows  # whole sub-groups would be in other buffers
        if case in muon.muon_family_cases():
            assert rank["applies_updates"]
        if case.limit_bytes:
            assert 0 < ledger["held_bytes_peak"] <= case.limit_bytes
            assert ledger["live_bytes"] == pytest.approx(ledger["planned_bytes"], rel=0.02)


@pytest.mark.parametrize("case", quick(muon.muon_early_cases(), 0, 1, 2), ids=case_name)
def test_muon_during_backward_gives_the_bits_of_cpu_offload(bench: Bench, case: Case) -> None:
    facts = bench.run(case, "memascend")
    assert differences(facts, bench.run(case, "oracle")) == []
    assert_memascend_did_it(case, facts)
    is_early = case.during_backward is True and not case.clipping and case.world == 1
    is_early = is_early and case.boundary != "stepped" and case.accessors == "none"
    assert all((rank["early_tile_count"] > 0) == is_early for rank in facts)


@pytest.mark.parametrize("case", quick(matrix.sum_cases(), 0, 1), ids=case_name)
def test_sums_of_narrower_gradients_have_the_bits_of_cpu_offload(bench: Bench, case: Case) -> None:
    facts = bench.run(case, "memascend")
    assert differences(facts, bench.run(case, "oracle")) == []
    assert_memascend_did_it(case, facts)


@pytest.mark.parametrize("case", quick(matrix.step_cases(), 0, 3, 4), ids=case_name)
def test_steps_behind_their_caller_and_at_once_give_the_bits_of_cpu_offload(
    bench: Bench, case: Case
) -> None:
    facts = bench.run(case, "memascend")
    assert differences(facts, bench.run(case, "oracle")) == []
    assert_memascend_did_it(case, facts)
    assert_steps_went_behind(case, facts)


@pytest.mark.parametrize("case", quick(matrix.activation_cases(), 1, 3, 4, 6), ids=case_name)
def test_with_activations_on_the_drive_training_gives_the_bits_of_cpu_offload(
    bench: Bench, case: Case
) -> None:
    facts = bench.run(case, "memascend")
    assert differences(facts, bench.run(case, "oracle")) == []
    assert_memascend_did_it(case, facts)
    assert_activations_went(case, facts)


@pytest.mark.parametrize("case", quick(matrix.compiled_cases()), ids=case_name)
def test_a_compiled_model_gives_the_bits_of_cpu_offload(bench: Bench, case: Case) -> None:
    facts = bench.run(case, "memascend")
    expected = bench.run(case, "oracle")
    assert differences(facts, expected) == []  # the number of graphs, too
    assert expected[0]["graph_count"] > 0
    assert_memascend_did_it(case, facts)
    if case.saved_bytes is not None:
        assert_activations_went(case, facts)


@pytest.mark.parametrize("case", quick(matrix.stream_choice_cases(), 5), ids=case_name)
def test_every_choice_of_streams_gives_the_bits_of_cpu_offload(bench: Bench, case: Case) -> None:
    facts = bench.run(case, "memascend")
    assert differences(facts, bench.run(case, "oracle")) == []
    assert_memascend_did_it(case, facts)


@pytest.mark.parametrize("case", quick(matrix.early_cases(), 0, 1, 8), ids=case_name)
def test_steps_during_backward_give_the_bits_of_cpu_offload(bench: Bench, case: Case) -> None:
    facts = bench.run(case, "memascend")
    assert differences(facts, bench.run(case, "oracle")) == []
    assert_memascend_did_it(case, facts)
    # The end of a window that is stated after its backward pass comes too late. Where a script
    # needs gradients they are not used up.
    is_kept = case.clipping > 0 or case.during_backward == "auto"
    is_early = case.boundary != "stepped" and (case.accessors == "none" or is_kept)
    assert all((rank["early_tile_count"] > 0) == is_early for rank in facts)


@pytest.mark.parametrize("case", quick(matrix.script_cases(), 0, 1), ids=case_name)
def test_what_scripts_do_with_parameters_gives_the_bits_of_cpu_offload(
    bench: Bench, case: Case
) -> None:
    facts = bench.run(case, "memascend")
    assert differences(facts, bench.run(case, "oracle")) == []
    assert_memascend_did_it(case, facts)


@pytest.mark.parametrize("case", quick(matrix.inference_cases(), 0), ids=case_name)
def test_inference_gives_the_bits_of_cpu_offload(bench: Bench, case: Case) -> None:
    facts = bench.run(case, "memascend")
    assert differences(facts, bench.run(case, "oracle")) == []
    assert all(rank["swapper_classes"][0].startswith("memascend.") for rank in facts)


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    "circumstance",
    [{}, {"clipping": 1.0, "dtype": "fp16", "steps": 6}, {"pipeline": True}],
    ids=str,
)
def test_a_layer_used_now_and_then_gives_the_bits_of_cpu_offload(
    bench: Bench, world: int, circumstance: dict[str, Any]
) -> None:
    """CPU offload steps a tensor that had no gradient with the one it had in an earlier step.

    That gradient was unscaled and clipped once for every step since. Stock NVMe steps such a tensor
    with whatever the swap buffer holds.
    """
    case = Case(family="alternating", world=world, **circumstance)
    assert differences(bench.run(case, "memascend"), bench.run(case, "oracle")) == []


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.full)])
def test_an_optimizer_that_looks_at_whole_tensors_is_named_once(bench: Bench, world: int) -> None:
    whole, tiled = (
        bench.run(Case(world=world, optimizer_type=name), "memascend")
        for name in ("client", "TorchAdamW")
    )
    (line,) = whole[0]["warnings"]
    assert "NormalisedDescent is not known to work element by element" in line
    assert "sub_group_size" in line
    assert [rank["warnings"] for rank in whole[1:]] == [[]] * (world - 1)
    assert [rank["warnings"] for rank in tiled] == [[]] * world


@pytest.mark.parametrize(
    ("limit_bytes", "accumulation", "expected"),
    [
        (matrix.LIMIT_HALF_BYTES, 1, {"parameters": "part"}),
        (matrix.LIMIT_HALF_BYTES, 4, {"gradients": "part"}),
        (matrix.LIMIT_ALL_PARAMETERS_BYTES, 1, {"parameters": "all", "gradients": "part"}),
        (
            matrix.LIMIT_EVERYTHING_BYTES,
            1,
            dict.fromkeys(("parameters", "gradients", "master weights", "optimizer state"), "all"),
        ),
    ],
)
def test_limits_keep_in_memory_what_they_are_named_for(
    limit_bytes: int, accumulation: int, expected: dict[str, str]
) -> None:
    """Otherwise the cases within a limit would prove less than they seem to."""
    case = Case(limit_bytes=limit_bytes, accumulation=accumulation)
    request = PlanRequest.from_deepspeed(deepspeed_json(case, "memascend", "/drive"))
    plan = derive(
        from_module(models.maker(case.family)()), request=request, limit_bytes=limit_bytes
    )
    kept = {name: nbytes for name, nbytes in plan.resident.items() if nbytes}
    assert {
        name: "part" if nbytes < plan.drive[name] + nbytes else "all"
        for name, nbytes in kept.items()
    } == expected


def test_fp16_case_skips_some_steps_and_takes_others(bench: Bench) -> None:
    """Otherwise the fp16 cases above would prove less than they seem to."""
    facts = bench.run(Case(dtype="fp16", steps=5), "oracle")
    assert 0 < facts[0]["skipped_steps"] < 5


@pytest.mark.full
def test_fifty_steps_overflow_recover_grow_and_overflow_again(bench: Bench) -> None:
    """The same for the long case."""
    facts = bench.run(matrix.streaming_cases()[0], "oracle")
    scales = [float.fromhex(scale) for scale in facts[0]["scales"]]
    changes = [after / before for before, after in itertools.pairwise(scales) if after != before]
    falls_again = [earlier > 1 > later for earlier, later in itertools.pairwise(changes)]
    assert sum(falls_again) >= 3
    assert 5 < facts[0]["skipped_steps"] < 45


@pytest.mark.full
@pytest.mark.parametrize(
    "case", [case for case in matrix.streaming_cases() if 0 < case.clipping < 0.1], ids=case_name
)
def test_clipping_bites_where_it_is_meant_to(bench: Bench, case: Case) -> None:
    norms = bench.run(case, "oracle")[0]["norms"]
    assert all(float.fromhex(norm) > 2 * case.clipping for norm in norms)


def test_one_changed_weight_is_noticed(bench: Bench) -> None:
    """The comparison itself can fail."""
    oracle = bench.run(Case(), "oracle")
    changed = bench.run(Case(modify_weights=True), "oracle")
    assert differences(changed, oracle) != []


def test_matrix_holds_every_possible_pair() -> None:
    rows = matrix.covering_rows()
    for (one, one_value), (other, other_value) in matrix.possible_pairs():
        assert any(row[one] == one_value and row[other] == other_value for row in rows)
