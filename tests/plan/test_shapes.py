"""Shapes: what transformers builds is what a config.json gives; headers are checked before use."""

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
    from_safetensors,
)

ROOT = Path(__file__).resolve().parents[2]

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("llama", SMALL),
    ("llama", SMALL | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", SMALL | {"num_key_value_heads": None, "head_dim": 16}),
    ("qwen2", SMALL),
    ("qwen2", SMALL | {"tie_word_embeddings": True}),
    ("qwen3", SMALL),
    ("qwen3", SMALL | {"head_dim": 8, "attention_bias": True}),
    ("mistral", SMALL | {"head_dim": 16}),
    (
        "mistral",
        {key: SMALL[key] for key in SMALL if key != "num_key_value_heads"}
        | {"hidden_size": 64, "num_attention_heads": 8},
    ),
    ("mixtral", SMALL | {"num_local_experts": 4}),
    ("mixtral", SMALL),
    ("gpt2", GPT2),
    ("gpt2", GPT2 | {"n_inner": 40, "tie_word_embeddings": False}),
]


def named(shapes: ModelShapes) -> list[tuple[str, tuple[int, ...]]]:
    return [(tensor.name, tensor.shape) for tensor in shapes.tensors]


@pytest.mark.parametrize(("model_type", "numbers"), CONFIGS)
def test_a_config_gives_the_tensors_that_transformers_builds(
    model_type: str, numbers: dict[str, Any]
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(model_type, **numbers)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    built = from_module(model)
    derived = from_config({"model_type": model_type, **numbers})
    assert named(derived) == named(built)
    assert set(derived.tied) == set(built.tied)


def test_a_config_that_transformers_saved_reads_the_same(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model("qwen3", **SMALL)
    config.save_pretrained(tmp_path)
    assert named(from_config(tmp_path / "config.json")) == named(
        from_config({"model_type": "qwen3", **SMALL})
    )


def test_an_unknown_architecture_names_the_known_ones_and_the_other_ways() -> None:
    with pytest.raises(ConfigError, match=r'"bert".*gpt2, llama.*safetensors.*from_module'):
        from_config({"model_type": "bert"})


@pytest.mark.parametrize("value", [0, -1, "32", 3.5, True])
def test_an_impossible_number_is_an_error_that_names_its_key(value: object) -> None:
    with pytest.raises(ConfigError, match="hidden_size"):
        from_config({"model_type": "llama", **SMALL, "hidden_size": value})


def test_a_missing_number_is_an_error() -> None:
    with pytest.raises(ConfigError, match="hidden_size must be"):
        from_config({"model_type": "llama"})


# -- modules ---------------------------------------------------------------------------------------


class FakeModule:
    def __init__(self, *named_parameters: tuple[str, Any]) -> None:
        self._named = named_parameters

    def named_parameters(self, *, remove_duplicate: bool) -> list[tuple[str, Any]]:
        assert not remove_duplicate
        return list(self._named)


def test_a_partitioned_module_gives_the_shapes_before_partitioning() -> None:
    empty = SimpleNamespace(shape=(0,), ds_shape=(4, 8), requires_grad=True)
    frozen = SimpleNamespace(shape=(3,), requires_grad=False)
    shapes = from_module(FakeModule(("a", empty), ("b", frozen), ("c", empty)))
    assert shapes.tensors == (TensorShape("a", (4, 8)), TensorShape("b", (3,), trainable=False))
    assert shapes.tied == {"c": "a"}
    assert shapes.numel == 35
    assert [tensor.name for tensor in shapes.trainable] == ["a"]


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


# -- safetensors -----------------------------------------------------------------------------------


def entry(shape: list[int], begin: int = 0, dtype: str = "BF16") -> dict[str, Any]:
    numel = 1
    for size in shape:
        numel *= size
    itemsize = {"BF16": 2, "F32": 4, "U8": 1}[dtype]
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + numel * itemsize]}


def write(path: Path, header: object, data_bytes: int = 4096) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data_bytes))
    return path


def test_a_safetensors_file_gives_its_floating_point_tensors(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "layers.10.w": entry([4, 8]),
        "layers.2.w": entry([3]),
        "mask": entry([8, 8], dtype="U8"),
    }
    shapes = from_safetensors(write(tmp_path / "m.safetensors", header))
    assert named(shapes) == [("layers.2.w", (3,)), ("layers.10.w", (4, 8))]


def test_what_safetensors_itself_writes_can_be_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    numpy_free = pytest.importorskip("safetensors.torch")
    numpy_free.save_file({"a": torch.zeros(3, 5)}, tmp_path / "m.safetensors")
    assert named(from_safetensors(tmp_path)) == [("a", (3, 5))]


