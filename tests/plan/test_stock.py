"""Stock's account against numbers found before: real models by hand, and a small one measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memascend.base.units import MIB
from memascend.config.deepspeed import DeepSpeedSettings, parse_deepspeed
from memascend.plan.derive import PlanRequest
from memascend.plan.shapes import ModelShapes, TensorShape, builtin, from_config
from memascend.plan.stock import StockPlan, four_pieces, stock

ROOT = Path(__file__).resolve().parents[2]
GB = 1e9

# Hugging Face's example, one rank, two parameter groups; GB. The columns are the terms A to E,
# steady, the peak at the start, the first step's state, and the fp16 overflow check with its peak.
TABLE = {
    "Llama-3.1-8B": (5.25, 2.15, 2.10, 16.78, 17.18, 43.46, 59.5, 8.39, 24.09, 67.5),
    "Qwen2.5-7B": (5.45, 2.15, 2.06, 16.47, 17.18, 43.31, 58.5, 8.24, 22.85, 66.2),
    "Qwen2.5-14B": (7.79, 2.15, 2.66, 21.27, 34.36, 68.22, 97.8, 10.63, 44.31, 112.5),
    "Qwen2.5-32B": (7.79, 2.15, 3.38, 27.05, 68.72, 109.09, 174.6, 13.53, 98.29, 207.4),
}
# fp32 accumulation: E, J and the fp16 peak.
TABLE_FP32 = {
    "Llama-3.1-8B": (34.36, 40.2, 100.8),
    "Qwen2.5-7B": (34.36, 38.1, 98.6),
    "Qwen2.5-14B": (68.72, 73.9, 176.4),
    "Qwen2.5-32B": (137.44, 163.8, 341.6),
}
# With the four pieces: steady, first step, start.
TABLE_PIECES = {
    "Llama-3.1-8B": (38.9, 47.2, 54.9),
    "Qwen2.5-7B": (37.8, 46.0, 53.0),
    "Qwen2.5-14B": (58.1, 68.8, 87.7),
    "Qwen2.5-32B": (101.5, 115.0, 167.0),
}


def close(nbytes: int, gigabytes: float) -> bool:
    """Equal within the rounding of the table and the small parameters it leaves out."""
    digits = len(str(gigabytes).partition(".")[2])
    return abs(nbytes / GB - gigabytes) <= 0.6 * 10**-digits + 0.02


@pytest.mark.parametrize("model", TABLE)
def test_stock_on_real_models(model: str) -> None:
    plan = stock(builtin(model), request=PlanRequest())
    half = stock(builtin(model), request=PlanRequest(precision="fp16"))
    terms = [plan.host[name] for name in list(plan.host)[:5]]
    found = [
        *terms,
        plan.host_bytes,
        plan.initialization_bytes,
        plan.host_step["I first optimizer state"],
        half.host_step["J overflow check"],
        half.step_bytes,
    ]
    assert [close(*pair) for pair in zip(found, TABLE[model], strict=True)] == [True] * 10, found


@pytest.mark.parametrize("model", TABLE_FP32)
def test_stock_with_fp32_accumulation(model: str) -> None:
    request = PlanRequest(precision="fp16", accumulation_dtype="fp32")
    plan = stock(builtin(model), request=request)
    found = [plan.host["E flat gradients"], plan.host_step["J overflow check"], plan.step_bytes]
    assert all(close(*pair) for pair in zip(found, TABLE_FP32[model], strict=True)), found


@pytest.mark.parametrize("model", TABLE_PIECES)
def test_the_four_pieces_on_real_models(model: str) -> None:
    plan = four_pieces(builtin(model), request=PlanRequest())
    found = [plan.host_bytes, plan.step_bytes, plan.initialization_bytes]
    assert all(close(*pair) for pair in zip(found, TABLE_PIECES[model], strict=True)), found
    half = four_pieces(builtin(model), request=PlanRequest(precision="fp16"))
    assert "J overflow check" not in half.host_step


def offloading(
    param: dict[str, Any] | None = None, optimizer: dict[str, Any] | None = None
) -> DeepSpeedSettings:
    offload = {"offload_param": param, "offload_optimizer": optimizer}
    return parse_deepspeed({"zero_optimization": offload})


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "shapes").glob("*.json")))
def test_the_terms_agree_with_the_benchmarks_to_the_byte(path: Path) -> None:
    plan = stock(builtin(path.stem), request=PlanRequest(), rounds_pinned=False)
    expected: dict[str, int] = {}
    for row in json.loads(path.read_text())["allocations"]:
        letter = row["letter"]
        expected[letter] = expected.get(letter, 0) + row["nbytes"] * row["count"]
    assert {name[0]: plan.host[name] for name in plan.host if name[1] == " "} == expected


def test_small_tensors_of_another_dtype_stay_as_they_are_and_large_ones_do_not() -> None:
    """Stock's swapper takes all that is on the drive to be of the model's dtype."""
    tensors = [TensorShape("w", (1 << 20, 1))]
    tensors += [
        TensorShape(f"frozen{n}", (n,), trainable=False, itemsize=4) for n in (100, 1 << 20)
    ]
    plan = stock(ModelShapes("m", tuple(tensors)), request=PlanRequest(), rounds_pinned=False)
    assert plan.host["F small parameters"] == 4 * 100
    assert plan.drive["parameters"] == 2 * 2 * (1 << 20)


def small_llama() -> ModelShapes:
    config = {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    }
    return from_config(config)


def measured_run(**changes: Any) -> StockPlan:
    """A run on the CPU accelerator: one parameter group, sub-groups and buffers of 20M."""
    request = PlanRequest(sub_group_size=20_000_000, has_decay_groups=False, **changes)
    param = {"buffer_count": 16, "buffer_size": 20_000_000, "max_in_cpu": 0}
    return stock(small_llama(), request=request, settings=offloading(param), rounds_pinned=False)


def test_a_small_model_that_was_measured() -> None:
    assert small_llama().numel == pytest.approx(44.04e6, rel=2e-4)
    plan = measured_run()
    megabytes = {name: round(nbytes / 1e6, 2) for name, nbytes in plan.host.items()}
    assert megabytes["A parameter pool"] == 640.01
    assert megabytes["C write-back buffer"] == 46.93
    assert megabytes["D optimizer buffers"] == pytest.approx(4 * 93.86, abs=0.02)
    assert megabytes["E flat gradients"] == 88.09
    locked = sum(plan.host[name] for name in plan.host if name[0] in "ACD")
    assert locked / 2**30 == pytest.approx(0.989, abs=0.001)
    assert plan.host_initialization["G fp32 copy of a sub-group"] / 1e6 == pytest.approx(
        93.86, abs=0.01
    )
    assert plan.host_initialization["H first gradients"] / 1e6 == pytest.approx(93.86, abs=0.01)
    assert plan.host_step["I first optimizer state"] / 1e6 == pytest.approx(2 * 93.86, abs=0.01)


def test_fp32_gradients_of_the_small_model() -> None:
    plan = measured_run(accumulation_dtype="fp32")
    assert round(plan.host["E flat gradients"] / 1e6, 1) == 176.2


# -- rules -----------------------------------------------------------------------------------------


def model(*numels: int) -> ModelShapes:
    return ModelShapes("m", tuple(TensorShape(f"t{i}.w", (n, 1)) for i, n in enumerate(numels)))


def test_a_first_sub_group_that_fits_stays_in_memory_and_is_not_read() -> None:
    request = PlanRequest(sub_group_size=MIB, reuse_numel=0)
    shapes = model(MIB, 2 * MIB)
    plan = stock(shapes, request=request, settings=offloading({"max_in_cpu": MIB}))
    assert plan.host["B 16-bit cache"] == 2 * MIB
    assert plan.read_bytes["parameters"] == 2 * 2 * 2 * MIB
    assert plan.written_bytes["parameters"] == 2 * 2 * MIB
    assert plan.drive["parameters"] == 2 * 3 * MIB


def test_with_room_for_all_nothing_is_written_back() -> None:
    plan = stock(model(MIB, 2 * MIB), request=PlanRequest())
    assert plan.host["C write-back buffer"] == 0
    assert plan.read_bytes["parameters"] == 0


def test_small_parameters_are_pinned_one_by_one() -> None:
    settings = offloading({"max_in_cpu": 0})
    plan = stock(model(MIB, 1000, 3000), request=PlanRequest(), settings=settings)
    assert plan.host["F small parameters"] == 2048 + 8192
    unpinned = offloading({"max_in_cpu": 0, "pin_memory": False})
    plan = stock(model(MIB, 1000, 3000), request=PlanRequest(), settings=unpinned)
    assert plan.host["F small parameters"] == 2 * 4000


def test_a_small_sub_group_keeps_its_optimizer_in_memory() -> None:
    plan = stock(model(1000), request=PlanRequest())
    assert plan.host["optimizer kept in memory"] == 1000 * 12 + 4096
    assert plan.drive["master weights"] == 0


def test_pipelining_needs_three_times_the_buffers() -> None:
    settings = offloading(optimizer={"pipeline_write": True})
    plan = stock(model(MIB), request=PlanRequest(), settings=settings)
    assert plan.host["D optimizer buffers"] == 12 * 4 * MIB
    assert any("buffer_count raised from 4 to 12" in note for note in plan.notes)


def test_the_pool_does_not_shrink_with_the_ranks_and_writing_back_grows() -> None:
    shapes, settings = model(8 * MIB, 8 * MIB), offloading({"max_in_cpu": 0})
    one, two = (
        stock(shapes, request=PlanRequest(world=w, sub_group_size=4 * MIB), settings=settings)
        for w in (1, 2)
    )
    assert one.host["A parameter pool"] == two.host["A parameter pool"]
    assert one.host["C write-back buffer"] == two.host["C write-back buffer"] == 16 * MIB
    assert one.host["E flat gradients"] == 2 * two.host["E flat gradients"]


def test_gradients_go_to_the_drive_in_fp32_once_per_step() -> None:
    request = PlanRequest(gradient_accumulation_steps=4, reuse_numel=0)
    plan = stock(model(MIB), request=request, settings=offloading({"max_in_cpu": 0}))
    assert plan.written_bytes["gradients"] == plan.read_bytes["gradients"] == 4 * MIB
    assert plan.read_bytes["parameters"] == 4 * 2 * 2 * MIB
    assert plan.read_bytes["optimizer state"] == 8 * MIB


def test_on_the_cpu_everything_stays_there() -> None:
    request = PlanRequest(parameters_device="cpu", optimizer_device="cpu")
    plan = stock(model(MIB), request=request, rounds_pinned=False)
    assert plan.drive_bytes == 0
    assert plan.host["B 16-bit cache"] == 2 * MIB
    assert plan.host["optimizer kept in memory"] == 16 * MIB


@pytest.mark.parametrize(("model", "percent"), [("Llama-3.1-8B", 42), ("Qwen2.5-32B", 51)])
def test_the_four_pieces_save_half_of_a_tuned_stock_in_fp16(model: str, percent: int) -> None:
    """docs/comparison.md has these figures."""
    offload = {"device": "nvme", "pin_memory": False}
    zero = {
        "stage": 3,
        "sub_group_size": 10**8,
        "offload_param": {**offload, "max_in_cpu": 0},
        "offload_optimizer": offload,
    }
    settings = parse_deepspeed({"fp16": {"enabled": True}, "zero_optimization": zero})
    request = PlanRequest(precision="fp16", sub_group_size=10**8)
    peaks = [
        account(builtin(model), request=request, settings=settings).peak_bytes
        for account in (stock, four_pieces)
    ]
    assert int(100 * (1 - peaks[1] / peaks[0])) == percent
