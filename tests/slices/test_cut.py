"""Every argument is cut where its batch is, or nothing is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memascend.slices.cut import BatchCut, CannotCut, Leaves, cut_batch

BATCH, SEQUENCE, HIDDEN = 6, 16, 8
STATES = torch.zeros(BATCH, SEQUENCE, HIDDEN)


def cut(
    *arguments: Any,
    batch: int = BATCH,
    count: int = 3,
    heads: frozenset[int] = frozenset(),
    is_batch_first: bool = True,
    **keywords: Any,
) -> BatchCut:
    leaves = Leaves.of(arguments, keywords)
    return cut_batch(leaves, batch, count, head_counts=heads, is_batch_first=is_batch_first)


@pytest.mark.parametrize(
    ("count", "rows"),
    [
        (1, [(0, 6)]),
        (3, [(0, 2), (2, 4), (4, 6)]),
        (4, [(0, 2), (2, 4), (4, 5), (5, 6)]),
        (100, [(number, number + 1) for number in range(6)]),
    ],
)
def test_slices_are_as_long_as_each_other_but_for_one(
    count: int, rows: list[tuple[int, int]]
) -> None:
    assert list(cut(STATES, count=count).rows) == rows


@pytest.mark.parametrize(
    ("name", "value", "dimension"),
    [
        ("attention_mask", None, None),
        ("attention_mask", torch.ones(BATCH, SEQUENCE), 0),
        ("attention_mask", torch.ones(BATCH, 1, SEQUENCE, SEQUENCE), 0),
        ("attention_mask", torch.ones(1, 1, SEQUENCE, SEQUENCE), None),
        ("position_ids", torch.arange(SEQUENCE)[None], None),
        ("position_ids", torch.zeros(3, BATCH, SEQUENCE), 1),
        ("position_embeddings", torch.zeros(3, BATCH, SEQUENCE, HIDDEN), 1),
        ("position_embeddings", torch.zeros(1, SEQUENCE, HIDDEN), None),
        ("position_embeddings", torch.zeros(SEQUENCE, HIDDEN), None),
        ("cache_position", torch.arange(SEQUENCE), None),
        ("spatial_shapes", torch.ones(BATCH, 2, dtype=torch.int64), None),
        ("level_start_index", torch.arange(BATCH), None),
        ("encoder_hidden_states", torch.zeros(BATCH, 5, HIDDEN), 0),
        ("scale", torch.tensor(2.0), None),
        ("use_cache", False, None),
        ("dtype", torch.float32, None),
    ],
)
def test_the_batch_is_found(name: str, value: Any, dimension: int | None) -> None:
    assert cut(STATES, **{name: value}).dimensions == (0, dimension)


@pytest.mark.parametrize(
    ("states", "keywords", "reason"),
    [
        (STATES, {"past_key_values": object()}, r"past_key_values is a object"),
        (STATES, {"bias": torch.zeros(BATCH * 4, 1, SEQUENCE)}, r"bias of shape \(24, 1, 16\)"),
        (STATES, {"other": torch.zeros(1, BATCH, HIDDEN)}, "elsewhere"),
        (STATES, {"other": torch.zeros(5, BATCH, HIDDEN)}, "elsewhere"),
        (STATES, {"labels": torch.zeros(5, SEQUENCE)}, "elsewhere"),
        (STATES, {"cu_seq_lens_q": torch.zeros(BATCH + 1)}, "offsets of documents"),
        (torch.zeros(BATCH * SEQUENCE, HIDDEN), {}, "no sequences"),
        (torch.zeros(SEQUENCE, BATCH, HIDDEN), {}, r"the batch 6 sequences"),
    ],
)
def test_where_shapes_do_not_tell_nothing_is_cut(
    states: torch.Tensor, keywords: dict[str, Any], reason: str
) -> None:
    with pytest.raises(CannotCut, match=reason):
        cut(states, **keywords)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("frequencies", (3,)),
        ("mask_of_positions", (3, 3)),
        ("rotary", (3, HIDDEN)),
        ("rotary", (3, 1, HIDDEN)),
        ("position_embeddings", (3, 3, 3, HIDDEN)),  # rows, or time, height and width
        ("position_ids", (3, 3, 3)),
    ],
)
def test_a_batch_as_large_as_another_dimension_is_not_guessed(
    name: str, shape: tuple[int, ...]
) -> None:
    states = torch.zeros(3, 3, HIDDEN)
    with pytest.raises(CannotCut, match="may have the batch elsewhere"):
        cut(states, batch=3, **{name: torch.zeros(shape)})
    assert cut(states, batch=3, attention_mask=torch.zeros(3, 3)).dimensions == (0, 0)


def test_a_batch_of_one_sequence_is_one_slice() -> None:
    found = cut(STATES[:1], torch.zeros(1, 1), attention_mask=torch.zeros(4, 1), batch=1)
    assert (found.rows, found.dimensions) == (((0, 1),), (0, None, None))
    with pytest.raises(CannotCut, match="a object"):
        cut(STATES[:1], object(), batch=1)


def test_parts_are_views_of_whole_outputs_also_of_tokens() -> None:
    found = cut(STATES)
    tokens = torch.arange(BATCH * SEQUENCE).float().reshape(-1, 1)
    assert found.whole_shape(0, tokens[: 2 * SEQUENCE]) == tuple(tokens.shape)
    found.part(1, tokens).zero_()
    assert tokens.count_nonzero() == BATCH * SEQUENCE - 2 * SEQUENCE - 1
    assert found.whole_shape(0, torch.zeros(2, SEQUENCE, 3)) == (BATCH, SEQUENCE, 3)
    assert found.whole_shape(0, torch.zeros(2, 3), is_of_rows=True) == (BATCH, 3)
    attention = torch.zeros(2, 4, SEQUENCE, SEQUENCE)
    assert found.whole_shape(0, attention) == (BATCH, *attention.shape[1:])


@pytest.mark.parametrize(
    "shape", [(), (1,), (2,), (8, 2), (4, SEQUENCE), (2, 4), (1, 4, SEQUENCE, SEQUENCE)]
)
def test_an_output_that_may_be_a_statistic_is_not_put_together(shape: tuple[int, ...]) -> None:
    with pytest.raises(CannotCut, match=r"no dimensions of 2 sequence\(s\) of 16 tokens"):
        cut(STATES).whole_shape(0, torch.zeros(shape))


@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 4, SEQUENCE, SEQUENCE), (SEQUENCE, SEQUENCE), (SEQUENCE, 1, HIDDEN)]
)
def test_an_output_of_one_sequence_may_be_a_statistic_or_a_bias(shape: tuple[int, ...]) -> None:
    found = cut(STATES, count=BATCH)
    with pytest.raises(CannotCut, match=r"no dimensions of 1 sequence\(s\) of 16 tokens"):
        found.whole_shape(0, torch.zeros(shape))
    assert found.whole_shape(0, torch.zeros(SEQUENCE, 4)) == (BATCH * SEQUENCE, 4)  # of a router


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("frequencies", torch.ones(BATCH)),
        ("windows", torch.ones(BATCH, dtype=torch.int64)),
        ("is_wide", torch.ones(BATCH, dtype=torch.bool)),
        ("table", torch.ones(BATCH, HIDDEN)),
        ("blocks", torch.ones(BATCH, 2, dtype=torch.int64)),
    ],
)
def test_numbers_in_a_layer_may_be_of_all_sequences_of_a_batch_as_long(
    name: str, value: torch.Tensor
) -> None:
    leaves = Leaves.of((STATES,), {name: value})
    with pytest.raises(CannotCut, match=rf"\.{name} of shape \(6,.*\) may be of all sequences"):
        cut_batch(leaves, BATCH, 3, mixes=True)
    assert cut_batch(leaves, BATCH, 3).dimensions == (0, 0)  # those of sequences in a loss


@pytest.mark.parametrize(
    ("name", "length"),
    [("weights", SEQUENCE), ("encoder_attention_mask", 5), ("src_key_padding_mask", 5)],
)
def test_numbers_of_each_token_in_a_layer_are_cut(name: str, length: int) -> None:
    leaves = Leaves.of((STATES,), {name: torch.ones(BATCH, length)})
    assert cut_batch(leaves, BATCH, 3, mixes=True).dimensions == (0, 0)


def test_a_layer_may_have_the_sequence_first() -> None:
    states = torch.zeros(BATCH, BATCH, HIDDEN)
    with pytest.raises(CannotCut, match="may have the batch second"):
        cut(states, is_batch_first=False)
    assert cut(states).dimensions == (0,)  # a norm, or a layer of transformers


@pytest.mark.parametrize("shape", [(BATCH,), (BATCH, 1, 64), (BATCH, SEQUENCE, SEQUENCE)])
def test_a_bias_may_have_as_many_heads_as_the_batch_has_sequences(shape: tuple[int, ...]) -> None:
    with pytest.raises(CannotCut, match="heads first"):
        cut(STATES, heads=frozenset({BATCH}), bias=torch.zeros(shape))
    assert cut(STATES, heads=frozenset({4}), bias=torch.zeros(shape)).dimensions == (0, 0)
    assert cut(STATES, heads=frozenset({BATCH}), more=STATES).dimensions == (0, 0)


@pytest.mark.parametrize(
    "lengths",
    [[5] * BATCH, (True,) * BATCH, [[1, 2]] * BATCH, {"of": [0.5] * BATCH}, [list(range(BATCH))]],
)
def test_a_list_of_a_number_for_each_sequence_is_not_cut(lengths: Any) -> None:
    for arguments, keywords in (((STATES, lengths), {}), ((STATES,), {"lengths": lengths})):
        with pytest.raises(CannotCut, match="of 6 numbers may have one for each sequence"):
            cut(*arguments, **keywords)


@pytest.mark.parametrize(
    "arguments",
    [
        (STATES, 1, 2, 3, 4, 5),
        (STATES, [5] * (BATCH - 1), [[1] * 3] * 3),
        (STATES, [torch.ones(()), *range(BATCH - 1)]),
        (STATES, [None] * BATCH),
    ],
)
def test_other_lists_are_of_all_sequences(arguments: Any) -> None:
    assert cut(*arguments).dimensions[0] == 0


def test_lists_of_sizes_may_be_as_long_as_the_batch() -> None:
    for name in ("input_dimensions", "resolution"):
        assert cut(STATES[:2], batch=2, **{name: (4, 4)}).dimensions == (0, None, None)
    assert cut(STATES[:2], batch=2, spatial_shapes_list=[(4, 4), (2, 2)]).dimensions[0] == 0
    assert cut(STATES[:1], [5], batch=1).dimensions == (0, None)


def test_a_batch_of_no_rows_is_not_cut() -> None:
    with pytest.raises(CannotCut, match="has no rows"):
        cut_batch(Leaves.of((torch.zeros(0, 3, 8),), {}), 0, 2)
