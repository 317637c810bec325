"""Does a step take the device memory that `memascend plan --context` says it takes?"""

from __future__ import annotations

import dataclasses
import json
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
HIDDEN = 256
SHAPE = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": HIDDEN,
    "intermediate_size": 688,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
SAVING: dict[str, Any] = {"enabled": True, "min_bytes": 1024, "device_bytes": 0}
#: Attention by plain operators keeps some more tensors as large as a hidden state.
MEASURED_TO_PLANNED_MAX = 1.3


def planned_bytes(config: dict[str, Any], place: str, tokens: int) -> int:
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
    plan = training.plan(way, tokens)
    # Here a device has run what it was given before the host lets a parameter go.
    return plan.device_bytes - DEVICE_RESERVE_BYTES - plan.device[RELEASED]


@pytest.mark.deepspeed
@pytest.mark.full
def test_a_step_takes_the_device_memory_that_is_planned(
    tmp_path: Path, run_program: RunProgram
) -> None:
    """With checkpoints on the device and on the drive, for two numbers of tokens."""
    if reason := why_not():
        pytest.skip(reason)
    # How many gradients wait at once, and what is gathered ahead, depends on the drive's moods. The
    # trials compare the first with its room.
    block = BLOCK | {"streaming": {"gradients": {"device_bytes": 0}}}
    held = json.loads(retried_config(tmp_path, block).read_text())
    held["zero_optimization"]["stage3_prefetch_bucket_size"] = 0
    stored = held | {"memascend": block | {"activations": SAVING}}
    asked = tmp_path / "asked.json"
    asked.write_text(
        json.dumps(
            {
                "configs": [held, stored],
                "shape": SHAPE,
                "tokens": SEQUENCE_TOKENS,
                "sequences": SEQUENCES,
            }
        )
    )
    measured = run_program(str(PROGRAM), str(asked))
    places = {"device": (held, measured[0]), "drive": (stored, measured[1])}
    for place, (config, found) in places.items():
        for sequences, peak_bytes in zip(SEQUENCES, found, strict=True):
            planned = planned_bytes(config, place, sequences * SEQUENCE_TOKENS)
            assert 1 < peak_bytes / planned < MEASURED_TO_PLANNED_MAX, (place, sequences)
    # What the drive takes off the device is the checkpoints of all layers but a few, to the byte.
    saved = [on_device - on_drive for on_device, on_drive in zip(*measured, strict=True)]
    hidden_bytes = [2 * HIDDEN * SEQUENCE_TOKENS * sequences for sequences in SEQUENCES]
    layers = SHAPE["num_hidden_layers"]
    of_layers = [nbytes / hidden for nbytes, hidden in zip(saved, hidden_bytes, strict=True)]
    assert of_layers == pytest.approx([layers - 3] * 2, abs=0.01)
