"""What verification costs: the memory of checksums, and what whole grains add on the drive."""

from __future__ import annotations

from typing import Any

import pytest

from memascend.base.components import CHECKSUMS
from memascend.base.sizes import ACTIVATIONS_BYTES
from memascend.plan.checksums import (
    CHECKSUM_BYTES,
    GRAIN_BYTES,
    PAGE_SPAN_BYTES,
    PAGES_BESIDE,
    SLAB_BYTES,
    checksum_bytes,
    rounding_bytes,
)
from memascend.plan.derive import ROUNDING, LimitTooSmallError, PlanRequest, derive
from memascend.plan.shapes import ModelShapes, TensorShape, builtin
from tests.support.plan_models import decoder

PAGES_OF_A_SLAB = SLAB_BYTES * GRAIN_BYTES // CHECKSUM_BYTES // PAGE_SPAN_BYTES


def model(*numels: int, trainable: bool = True) -> ModelShapes:
    return ModelShapes("m", tuple(TensorShape(f"t{n}", (n,), trainable) for n in numels))


def request(**changes: Any) -> PlanRequest:
    return PlanRequest(**{"verify": "reads", **changes})


# -- what is rounded up to grains ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numel", "changes", "added"),
    [
        # The parameter in bf16 alone: one grain has 32768 of them.
        (1, {"optimizer_device": "cpu"}, GRAIN_BYTES - 2),
        (32768, {"optimizer_device": "cpu"}, 0),
        (32769, {"optimizer_device": "cpu"}, GRAIN_BYTES - 2),
        (32769, {"optimizer_device": "cpu", "world": 2}, GRAIN_BYTES - 2 * 16385),
        (32768, {"optimizer_device": "cpu", "precision": "fp32", "world": 2}, 0),
        # The gradient in bf16, master weight and two states in fp32.
        (1, {"parameters_device": "cpu"}, 4 * GRAIN_BYTES - 2 - 3 * 4),
        (1, {"parameters_device": "cpu", "state_count": 0}, 2 * GRAIN_BYTES - 2 - 4),
        (1, {"parameters_device": "cpu", "gradient_accumulation_steps": 2}, 5 * GRAIN_BYTES - 16),
        (1, {"parameters_device": "cpu", "accumulation_dtype": "fp32"}, 4 * GRAIN_BYTES - 16),
        # With micro-steps two gradients in bf16 that wait.
        (
            1,
            {
                "parameters_device": "cpu",
                "accumulation_dtype": "fp32",
                "gradient_accumulation_steps": 3,
            },
            6 * GRAIN_BYTES - 16 - 2 * 2,
        ),
        # A grain has 16384 elements of a master weight, and 32768 of a state in bf16.
        (32768, {"parameters_device": "cpu", "state_dtype": "bf16"}, 0),
        (1, {"parameters_device": "cpu", "state_dtype": "bf16"}, 4 * GRAIN_BYTES - 2 - 4 - 2 * 2),
        # All of them: parameter, gradient, the other half of its master weight, two states.
        (1, {}, 5 * GRAIN_BYTES - (2 + 2 + 2 + 8)),
        (1, {"wants_split_master": False}, 5 * GRAIN_BYTES - (2 + 2 + 4 + 8)),
        # And once more what a step changes: all but the gradient.
        (1, {"during_backward": True}, 9 * GRAIN_BYTES - 2 - 2 * (2 + 2 + 8)),
    ],
)
def test_every_key_on_the_drive_ends_with_a_whole_grain(
    numel: int, changes: dict[str, Any], added: int
) -> None:
    assert rounding_bytes(model(numel), request(**changes)) == added


def test_a_matrix_whose_updates_are_applied_has_all_it_changes_twice() -> None:
    matrix = ModelShapes("m", (TensorShape("up", (1, 1)),))
    once = rounding_bytes(matrix, request(optimizer="Muon"))
    twice = rounding_bytes(matrix, request(optimizer="Muon", applies_updates=True))
    # Parameter, low half, momentum and flags; an element has less than a byte of flags.
    assert twice - once == 4 * GRAIN_BYTES - (2 + 2 + 2 + 1)


def test_a_frozen_tensor_has_no_other_keys_than_its_own() -> None:
    assert rounding_bytes(model(1, trainable=False), request()) == GRAIN_BYTES - 2


