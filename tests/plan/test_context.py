"""Device memory, host memory and traffic of a context, against numbers found by hand."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from memascend.base.components import WAITING_GRADIENTS
from memascend.base.units import GIB, MIB
from memascend.config.block import ActivationConfig, MicroBatchConfig
from memascend.config.deepspeed import DeepSpeedSettings, parse_deepspeed
from memascend.errors import ConfigError
from memascend.plan.context import (
    BUCKET,
    CHECKPOINTS,
    FLIGHT,
    GATHERED,
    HEAD,
    HOST_RESERVE_BYTES,
    KEPT,
    LAYER,
    LOSS,
    OURS_ALL,
    OURS_CHECKPOINTS,
    OURS_ON_DEVICE,
    RELEASED,
    SAVED,
    STOCK_ALL,
    STOCK_CHECKPOINTS,
    STOCK_ON_HOST,
    WAYS,
    DeviceSettings,
    widths_of,
    with_activations,
)
from memascend.plan.derive import PlanRequest
from memascend.plan.drive_rates import DriveRates
from memascend.plan.shapes import builtin
from tests.support.plan_models import decoder
from tests.support.trainings import training

TOKENS = 32_768
#: Of Llama-3.1-8B: one hidden state of all tokens, and what one layer saves of a token.
HIDDEN_BYTES, LAYER_BYTES = TOKENS * 4096 * 2, 200_840
HEAD_NUMEL, DOWN_NUMEL = 128_256 * 4096, 14_336 * 4096


def test_checkpoints_are_counted_to_the_byte() -> None:
    plan = training().plan(STOCK_CHECKPOINTS, TOKENS)
    assert plan.device[CHECKPOINTS] == 32 * HIDDEN_BYTES == 8 * GIB
    assert plan.device[BUCKET] == 2 * 500_000_000
    assert (plan.host_activation_bytes, plan.drive_bytes) == (0, 0)
    assert plan.device_bytes == sum(plan.device.values()) + max(plan.moments.values())


def test_without_checkpoints_every_layer_keeps_all_that_it_saves() -> None:
    plan = training().plan(STOCK_ALL, TOKENS)
    assert plan.device[SAVED] == 32 * TOKENS * LAYER_BYTES
    again = training().plan(STOCK_CHECKPOINTS, TOKENS)
    assert plan.moments[LAYER] < again.moments[LAYER]


@pytest.mark.parametrize(("tokens", "each"), [(TOKENS, 256 * MIB), (TOKENS + 1, 512 * MIB)])
def test_checkpoints_on_the_host_are_pinned_in_powers_of_two(tokens: int, each: int) -> None:
    start = training()
    plan = start.plan(STOCK_ON_HOST, tokens)
    assert plan.host_activation_bytes == 32 * each
    at_step = start.stock.step_bytes + 32 * each
    highest = max(at_step, start.stock.initialization_bytes)
    assert plan.host_bytes == highest + HOST_RESERVE_BYTES
    exact = training(rounds_pinned=False).plan(STOCK_ON_HOST, tokens)
    assert exact.host_activation_bytes == 32 * tokens * 4096 * 2


def test_host_memory_does_not_grow_with_tokens_on_the_drive() -> None:
    start = training()
    few, many = (start.plan(OURS_CHECKPOINTS, tokens) for tokens in (TOKENS, 64 * TOKENS))
    assert few.host_bytes == many.host_bytes == start.ours.host_bytes + HOST_RESERVE_BYTES
    assert start.ours.host["activation slots"] > 0
    assert many.drive_bytes == 64 * few.drive_bytes


def test_the_drive_takes_checkpoints_the_last_norm_and_the_probabilities() -> None:
    norm = TOKENS * (8 * 4096 + 4)
    checkpoints = 32 * HIDDEN_BYTES
    fused = training(has_fused_loss=True).plan(OURS_CHECKPOINTS, TOKENS)
    assert fused.drive_bytes == checkpoints + norm
    plain = training().plan(OURS_CHECKPOINTS, TOKENS)
    assert plain.drive_bytes == checkpoints + norm + TOKENS * 4 * 128_256
    # In flight are two of the largest tensors: the last norm's input in fp32.
    assert fused.device[FLIGHT] == 2 * TOKENS * 4096 * 4


def test_what_stays_on_the_device_is_not_written() -> None:
    kept = ActivationConfig(enabled=True, device_bytes=GIB)
    all_gone = training().plan(OURS_CHECKPOINTS, TOKENS)
    some_kept = training(activations=kept).plan(OURS_CHECKPOINTS, TOKENS)
    assert KEPT not in all_gone.device
    assert some_kept.device[KEPT] == GIB
    assert all_gone.drive_bytes - some_kept.drive_bytes == GIB
    assert some_kept.device_bytes - all_gone.device_bytes == GIB


def test_no_more_is_kept_than_there_is() -> None:
    everything = ActivationConfig(enabled=True, device_bytes=1 << 60)
    plan = training(activations=everything).plan(OURS_CHECKPOINTS, TOKENS)
    assert (plan.device[KEPT], plan.device[FLIGHT]) == (32 * HIDDEN_BYTES, 0)
    assert plan.drive_bytes == 0


def test_the_host_runs_ahead_by_a_share_of_the_device_or_two_tensors_of_a_layer() -> None:
    start = training()
    sizes = (0, 24 * GIB, 80 * GIB)
    plans = [start.plan(OURS_CHECKPOINTS, TOKENS, device_bytes=size) for size in sizes]
    assert [plan.device[RELEASED] for plan in plans] == [256 * MIB, 768 * MIB, 1280 * MIB]
    assert RELEASED not in start.plan(STOCK_CHECKPOINTS, TOKENS, device_bytes=80 * GIB).device
    large = training("Llama-3.1-70B").plan(OURS_CHECKPOINTS, TOKENS, device_bytes=24 * GIB)
    assert large.device[RELEASED] == 2 * (28_672 * 8192 * 2)


def test_a_small_model_has_no_more_to_run_ahead_by_than_itself() -> None:
    small = dataclasses.replace(training(), shapes=decoder())
    assert small._released_bytes(80 * GIB) == small.shapes.numel * 2


def test_small_tensors_stay_on_the_device() -> None:
    """A hidden state of 127 tokens is below 1 MiB."""
    small, large = (training().plan(OURS_CHECKPOINTS, tokens) for tokens in (127, 128))
    assert small.device[CHECKPOINTS] == 127 * 4096 * 2 * 32
    assert small.drive_bytes == 0
    assert CHECKPOINTS not in large.device
    assert large.drive_bytes > 0


def test_a_loss_with_whole_logits_takes_twelve_bytes_of_each() -> None:
    plain, fused = (training(has_fused_loss=is_fused) for is_fused in (False, True))
    norm = 8 * 4096 + 4
    at_loss = plain.plan(STOCK_CHECKPOINTS, TOKENS).moments[LOSS]
    assert at_loss == TOKENS * (12 * 128_256 + norm)
    assert fused.plan(STOCK_CHECKPOINTS, TOKENS).moments[LOSS] == TOKENS * (6 * 4096 + norm)


def test_the_largest_gradient_is_reduced_where_it_is() -> None:
    """It is larger than the bucket; stock has it three times more, in parts or in other dtypes."""
    ours = training().plan(OURS_CHECKPOINTS, 1).moments[HEAD]
    assert ours == 2 * HEAD_NUMEL
    stock = training().plan(STOCK_CHECKPOINTS, 1).moments[HEAD]
    assert stock - ours == (2 + 4) * HEAD_NUMEL + 8 * 250_000_000


def test_gradients_that_wait_are_ours_and_on_the_device() -> None:
    device = training().plan(OURS_CHECKPOINTS, 1).device
    assert device[WAITING_GRADIENTS] == training().ours.gradient_room_bytes > 400 << 20
    assert WAITING_GRADIENTS not in training().plan(STOCK_CHECKPOINTS, 1).device
    request = PlanRequest(gradient_room_bytes=0)
    assert training(request=request).plan(OURS_CHECKPOINTS, 1).device[WAITING_GRADIENTS] == 0


def test_gradients_of_a_layer_fill_the_bucket_and_are_copied_once() -> None:
    small = DeviceSettings(bucket_numel=10**7)
    filled = training().plan(OURS_CHECKPOINTS, 1).moments[LAYER]
    alone = training(device=small).plan(OURS_CHECKPOINTS, 1).moments[LAYER]
    assert filled - alone == 2 * 500_000_000
    without = DeviceSettings(has_bucket=False)
    assert training(device=without).plan(OURS_CHECKPOINTS, 1).device[BUCKET] == 0


def test_parts_of_gradients_shrink_with_the_ranks() -> None:
    one, two = (training(request=PlanRequest(world=world)) for world in (1, 2))
    ours = [start.plan(OURS_CHECKPOINTS, 1).moments[HEAD] for start in (one, two)]
    stock = [start.plan(STOCK_CHECKPOINTS, 1).moments[HEAD] for start in (one, two)]
    assert ours[0] == ours[1]
    assert stock[0] - stock[1] == 6 * HEAD_NUMEL // 2  # a piece is at its maximum in both


@pytest.mark.parametrize(
    ("reuse", "settings", "numel"),
    [
        (10**9, {}, HEAD_NUMEL + 5 * 10**7),
        (2 * 10**9, {"live_numel": 1_010_000_000}, 10**9 + 10**7),
        (2 * 10**9, {"live_numel": 5 * 10**8}, 10**9),
        (10**11, {}, 8_030_261_248),
    ],
)
def test_gathered_parameters_are_those_used_again_soon_or_a_large_one(
    reuse: int, settings: dict[str, int], numel: int
) -> None:
    start = training(request=PlanRequest(reuse_numel=reuse), device=DeviceSettings(**settings))
    assert start.plan(STOCK_ALL, 1).device[GATHERED] == 2 * numel


def test_a_tiled_mlp_takes_one_tile_of_as_many_tokens_as_the_hidden_size() -> None:
    tiled = training(has_tiled_mlp=True)
    few, one_tile, two_tiles = (
        tiled.plan(OURS_CHECKPOINTS, tokens).moments[LAYER] for tokens in (2048, 4096, 8192)
    )
    tile = 6 * 2 * 14_336
    assert one_tile - few - (two_tiles - one_tile) / 2 == pytest.approx(2048 * tile)
    whole = training().plan(OURS_CHECKPOINTS, TOKENS).moments[LAYER]
    assert tiled.plan(OURS_CHECKPOINTS, TOKENS).moments[LAYER] < whole


def test_without_checkpoints_two_of_the_largest_tensors_are_on_their_way() -> None:
    plan = training(has_fused_loss=True).plan(OURS_ALL, TOKENS)
    assert plan.device[FLIGHT] == 2 * TOKENS * 14_336 * 2
    assert plan.drive_bytes == TOKENS * (32 * LAYER_BYTES + 8 * 4096 + 4)


@pytest.mark.parametrize("model", ["Mixtral-8x7B", "Qwen2.5-7B"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.title)
def test_more_tokens_never_take_less(model: str, way: Any) -> None:
    plans = [training(model).plan(way, tokens) for tokens in (1, 100, 10_000, 1_000_000)]
    for less, more in itertools.pairwise(plans):
        assert less.device_bytes < more.device_bytes
        assert less.host_bytes <= more.host_bytes


def test_settings_come_from_the_json_and_auto_is_the_trainers() -> None:
    zero = {
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_max_live_parameters": 1e8,
        "contiguous_gradients": False,
    }
    found = DeviceSettings.from_deepspeed(parse_deepspeed({"zero_optimization": zero}), hidden=4096)
    assert (found.bucket_numel, found.prefetch_numel) == (16_777_216, 15_099_494)
    assert (found.live_numel, found.has_bucket) == (10**8, False)
    assert DeviceSettings.from_deepspeed(DeepSpeedSettings(), hidden=4096) == DeviceSettings()


def test_activations_are_moved_in_every_micro_step() -> None:
    plan = training().ours
    found = with_activations(plan, 10 * GIB, 4)
    assert found.drive_bytes - plan.drive_bytes == 10 * GIB
    for kind in ("passes_read_bytes", "passes_written_bytes"):
        assert getattr(found, kind) - getattr(plan, kind) == 40 * GIB
    assert found.read_bytes["activations"] == found.written_bytes["activations"] == 40 * GIB
    assert found.step_seconds(DriveRates()) > plan.step_seconds(DriveRates())


def test_slices_have_their_logits_and_layers_beside_tensors_of_the_whole_batch() -> None:
    """Sums are of the head, of the largest tensor, of a layer; here in bf16."""
    whole, sliced = (
        training().plan(OURS_ON_DEVICE, TOKENS, slice_tokens=tokens)
        for tokens in (TOKENS, TOKENS // 8)
    )
    alone = training().plan(OURS_ON_DEVICE, TOKENS // 8)
    assert sliced.device[CHECKPOINTS] == whole.device[CHECKPOINTS] == 32 * HIDDEN_BYTES
    layer_numel = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * DOWN_NUMEL + 2 * 4096
    added = {LOSS: (3, HEAD_NUMEL), HEAD: (3, HEAD_NUMEL), LAYER: (2, layer_numel)}
    for moment, (tensors, numel) in added.items():
        of_batch = sliced.moments[moment] - alone.moments[moment]
        assert of_batch == tensors * HIDDEN_BYTES + 2 * numel, moment
    assert whole == training().plan(OURS_ON_DEVICE, TOKENS)


def test_sums_have_the_dtype_of_accumulation() -> None:
    request = PlanRequest(accumulation_dtype="fp32")
    narrow, wide = (
        start.plan(OURS_ON_DEVICE, TOKENS, slice_tokens=1024).moments
        for start in (training(), training(request=request))
    )
    assert wide[LOSS] - narrow[LOSS] == 2 * HEAD_NUMEL


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_head_that_is_not_cut_has_the_logits_of_the_whole_batch(is_fused: bool) -> None:
    """A fused loss is cut as well, unless the section leaves the head whole."""
    section = MicroBatchConfig(count=8, head=False)
    whole = training(micro_batches=section, has_fused_loss=is_fused)
    moments = whole.plan(OURS_ON_DEVICE, TOKENS, slice_tokens=TOKENS // 8).moments
    of_token = 3 * 4096 * 2 if is_fused else 12 * 128_256
    norm_bytes = TOKENS // 8 * (8 * 4096 + 4)
    assert moments[LOSS] - TOKENS * of_token - norm_bytes == 3 * HIDDEN_BYTES + 2 * HEAD_NUMEL
    cut = training(has_fused_loss=is_fused).plan(OURS_ON_DEVICE, TOKENS, slice_tokens=TOKENS // 8)
    assert moments[LOSS] - cut.moments[LOSS] == (TOKENS - TOKENS // 8) * of_token
    saved_bytes = whole.plan(OURS_CHECKPOINTS, TOKENS, slice_tokens=TOKENS // 8).drive_bytes
    probabilities = 0 if is_fused else TOKENS * 4 * 128_256
    assert saved_bytes == (32 + 2) * HIDDEN_BYTES + probabilities


def test_frozen_parameters_have_no_sums() -> None:
    shapes = builtin("Llama-3.1-8B")
    tensors = tuple(dataclasses.replace(tensor, trainable=False) for tensor in shapes.tensors)
    frozen = dataclasses.replace(training(), shapes=dataclasses.replace(shapes, tensors=tensors))
    moments = frozen.plan(OURS_ON_DEVICE, TOKENS, slice_tokens=1024).moments
    assert moments[HEAD] == 3 * HIDDEN_BYTES


def test_slices_save_inputs_alone_on_the_drive() -> None:
    """Those of each layer, of the last norm and of the head; two of them are in flight."""
    for is_fused in (False, True):
        plan = training(has_fused_loss=is_fused).plan(OURS_CHECKPOINTS, TOKENS, slice_tokens=4096)
        assert plan.drive_bytes == (32 + 2) * HIDDEN_BYTES
        assert plan.device[FLIGHT] == 2 * HIDDEN_BYTES
        kept = training(has_fused_loss=is_fused).plan(OURS_ON_DEVICE, TOKENS, slice_tokens=4096)
        assert plan.moments[LAYER] - kept.moments[LAYER] == HIDDEN_BYTES  # the input that is back


@pytest.mark.parametrize("way", [STOCK_CHECKPOINTS, OURS_ALL], ids=lambda way: way.title)
def test_slices_are_memascends_and_need_checkpointing(way: Any) -> None:
    with pytest.raises(ValueError, match="slices need memascend and checkpointing"):
        training().plan(way, TOKENS, slice_tokens=1)
    assert training().plan(way, TOKENS, slice_tokens=TOKENS) == training().plan(way, TOKENS)


def test_shapes_alone_do_not_say_what_a_context_takes() -> None:
    with pytest.raises(ConfigError, match=r"decoder: .*config\.json"):
        widths_of(decoder())
    assert widths_of(builtin("Llama-3.1-8B")).hidden == 4096
