"""Values come back, the last first."""

from __future__ import annotations

import pytest
from torch import nn

from memascend.slices.replaced import Replaced


def test_attributes_come_back_and_new_ones_go() -> None:
    module = nn.Linear(1, 1)
    before = dict(vars(module))
    replaced = Replaced()
    replaced.set(module, "training", None)
    replaced.set(module, "training", 3)
    replaced.set(module, "forward", nn.Identity())
    assert (vars(module)["training"], "forward" in module._modules) == (3, False)
    replaced.restore()
    assert vars(module) == before
    module.train(False)
    replaced.restore()  # nothing is left to come back
    assert not module.training


@pytest.mark.parametrize("error", [None, KeyboardInterrupt()])
def test_within_a_context_a_dictionary_has_another_value(error: BaseException | None) -> None:
    names, replaced = {"a": 1}, Replaced()
    try:
        with replaced.having(names, "a", 2), replaced.having(names, "b", 3):
            assert names == {"a": 2, "b": 3}
            if error is not None:
                raise error
    except KeyboardInterrupt:
        pass
    assert names == {"a": 1}
    names["a"] = 4
    replaced.restore()
    assert names == {"a": 4}