def test_its_bytes_are_those_of_its_own_dtype() -> None:
    grain = TensorShape("packed", (GRAIN_BYTES,), trainable=False, itemsize=1)
    assert rounding_bytes(ModelShapes("m", (grain,)), request()) == 0


# -- memory ----------------------------------------------------------------------------------------


def test_activations_have_checksums_too_of_whatever_batch() -> None:
    without, with_them = (
        checksum_bytes(model(1), request(has_activations=on)) for on in (False, True)
    )
    assert with_them - without >= ACTIVATIONS_BYTES // GRAIN_BYTES * CHECKSUM_BYTES
    assert checksum_bytes(model(1), request(has_activations=True, verify="off")) == 0
    assert rounding_bytes(model(1), request(has_activations=True)) == rounding_bytes(
        model(1), request()
    )


def test_checksums_of_all_grains_take_whole_slabs() -> None:
    """With the gradients that a program sets, each key has its own grains."""
    only = {"optimizer_device": "cpu"}
    grain = GRAIN_BYTES // 2
    grains_of_a_slab = (PAGES_OF_A_SLAB - PAGES_BESIDE) * PAGE_SPAN_BYTES // GRAIN_BYTES
    assert checksum_bytes(model(1), request(**only)) == SLAB_BYTES
    full = model(grain * grains_of_a_slab)
    assert checksum_bytes(full, request(**only)) == SLAB_BYTES
    assert checksum_bytes(full, request(**only, volume_count=2)) == 2 * SLAB_BYTES
    assert checksum_bytes(model(grain * grains_of_a_slab, 1), request(**only)) == 2 * SLAB_BYTES


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"wants_split_master": False}, 5 + 1),  # the gradient that a program sets
        ({}, 5 + 2),  # and the half of a master weight whose parameter a program changes
    ],
)
def test_keys_that_come_and_go_are_counted(changes: dict[str, Any], keys: int) -> None:
    """Five keys of a tensor are on the drive; there is room for more."""
    tensors = (PAGES_OF_A_SLAB - PAGES_BESIDE) * PAGE_SPAN_BYTES // GRAIN_BYTES // keys
    assert checksum_bytes(model(*[1] * tensors), request(**changes)) == SLAB_BYTES
    assert checksum_bytes(model(*[1] * (tensors + 1)), request(**changes)) == 2 * SLAB_BYTES


def test_without_verification_nothing_is_taken() -> None:
    assert checksum_bytes(decoder(), PlanRequest(verify="off")) == 0
    assert rounding_bytes(decoder(), PlanRequest(verify="off")) == 0


@pytest.mark.parametrize("verify", ["reads", "full"])
def test_reading_back_costs_no_more_than_comparing(verify: str) -> None:
    assert checksum_bytes(decoder(), request(verify=verify)) == SLAB_BYTES


# -- in a plan -------------------------------------------------------------------------------------


def test_a_70b_model_takes_four_bytes_for_each_64_kib() -> None:
    shapes = builtin("Llama-3.1-70B")
    plain, verified = (
        derive(shapes, request=PlanRequest(verify=verify)) for verify in ("off", "reads")
    )
    assert CHECKSUMS not in plain.host
    assert verified.host_bytes == plain.host_bytes + verified.checksum_bytes
    assert 68e6 < verified.checksum_bytes < 80e6
    assert verified.checksum_bytes % SLAB_BYTES == 0
    assert verified.drive_bytes == plain.drive_bytes + verified.drive[ROUNDING]
    assert 0 < verified.drive[ROUNDING] < plain.drive_bytes / 1000


def test_a_limit_counts_checksums_to_the_byte() -> None:
    shapes, request = decoder(), PlanRequest(verify="full", volume_count=3)
    with pytest.raises(LimitTooSmallError, match=r"memascend\.verify='full' costs") as caught:
        derive(shapes, request=request, limit_bytes=0)
    least = caught.value.minimum_bytes
    assert caught.value.needed[CHECKSUMS] == SLAB_BYTES
    assert derive(shapes, request=request, limit_bytes=least).host_bytes == least
    with pytest.raises(LimitTooSmallError):
        derive(shapes, request=request, limit_bytes=least - 1)
