"""Shapes of a model, from a config.json, from a module, and of the models that are built in."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memascend.errors import ConfigError
from memascend.plan.shapes import (
    ModelShapes,
    TensorShape,
    builtin,
    builtin_names,
    from_config,
    from_module,
)
from tests.support.plan_models import SMALL, decoder

ROOT = Path(__file__).resolve().parents[2]


def named(shapes: ModelShapes) -> list[tuple[str, tuple[int, ...]]]:
    return [(tensor.name, tensor.shape) for tensor in shapes.tensors]


def test_a_config_that_transformers_saved_reads_the_same(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model("qwen3", **SMALL)
    config.save_pretrained(tmp_path)
    assert named(from_config(tmp_path / "config.json")) == named(
        from_config({"model_type": "qwen3", **SMALL})
    )


# -- modules ---------------------------------------------------------------------------------------


def dtype(itemsize: int) -> Any:
    return SimpleNamespace(itemsize=itemsize)


class FakeModule:
    def __init__(self, *named_parameters: tuple[str, Any]) -> None:
        self._named = named_parameters

    def named_parameters(self, *, remove_duplicate: bool) -> list[tuple[str, Any]]:
        assert not remove_duplicate
        return list(self._named)


def test_shapes_of_a_config_keep_it_and_others_have_none() -> None:
    config = {"model_type": "qwen3", **SMALL}
    assert from_config(config).config == config
    assert decoder().config is None


def test_a_partitioned_module_gives_the_shapes_before_partitioning() -> None:
    empty = SimpleNamespace(shape=(0,), ds_shape=(4, 8), requires_grad=True)
    frozen = SimpleNamespace(shape=(3,), requires_grad=False, dtype=dtype(4))
    shapes = from_module(FakeModule(("a", empty), ("b", frozen), ("c", empty)))
    assert shapes.tensors == (
        TensorShape("a", (4, 8)),
        TensorShape("b", (3,), trainable=False, itemsize=4),
    )
    assert shapes.tied == {"c": "a"}
    assert shapes.numel == 35
    assert [tensor.name for tensor in shapes.trainable] == ["a"]


def test_a_frozen_shard_has_a_dtype_of_its_own_whatever_stands_for_the_parameter() -> None:
    """A module that is cast after zero.Init casts only what stands for an absent parameter."""
    frozen = SimpleNamespace(
        shape=(0,),
        ds_shape=(4, 8),
        requires_grad=False,
        dtype=dtype(2),
        ds_tensor=SimpleNamespace(dtype=dtype(1)),
    )
    (tensor,) = from_module(FakeModule(("a", frozen))).tensors
    assert tensor.shard_bytes(3, 2) == 11
    assert TensorShape("b", (4, 8)).shard_bytes(3, 2) == 22


def test_a_modules_own_choice_of_muons_parameters_is_kept() -> None:
    """DeepSpeed takes a parameter without the attribute for one of Adam."""
    muons, others = (SimpleNamespace(shape=(4, 4), requires_grad=True) for _ in range(2))
    named = (("a", muons), ("b", others))
    assert [one.uses_muon for one in from_module(FakeModule(*named)).tensors] == [None, None]
    muons.use_muon = True
    assert [one.uses_muon for one in from_module(FakeModule(*named)).tensors] == [True, False]


def test_a_module_without_parameters_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no parameters"):
        from_module(FakeModule())


def test_a_shard_is_padded_to_the_number_of_ranks() -> None:
    assert TensorShape("a", (5, 5)).shard_numel(4) == 7


def test_layers_are_the_tensors_below_one_number() -> None:
    names = ("embed.weight", "h.0.a.weight", "h.0.experts.1.b", "h.1.a.weight", "head.weight")
    shapes = ModelShapes("m", tuple(TensorShape(name, (1,)) for name in names))
    assert [[t.name for t in layer] for layer in shapes.layers()] == [
        ["embed.weight"],
        ["h.0.a.weight", "h.0.experts.1.b"],
        ["h.1.a.weight"],
        ["head.weight"],
    ]


# -- built-in models -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "shapes").glob("*.json")))
def test_built_in_models_agree_with_the_benchmarks(path: Path) -> None:
    assert builtin(path.stem).numel == json.loads(path.read_text())["parameters"]


def test_built_in_models_have_their_published_sizes() -> None:
    assert builtin("Llama-3.1-70B").numel == 70_553_706_496
    assert builtin("mixtral-8x7b").numel == 46_702_792_704
    assert builtin("Qwen/Qwen3-8B").numel == 8_190_735_360
    assert builtin("Qwen/Qwen3-30B-A3B").numel == 30_532_122_624
    assert builtin("microsoft/phi-4").numel == 14_659_507_200
    assert builtin("openai/gpt-oss-20b").numel == 20_914_757_184
    assert builtin("openai/gpt-oss-120b").numel == 116_829_156_672
    assert builtin("google/gemma-3-12b-it").numel == 11_766_034_176
    assert round(builtin("deepseek-ai/DeepSeek-V3").numel / 1e9) == 671
    assert builtin("Qwen/Qwen3-0.6B").numel == 596_049_920
    assert round(builtin("Qwen/Qwen3-235B-A22B").numel / 1e9) == 235


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("meta-llama/Llama-3.1-8B", "Llama-3.1-8B"),
        ("meta-llama/Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("qwen/qwen3-8b-base", "Qwen3-8B"),
        ("mistralai/Mistral-7B-v0.3", "Mistral-7B-v0.3"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "Mistral-7B-v0.3"),
        ("mistralai/Mixtral-8x7B-v0.1", "Mixtral-8x7B"),
        ("allenai/OLMo-2-1124-7B-Instruct", "OLMo-2-1124-7B"),
        ("google/gemma-3-12b-it", "gemma-3-12b-pt"),
    ],
)
def test_a_name_on_the_hub_is_a_built_in_model(name: str, model: str) -> None:
    assert builtin(name).name == model


def test_every_built_in_model_names_its_source() -> None:
    assert len(builtin_names()) == 27
    for name in builtin_names():
        content = json.loads((ROOT / "memascend" / "plan" / "models" / f"{name}.json").read_text())
        assert content["source"].startswith("https://huggingface.co/")


@pytest.mark.parametrize("name", ["Mistral-7B-v0.1", "Mistral-7B-Instruct-v0.2"])
def test_a_version_with_another_vocabulary_is_not_taken_for_a_built_in_one(name: str) -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'Mistral-7B-v0\.3'"):
        builtin(name)


def test_a_misspelt_model_gets_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'Llama-3\.1-8B'"):
        builtin("llama3.1-8b")


def test_more_parameters_than_there_can_be_are_an_error() -> None:
    config = {"model_type": "gpt2", "n_embd": 1 << 38, "n_layer": 1, "vocab_size": 1 << 40}
    with pytest.raises(ConfigError, match="more than there can be"):
        from_config(config)