def test_an_index_and_its_folder_give_the_tensors_of_all_files(tmp_path: Path) -> None:
    write(tmp_path / "1.safetensors", {"a": entry([2]), "unlisted": entry([9])})
    write(tmp_path / "2.safetensors", {"b": entry([3])})
    index = tmp_path / "model.safetensors.index.json"
    weight_map = {"a": "1.safetensors", "b": "2.safetensors"}
    index.write_text(json.dumps({"weight_map": weight_map}))
    for source in (index, tmp_path):
        assert named(from_safetensors(source)) == [("a", (2,)), ("b", (3,))]


@pytest.mark.parametrize("file_name", ["../1.safetensors", "", "..", ".", "/etc/passwd", 7])
def test_an_index_cannot_point_elsewhere(tmp_path: Path, file_name: object) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": file_name}}))
    with pytest.raises(ConfigError, match="beside it"):
        from_safetensors(index)


def test_an_index_that_disagrees_with_its_files_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "1.safetensors", {"a": entry([2])})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"b": "1.safetensors"}}))
    with pytest.raises(ConfigError, match='"b"'):
        from_safetensors(index)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "not a safetensors file"),
        ((4).to_bytes(8, "little") + b"nope", "not JSON"),
        ((4).to_bytes(8, "little") + b"\xff\xfe\xff\xfe", "not JSON"),
        ((2).to_bytes(8, "little") + b"[]", "JSON object"),
    ],
)
def test_what_is_not_safetensors_is_an_error(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        from_safetensors(path)


@pytest.mark.parametrize(
    "damaged",
    [
        "text",
        {"dtype": "F32", "shape": [2]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
        {"dtype": "U8", "shape": [2], "data_offsets": [4, 2]},
        {"dtype": 3, "shape": [2], "data_offsets": [0, 8]},
    ],
)
def test_a_damaged_entry_is_an_error_that_names_it(tmp_path: Path, damaged: object) -> None:
    path = write(tmp_path / "m.safetensors", {"weight": damaged})
    with pytest.raises(ConfigError, match='"weight" is damaged'):
        from_safetensors(path)


def test_a_file_that_is_cut_off_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", {"weight": entry([4096])}, data_bytes=100)
    with pytest.raises(ConfigError, match="broke off"):
        from_safetensors(path)


def test_a_folder_without_safetensors_and_a_missing_file_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no \.safetensors file"):
        from_safetensors(tmp_path)
    with pytest.raises(ConfigError, match="cannot read"):
        from_safetensors(tmp_path / "missing.safetensors")


# -- built-in models -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "shapes").glob("*.json")))
def test_built_in_models_agree_with_the_benchmarks(path: Path) -> None:
    assert builtin(path.stem).numel == json.loads(path.read_text())["parameters"]


def test_built_in_models_have_their_published_sizes() -> None:
    assert builtin("Llama-3.1-70B").numel == 70_553_706_496
    assert builtin("mixtral-8x7b").numel == 46_702_792_704


def test_every_built_in_model_names_its_source() -> None:
    assert len(builtin_names()) == 6
    for name in builtin_names():
        content = json.loads((ROOT / "memascend" / "plan" / "models" / f"{name}.json").read_text())
        assert content["source"].startswith("https://huggingface.co/")


def test_a_misspelt_model_gets_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'Llama-3\.1-8B'"):
        builtin("llama3.1-8b")


@pytest.mark.parametrize("model_type", [["llama"], {}, None, 7])
def test_a_model_type_that_is_no_name_is_an_error(model_type: object) -> None:
    with pytest.raises(ConfigError, match="cannot derive the tensors"):
        from_config({"model_type": model_type})


def test_more_layers_than_any_model_has_take_no_memory() -> None:
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 10**12, "vocab_size": 100}
    with pytest.raises(ConfigError, match="n_layer must be"):
        from_config(config)


def test_more_parameters_than_there_can_be_are_an_error() -> None:
    config = {"model_type": "gpt2", "n_embd": 1 << 38, "n_layer": 1, "vocab_size": 1 << 40}
    with pytest.raises(ConfigError, match="more than there can be"):
        from_config(config)


@pytest.mark.parametrize("name", ["layers.\u00b2", "layers." + "7" * 5000])
def test_names_are_put_in_order_whatever_their_numbers(tmp_path: Path, name: str) -> None:
    header = {
        key: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
        for key in (name, "layers.10", "layers.2")
    }
    path = write(tmp_path / "m.safetensors", header, 4)
    names = [tensor.name for tensor in from_safetensors(path).tensors]
    assert names.index("layers.2") < names.index("layers.10")


@pytest.mark.parametrize("shape", [[1] * 65, [1 << 63], [10**4000] * 60])
def test_a_shape_beyond_reason_is_damaged(tmp_path: Path, shape: list[int]) -> None:
    header = {"weight": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}
    path = write(tmp_path / "m.safetensors", header, 4)
    with pytest.raises(ConfigError, match='"weight" is damaged') as caught:
        from_safetensors(path)
    assert len(str(caught.value)) < 5000


@pytest.mark.parametrize("text", ["[" * 100_000, '{"weight_map": {"a": 1, "a": 2}}'])
def test_json_that_cannot_be_read_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="is not JSON"):
        from_config(tmp_path / "config.json")
