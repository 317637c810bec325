"""A packed row is cut where its documents begin, if attention keeps them apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memascend.slices.cut import CannotCut, Leaves
from memascend.slices.documents import Documents, cut_documents, find_documents
from tests.parity import families
from tests.support.sliced_models import assert_close, gradients, make, run, sliced

LENGTHS = (5, 3, 8, 4, 6, 6)
TOKENS = sum(LENGTHS)
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]
OFFSETS = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
LONGEST = {"max_length_k": 8}
#: Documents of 16, 4 and 12 tokens in two slices.
TWO = Documents(TOKENS, ((0, 16), (16, TOKENS)), (8, 6), keep_apart=False)


def block_mask(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    number = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    allowed = (number[:, None] == number[None]) & torch.ones(TOKENS, TOKENS).tril().bool()
    if dtype == torch.bool:
        return allowed[None, None]
    return torch.zeros(1, 1, TOKENS, TOKENS, dtype=dtype).masked_fill(
        ~allowed, torch.finfo(dtype).min
    )


@pytest.mark.parametrize(
    ("count", "ranges"),
    [
        (1, [(0, 32)]),
        (2, [(0, 16), (16, 32)]),
        (3, [(0, 8), (8, 20), (20, 32)]),
        (100, [(0, 5), (5, 8), (8, 16), (16, 20), (20, 26), (26, 32)]),
    ],
)
def test_slices_end_between_documents(count: int, ranges: list[tuple[int, int]]) -> None:
    for keywords in ({"position_ids": POSITIONS}, {"cu_seq_lens_q": OFFSETS}):
        found = find_documents(
            keywords, TOKENS, lambda documents: min(count, documents), keep_apart=False
        )
        assert found is not None
        assert list(found.ranges) == ranges
        assert max(found.longest) == 8


@pytest.mark.parametrize(
    ("longest", "keep_apart"), [({"max_length_q": 8}, False), ({"max_length_q": 8} | LONGEST, True)]
)
def test_offsets_keep_documents_apart_if_flash_attention_has_all_of_them(
    longest: dict[str, int], keep_apart: bool
) -> None:
    """Else it goes by positions. Offsets of a fixed number end with some at the row's end."""
    padded = torch.cat([OFFSETS, OFFSETS[-1:], OFFSETS[-1:]])
    offsets = {"cu_seq_lens_q": padded, "cu_seq_lens_k": padded}
    found = find_documents(offsets | longest, TOKENS, lambda count: count, keep_apart=True)
    assert found is not None
    assert found.begins == (0, 5, 8, 16, 20, 26)
    assert len(found.ranges) == len(LENGTHS)
    assert found.keep_apart == keep_apart


@pytest.mark.parametrize("keywords", [{}, {"position_ids": torch.arange(TOKENS)[None]}])
def test_one_document_is_no_packed_row(keywords: dict[str, Any]) -> None:
    assert find_documents(keywords, TOKENS, lambda _: 4, keep_apart=True) is None


def test_every_argument_is_cut_where_its_tokens_are() -> None:
    keywords = {
        "attention_mask": block_mask(),
        "position_ids": POSITIONS,
        "position_embeddings": (torch.zeros(1, TOKENS, 4), torch.zeros(3, 1, TOKENS, 4)),
        "cu_seq_lens_q": OFFSETS,
        "max_length_q": 8,
        "frequencies": torch.zeros(TOKENS, 4),
        "scale": torch.tensor(1.0),
    }
    leaves = Leaves.of((torch.zeros(1, TOKENS, 4),), keywords)
    cut = cut_documents(leaves, TWO, mixes=True)
    taken = [cut.take(1, place, value) for place, value in enumerate(leaves.values)]
    _, found = leaves.call(taken)
    assert found["attention_mask"].shape == (1, 1, 16, 16)
    assert torch.equal(found["position_ids"], POSITIONS[:, 16:])
    assert [tuple(one.shape) for one in found["position_embeddings"]] == [(1, 16, 4), (3, 1, 16, 4)]
    assert found["cu_seq_lens_q"].tolist() == [0, 4, 10, 16]
    assert (found["max_length_q"], found["scale"].item()) == (6, 1.0)
    assert found["frequencies"].shape == (16, 4)


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({"attention_mask": None}, "no mask keeps"),
        ({"attention_mask": torch.ones(1, TOKENS)}, "no mask keeps"),
        ({"attention_mask": torch.zeros(1, 1, TOKENS, TOKENS)}, "joins documents"),
        ({"attention_mask": torch.ones(1, 1, TOKENS, TOKENS).bool()}, "joins documents"),
        ({"bias": torch.zeros(1, 4, TOKENS)}, "elsewhere"),
        ({"cache": object()}, "cache is a object"),
        ({"cu_seqlens": OFFSETS}, "cu_seqlens of shape .* may have offsets of documents"),
        ({"lengths": torch.tensor(LENGTHS)}, "may have offsets of documents"),
        ({"attention_mask": torch.ones(1, 1, TOKENS, TOKENS).long()}, "mask is of torch.int64"),
        ({"encoder_hidden_states": torch.zeros(1, TOKENS, 4)}, "tokens of another model"),
    ],
)
def test_a_row_whose_documents_see_each_other_is_not_cut(
    keywords: dict[str, Any], reason: str
) -> None:
    with pytest.raises(CannotCut, match=reason):
        cut_documents(Leaves.of((torch.zeros(1, TOKENS, 4),), keywords), TWO, mixes=True)


