"""Products in fp32 are those of torch."""

from __future__ import annotations

import pytest
import torch

from tests.support.products import batch_product, matrix_product, matrix_product_and_bias


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_matrices_are_multiplied_as_torch_does(dtype: str) -> None:
    generator = torch.Generator().manual_seed(1)
    one, other, bias = (
        torch.randn(shape, generator=generator).to(getattr(torch, dtype))
        for shape in [(3, 5), (5, 4), (4,)]
    )
    found = matrix_product(one, other)
    assert found.dtype == one.dtype
    torch.testing.assert_close(found, one @ other)
    torch.testing.assert_close(found.double(), one.double() @ other.double(), rtol=0.01, atol=0.01)
    batches = torch.stack([one, -one]), torch.stack([other, other])
    torch.testing.assert_close(batch_product(*batches), torch.bmm(*batches))
    factors = {"beta": 0.5, "alpha": 2}
    found = matrix_product_and_bias(bias, one, other, **factors)
    assert found.dtype == one.dtype
    torch.testing.assert_close(found, torch.addmm(bias, one, other, **factors))
