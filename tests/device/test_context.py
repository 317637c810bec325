"""Does a step take the device memory that `memascend plan --context` says it takes?"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from memascend.config.block import MemAscendConfig
from memascend.config.deepspeed import parse_deepspeed
from memascend.plan.context import (
    DEVICE_RESERVE_BYTES,
    OURS_CHECKPOINTS,
    RELEASED,
    DeviceSettings,
    Training,
)
from memascend.plan.derive import PlanRequest, derive
from memascend.plan.shapes import from_config
from memascend.plan.stock import stock
from tests.device.emulator.build import why_not
from tests.integration.programs import BLOCK, retried_config
from tests.support.program import RunProgram

PROGRAM = Path(__file__).with_name("context_program.py")
#: The emulated device has no attention kernel that is linear in tokens: sequences are short.
SEQUENCE_TOKENS, SEQUENCES = 8, (128, 256)
HIDDEN, LAYERS = 256, 8
SHAPE = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": HIDDEN,
    "intermediate_size": 688,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
SAVING: dict[str, Any] = {"enabled": True, "min_bytes": 1024, "device_bytes": 0}
#: In slices there are more tokens: tensors of the whole batch have to show.
LONGER_TOKENS, SLICE_SEQUENCES, BATCHES = 128, 2, (16, 32)
#: Attention by plain operators keeps some more tensors as large as a hidden state.
MEASURED_TO_PLANNED_MAX = 1.3


def planned_bytes(
    config: dict[str, Any], place: str, tokens: int, slice_tokens: int | None = None
) -> int:
    """Device memory of a step, without what a driver and a host that runs ahead take."""
    shapes, request = from_config(SHAPE), PlanRequest.from_deepspeed(config)
    training = Training(
        shapes=shapes,
        stock=stock(shapes, request=request),
        ours=derive(shapes, request=request),
        device=DeviceSettings.from_deepspeed(parse_deepspeed(config), hidden=HIDDEN),
        activations=MemAscendConfig.model_validate(config["memascend"]).activations,
    )
    way = dataclasses.replace(OURS_CHECKPOINTS, place=place)
    plan = training.plan(way, tokens, slice_tokens=slice_tokens)
    # Here a device has run what it was given before the host lets a parameter go.
    return plan.device_bytes - DEVICE_RESERVE_BYTES - plan.device[RELEASED]


def block_and_config(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a block, and a configuration with it.

    How many gradients wait at once, and what is gathered ahead, depends on the drive's moods. The
    trials compare the first with its room.
    """
    block = BLOCK | {"streaming": {"gradients": {"device_bytes": 0}}}
    config: dict[str, Any] = json.loads(retried_config(folder, block).read_text())
    config["zero_optimization"]["stage3_prefetch_bucket_size"] = 0
    return block, config


def peaks(
    folder: Path,
    run_program: RunProgram,
    tokens: int,
    runs: Sequence[tuple[dict[str, Any], Sequence[int]]],
) -> list[list[int]]:
    """Return the peaks of runs: for each configuration those of its numbers of sequences."""
    asked = folder / "asked.json"
    asked.write_text(json.dumps({"shape": SHAPE, "tokens": tokens, "runs": runs}))
    found: list[list[int]] = run_program(str(PROGRAM), str(asked))
    return found


@pytest.mark.deepspeed
@pytest.mark.full
def test_a_step_takes_the_device_memory_that_is_planned(
    tmp_path: Path, run_program: RunProgram
) -> None:
    """With checkpoints on the device and on the drive, for two numbers of tokens."""
    if reason := why_not():
        pytest.skip(reason)
    block, held = block_and_config(tmp_path)
    stored = held | {"memascend": block | {"activations": SAVING}}
    runs = [(held, SEQUENCES), (stored, SEQUENCES)]
    measured = peaks(tmp_path, run_program, SEQUENCE_TOKENS, runs)
    places = {"device": (held, measured[0]), "drive": (stored, measured[1])}
    for place, (config, found) in places.items():
        for sequences, peak_bytes in zip(SEQUENCES, found, strict=True):
            planned = planned_bytes(config, place, sequences * SEQUENCE_TOKENS)
            assert 1 < peak_bytes / planned < MEASURED_TO_PLANNED_MAX, (place, sequences)
    # What the drive takes off the device is the checkpoints of all layers but a few, to the byte.
    saved = [on_device - on_drive for on_device, on_drive in zip(*measured, strict=True)]
    hidden_bytes = [2 * HIDDEN * SEQUENCE_TOKENS * sequences for sequences in SEQUENCES]
    of_layers = [nbytes / hidden for nbytes, hidden in zip(saved, hidden_bytes, strict=True)]
    assert of_layers == pytest.approx([LAYERS - 3] * 2, abs=0.01)


@pytest.mark.deepspeed
@pytest.mark.full
def test_slices_take_the_memory_of_one_beside_tensors_of_the_whole_batch(
    tmp_path: Path, run_program: RunProgram
) -> None:
    """They are the checkpoints, and the gradients of a layer's input and output."""
    if reason := why_not():
        pytest.skip(reason)
    block, alone = block_and_config(tmp_path)
    block |= {"micro_batches": {"sequences": SLICE_SEQUENCES}}
    sliced = alone | {"memascend": block}
    stored = alone | {"memascend": block | {"activations": SAVING}}
    runs = [(alone, [SLICE_SEQUENCES]), (sliced, BATCHES), (stored, BATCHES)]
    (of_slice,), in_slices, with_drive = peaks(tmp_path, run_program, LONGER_TOKENS, runs)

    slice_tokens = SLICE_SEQUENCES * LONGER_TOKENS
    planned_alone = planned_bytes(alone, "device", slice_tokens)
    for sequences, on_device, on_drive in zip(BATCHES, in_slices, with_drive, strict=True):
        tokens = sequences * LONGER_TOKENS
        hidden_bytes = 2 * HIDDEN * tokens
        assert on_device < 1.15 * of_slice + (LAYERS + 2) * hidden_bytes
        # One checkpoint in use and two in flight, and the gradients of a layer.
        assert on_drive < 1.15 * of_slice + (3 + 2) * hidden_bytes
        print(f"{sequences}: {of_slice} alone, {on_device}, {on_drive}; hidden {hidden_bytes}")
        planned = planned_bytes(sliced, "device", tokens, slice_tokens)
        # The layer of one slice alone takes more than planned, for attention by plain operators.
        assert on_device - of_slice == pytest.approx(planned - planned_alone, rel=0.05)
        planned = planned_bytes(stored, "drive", tokens, slice_tokens)
        assert on_drive - of_slice == pytest.approx(planned - planned_alone, rel=0.05)
    more_bytes = 2 * HIDDEN * LONGER_TOKENS * (BATCHES[1] - BATCHES[0])
    assert (in_slices[1] - in_slices[0]) / more_bytes == pytest.approx(LAYERS + 2, abs=0.1)
    # On the drive all checkpoints but the one in use and two in flight.
    assert (with_drive[1] - with_drive[0]) / more_bytes == pytest.approx(3 + 2, abs=0.1)
