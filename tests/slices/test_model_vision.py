"""Models of text and images, with positions in three dimensions, run in slices of their text."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers

from memascend.slices.layers import Slicer
from memascend.slices.model import SlicedModel
from tests.support.sliced_models import Weights, assert_close, gradients, run

for name in ("Qwen2_5_VLConfig", "Qwen3VLConfig"):
    if not hasattr(transformers, name):
        pytest.skip(f"this transformers has no {name}", allow_module_level=True)

VOCABULARY, WIDTH = 96, 64
IMAGE, VIDEO, BEGIN, END = 90, 91, 92, 93  # tokens
LAYERS = 2
#: Height and width of each image of a row, in patches; a token has 2 x 2 of them.
SQUARE = (2, 2)
IMAGES: tuple[tuple[tuple[int, int], ...], ...] = (
    ((4, 4),),
    (),
    ((2, 4), (4, 2)),
    ((4, 6),),
    ((2, 2),),
    ((4, 4), (2, 2)),
)
LENGTH = 20

TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    "use_cache": False,
}
VISION = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "patch_size": 4}
TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
    "tie_word_embeddings": False,
}


def qwen2_5_vl() -> Any:
    vision = VISION | {"out_hidden_size": WIDTH, "window_size": 16, "fullatt_block_indexes": [1]}
    config = transformers.Qwen2_5_VLConfig(text_config=TEXT, vision_config=vision, **TOKENS)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def qwen3_vl() -> Any:
    vision = VISION | {
        "out_hidden_size": WIDTH,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }
    config = transformers.Qwen3VLConfig(
        text_config=TEXT | {"head_dim": 16}, vision_config=vision, **TOKENS
    )
    return transformers.Qwen3VLForConditionalGeneration(config)


MODELS = (qwen2_5_vl, qwen3_vl)


def make(maker: Any) -> Any:
    torch.manual_seed(0)
    model = maker().float().train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    return model


def ids_of(images: Sequence[tuple[int, int]], length: int) -> torch.Tensor:
    """Return a row of text with its images."""
    found = [7]
    for height, width in images:
        found += [BEGIN, *[IMAGE] * (height * width // 4), END]
    text = torch.randint(10, 80, (length - len(found),)).tolist()
    return torch.tensor(found + text)


def batch(rows: Sequence[Sequence[tuple[int, int]]], *, padded: bool = True) -> dict[str, Any]:
    """Return a batch of a row for each group of images; with `padded` each ends in padding."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.stack([ids_of(images, LENGTH) for images in rows])
    mask = torch.ones_like(ids)
    if padded:
        for number in range(len(rows)):
            mask[number, LENGTH - 1 - number % 3 :] = 0
    grid = [(1, *image) for images in rows for image in images]
    patches = sum(height * width for _, height, width in grid)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill((mask == 0) | (ids == IMAGE), -100),
        "mm_token_type_ids": (ids == IMAGE).long(),
        "pixel_values": torch.randn(patches, 3 * 2 * 4 * 4, generator=generator),
        "image_grid_thw": torch.tensor(grid),
    }


def assert_text_was_cut(passes: list[Any], count: int) -> None:
    """The embedding of text, its layers, its norm and the head; the images are one slice."""
    forward = [numbers for which, numbers in passes if which == "forward"]
    assert forward.count(list(range(count))) == LAYERS + 3
    assert all(numbers in ([0], list(range(count))) for numbers in forward)


@pytest.mark.parametrize("maker", MODELS)
@pytest.mark.parametrize("rows", [IMAGES[:3], IMAGES[2:], IMAGES, ((SQUARE, SQUARE),) * 4])
def test_text_runs_in_slices_whatever_the_number_of_images(
    maker: Any, rows: Any, passes: list[Any]
) -> None:
    """Three or four rows are as many as positions; two images a row are a multiple of the batch."""
    model = make(maker)
    inputs = batch(rows)
    loss, expected = run(model, inputs, 0)
    for count in (2, len(rows)):
        passes.clear()
        found_loss, found = run(model, inputs, count)
        assert found_loss == pytest.approx(loss, rel=1e-6)
        assert_close(found, expected)
        assert_text_was_cut(passes, count)


@pytest.mark.parametrize("maker", MODELS)
def test_weights_of_text_get_the_bits_of_micro_steps_and_those_of_images_are_close(
    maker: Any,
) -> None:
    """The images of all rows are computed at once, and their gradients rounded once."""
    model = make(maker).bfloat16()
    for param in model.parameters():
        param.grad_dtype = torch.float32
    inputs = batch(IMAGES)
    items = {"num_items_in_batch": torch.tensor(77)}
    patches = 0
    for first in range(0, len(IMAGES), 2):
        part = batch(IMAGES[first : first + 2])
        for name in ("input_ids", "attention_mask", "labels", "mm_token_type_ids"):
            part[name] = inputs[name][first : first + 2]
        count = len(part["pixel_values"])
        part["pixel_values"] = inputs["pixel_values"][patches : patches + count]
        patches += count
        model(**part, **items).loss.backward()
    expected = gradients(model)
    found = run(model, inputs | items, 3)[1]
    assert found.keys() == expected.keys()
    unequal = {name for name, one in expected.items() if not torch.equal(found[name], one)}
    assert unequal
    assert all("visual" in name for name in unequal)
    assert_close(found, expected, rel=2e-2)


@pytest.mark.parametrize("maker", MODELS)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_packed_rows_are_cut_between_documents_of_text_and_images(
    maker: Any, implementation: str, passes: list[Any]
) -> None:
    model = make(maker)
    model.config._attn_implementation = model.config.text_config._attn_implementation = (
        implementation
    )
    rows = IMAGES[:4]
    inputs = batch(rows, padded=False)
    with torch.no_grad():
        positions, _ = model.model.get_rope_index(
            **{
                name: inputs[name]
                for name in ("input_ids", "mm_token_type_ids", "image_grid_thw", "attention_mask")
            }
        )
    text = torch.arange(LENGTH).repeat(len(rows))
    packed: dict[str, Any] = {
        name: inputs[name].reshape(1, -1) for name in ("input_ids", "mm_token_type_ids", "labels")
    }
    packed["labels"] = packed["labels"].masked_fill(text == 0, -100)
    packed["position_ids"] = torch.cat([text[None, None], positions.reshape(3, 1, -1)])
    packed |= {name: inputs[name] for name in ("pixel_values", "image_grid_thw")}
    loss, expected = run(model, packed, 0)
    by_rows = run(model, inputs, 0)[1]
    assert_close(expected, by_rows, rel=1e-5)  # attention keeps documents apart
    for count in (2, 4):
        passes.clear()
        found_loss, found = run(model, packed, count)
        assert found_loss == pytest.approx(loss, rel=1e-6)
        assert_close(found, expected)
        assert_text_was_cut(passes, count)


def test_images_of_other_sizes_are_no_news_for_the_log(caplog: pytest.LogCaptureFixture) -> None:
    model = make(qwen3_vl)
    slicer = Slicer(Weights)
    lines = []
    for rows in (IMAGES[:2], IMAGES[2:4], IMAGES[3:]):
        caplog.clear()
        inputs = batch(rows)
        passing = SlicedModel(model, slicer, slices_head=True)
        with (
            caplog.at_level(logging.WARNING),
            passing.running((), inputs, lambda _: 2),
        ):
            model(**inputs)
        lines.append(len(caplog.messages))
    assert lines[0] > 0
    assert lines[1:] == [0, 0]
