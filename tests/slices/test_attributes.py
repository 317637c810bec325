"""Tensors in the attributes of a module: found in lists, compared by identity, taken back."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import nn

from memascend.slices.attributes import Attributes
from memascend.slices.cut import CannotCut


def module(**values: Any) -> nn.Module:
    """Return a module within another one, with attributes."""
    outer = nn.Sequential(nn.Linear(2, 2))
    for name, value in values.items():
        setattr(outer[0], name, value)
    return outer


def with_graph() -> torch.Tensor:
    return torch.ones(3, requires_grad=True).exp()


@pytest.mark.parametrize(
    "value", [with_graph(), [with_graph()], {"a": ({"b": deque([with_graph()])},)}]
)
def test_a_graph_is_found_with_the_name_of_its_module(value: Any) -> None:
    with pytest.raises(CannotCut, match=r"its attribute 0\.kept has a graph"):
        Attributes(module(kept=value)).check_graphs()


def test_parameters_and_their_lists_have_no_graph_and_no_rows() -> None:
    attributes = Attributes(module(weights=[nn.Parameter(torch.ones(3))], text="a", number=3))
    attributes.check_graphs()
    attributes.check_rows(3)


def test_only_a_tensor_as_long_as_several_sequences_may_be_of_them() -> None:
    attributes = Attributes(module(kept=torch.ones(3, 1)))
    attributes.check_rows(2)
    with pytest.raises(CannotCut, match=r"0\.kept of shape \(3, 1\) may be of all"):
        attributes.check_rows(3)
    Attributes(module(kept=torch.ones(1))).check_rows(1)


@pytest.mark.parametrize("before", [None, torch.ones(1), [torch.ones(1)], {"a": torch.ones(1)}])
@pytest.mark.parametrize("after", [torch.ones(1), [torch.ones(1)], (torch.ones(1),)])
def test_another_tensor_is_a_kept_one_and_is_taken_back(before: Any, after: Any) -> None:
    outer: Any = module(kept=before)
    attributes = Attributes(outer)
    attributes.check_kept()
    outer[0].kept, outer[0].fresh = after, after
    with pytest.raises(CannotCut, match=r"its attribute 0\.kept keeps a value"):
        attributes.check_kept()
    attributes.restore()
    assert outer[0].kept is before
    assert not hasattr(outer[0], "fresh")


def test_lists_and_dictionaries_that_were_changed_in_place_have_their_items_again() -> None:
    inner: list[Any] = [1]
    table: dict[str, Any] = {"inner": inner}
    outer: Any = module(table=table)
    attributes = Attributes(outer)
    inner.append(torch.ones(1))
    table["more"] = torch.ones(1)
    with pytest.raises(CannotCut, match="keeps a value"):
        attributes.check_kept()
    attributes.restore()
    assert outer[0].table is table
    assert table == {"inner": [1]}
    assert table["inner"] is inner


def test_a_tensor_written_in_place_and_counters_are_not_kept_ones() -> None:
    outer: Any = module(total=torch.zeros(1), calls=0)
    outer[0].register_buffer("load", torch.zeros(1))
    outer[0].register_buffer("count", torch.zeros(1, dtype=torch.long))
    attributes = Attributes(outer)
    outer[0].total += 1
    outer[0].load += 1
    outer[0].count = outer[0].count + 1
    outer[0].calls = 1
    attributes.check_kept()
    outer[0].load = torch.ones(1)
    with pytest.raises(CannotCut, match=r"its attribute 0\.load keeps"):
        attributes.check_kept()