def test_the_mask_may_be_of_truth_values() -> None:
    for dtype in (torch.bool, torch.bfloat16):
        keywords = {"attention_mask": block_mask(dtype)}
        cut_documents(Leaves.of((torch.zeros(1, TOKENS, 4),), keywords), TWO, mixes=True)


def test_flash_attention_needs_no_mask() -> None:
    keywords = {"attention_mask": None, "position_ids": POSITIONS}
    leaves = Leaves.of((torch.zeros(1, TOKENS, 4),), keywords)
    assert cut_documents(leaves, replace(TWO, keep_apart=True), mixes=True).count == 2


@pytest.mark.parametrize("arguments", [(), (None,), (torch.ones(1, TOKENS),)])
def test_a_layer_that_is_not_given_the_documents_is_not_cut(arguments: tuple[Any, ...]) -> None:
    leaves = Leaves.of((torch.zeros(1, TOKENS, 4), *arguments), {})
    for documents in (TWO, replace(TWO, keep_apart=True)):
        with pytest.raises(CannotCut, match="no mask keeps"):
            cut_documents(leaves, documents, mixes=True)
        assert cut_documents(leaves, documents, mixes=False).count == 2
    masked = Leaves.of((torch.zeros(1, TOKENS, 4), torch.zeros(1, 1, TOKENS, TOKENS)), {})
    with pytest.raises(CannotCut, match="joins documents"):
        cut_documents(masked, TWO, mixes=True)


@pytest.mark.parametrize(("rows", "keeps"), [(1, True), (3, False), (4, True)])
def test_positions_of_images_do_not_tell_documents_apart(rows: int, keeps: bool) -> None:
    """All tokens of an image have one time; flash attention is given no positions of three rows."""
    positions = POSITIONS if rows == 1 else POSITIONS.expand(rows, 1, TOKENS)
    found = find_documents(
        {"position_ids": positions}, TOKENS, lambda documents: documents, keep_apart=True
    )
    assert found is not None
    assert found.keep_apart == keeps


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama-untied", "qwen3_moe-untied", "phi3-untied"])
def test_gradients_are_those_of_the_whole_row(
    family: str, implementation: str, passes: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = make(family)
    model.config._attn_implementation = implementation
    ids = torch.randint(1, families.VOCABULARY - 1, (1, TOKENS))
    labels = ids.masked_fill(POSITIONS == 1, -100)
    inputs = {"input_ids": ids, "position_ids": POSITIONS, "labels": labels}
    loss, expected = run(model, inputs, 0)
    for count in (1, 2, 4):
        passes.clear()
        found_loss, found = run(model, inputs, count)
        assert found_loss == pytest.approx(loss, rel=1e-6)
        assert_close(found, expected)
        assert [numbers for _, numbers in passes] == [list(range(count))] * len(passes)
        assert len(passes) == 2 * (2 + 3)  # layers, embedding, norm and head
    assert "computes the whole batch" not in caplog.text


class Convolution(nn.Module):
    """A layer that joins neighbouring tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.convolution(states.mT).mT)


class Joining(nn.Module):
    """A model with one such layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(50, 8), Convolution()

    def forward(self, *, input_ids: torch.Tensor, position_ids: Any = None) -> torch.Tensor:
        states = checkpoint(self.layer, self.embedding(input_ids), use_reentrant=False)
        return states.square().mean()


def test_a_layer_that_joins_documents_is_one_slice_as_on_a_rank_with_one_document(
    passes: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Behind it both reduce as many zeros as they lack slices."""
    torch.manual_seed(0)
    model = Joining()
    row = {"input_ids": torch.randint(50, (1, TOKENS))}
    model(**row).backward()
    expected = gradients(model)
    for inputs in (row | {"position_ids": POSITIONS}, row):
        passes.clear()
        with sliced(model).running((), inputs, lambda _: 2):
            model(**inputs).backward()
        assert_close(gradients(model), expected)
        assert passes[1:3] == [("forward", [0]), ("backward", [0])]
    assert "Conv1d may join the documents" in caplog.text


def test_without_documents_a_row_is_one_slice(passes: list[Any]) -> None:
    model = make("llama-untied")
    ids = torch.randint(1, families.VOCABULARY - 1, (1, TOKENS))
    inputs = {"input_ids": ids, "labels": ids}
    expected = run(model, inputs, 0)[1]
    assert_close(run(model, inputs, 4)[1], expected)
    assert {tuple(numbers) for _, numbers in passes} == {(0,)}


def test_labels_are_shifted_before_the_cut() -> None:
    """The last token of a slice is asked for the first one of the next."""
    model: Any = make("llama-untied")
    ids = torch.randint(1, families.VOCABULARY - 1, (1, TOKENS))
    inputs = {"input_ids": ids, "position_ids": POSITIONS, "labels": ids}
    loss, expected = run(model, inputs, 0)
    found_loss, found = run(model, inputs, 4)
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert_close(found, expected)
    with torch.no_grad():
        logits = model(**{name: inputs[name] for name in ("input_ids", "position_ids")}).logits
    by_hand = nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])
    assert loss == pytest.approx(by_hand.item(), rel=1e-6)
