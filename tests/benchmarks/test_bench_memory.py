"""The memory bench: its arithmetic, and what it promises at its smallest size."""

from __future__ import annotations

import json
from pathlib import Path

import bench_memory
import pytest
import trainee

from tests.support.benchmarks import rows_of

#: Slope of the process around memascend's own bytes: modules, hooks and what autograd keeps.
BYTES_PER_PARAMETER_MAX = 0.3


def test_the_slope_is_that_of_the_nearest_line() -> None:
    assert bench_memory.slope([(0, 5.0), (1, 7.0), (2, 9.0)]) == pytest.approx(2.0)
    # By hand: y - mean is (-1, 2, -1), x - mean is (-1, 0, 1).
    assert bench_memory.slope([(0, 0.0), (1, 3.0), (2, 0.0)]) == pytest.approx(0.0)


def test_a_slope_of_one_size_is_refused() -> None:
    with pytest.raises(ValueError, match="two different sizes"):
        bench_memory.slope([(3, 1.0), (3, 2.0)])


@pytest.mark.parametrize("vocabulary", [4096, 32768])
def test_a_model_has_as_many_parameters_as_its_layers_say(vocabulary: int) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = trainee.Model(2, vocabulary)
    with torch.device("meta"):
        built = transformers.LlamaForCausalLM(transformers.LlamaConfig(**model.shape))
    sizes = [parameter.numel() for parameter in built.parameters()]
    assert sum(sizes) == model.numel
    assert max(sizes) == model.largest_numel


@pytest.mark.parametrize("numel", bench_memory.SIZES["large"])
def test_the_nearest_model_is_at_most_half_a_layer_away(numel: int) -> None:
    model = trainee.model_of(numel)
    assert abs(model.numel - numel) <= model.layer_numel / 2


def test_every_matrix_is_large_enough_for_stock_to_keep_it_on_the_drive() -> None:
    kv_numel = trainee.HIDDEN * trainee.HIDDEN * trainee.KEY_VALUE_HEADS // trainee.HEADS
    assert 2 * min(kv_numel, trainee.HIDDEN * trainee.FFN) >= 1 << 20


@pytest.mark.deepspeed
@pytest.mark.full
def test_memascend_takes_the_same_bytes_for_every_model(tmp_path: Path) -> None:
    rows = rows_of("memory", tmp_path)
    ours = [row for row in rows if row["contender"] == "memascend" and row["case"] != "slope"]
    stock = [row for row in rows if row["contender"] == "stock" and row["case"] != "slope"]
    assert len(ours) == len(stock) == len(bench_memory.SIZES["small"]) + 1
    assert len({json.dumps(row["config"]["own_bytes"]) for row in ours}) == 1
    for our, their in zip(ours, stock, strict=True):
        assert our["config"]["losses"] == their["config"]["losses"]
        assert our["figures"]["peak_mb"] < their["figures"]["peak_mb"]
        assert our["figures"]["device_mb"] == their["figures"]["device_mb"]
    slopes = {
        row["contender"]: row["figures"]["bytes_per_parameter"]
        for row in rows
        if row["case"] == "slope"
    }
    assert slopes["memascend"] < BYTES_PER_PARAMETER_MAX < slopes["stock"]
    assert slopes[bench_memory.HEAP_LEFT] > BYTES_PER_PARAMETER_MAX
