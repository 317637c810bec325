"""The model of `memascend plan`: built in, from files, or as transformers builds it."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from memascend.cli import plan_models
from memascend.cli.main import main
from memascend.cli.plan_models import build_on_meta, find_model
from memascend.errors import ConfigError
from tests.support.plan_models import SMALL

#: A family that is not built in.
GRANITE: dict[str, Any] = {"model_type": "granite", **SMALL}
T5 = {"model_type": "t5", "vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2}


def write(folder: Path, content: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_a_config_of_another_family_is_built_by_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = write(tmp_path / "granite-small", GRANITE)
    for name in (path, path.parent):
        shapes = find_model(str(name))
        assert shapes.name == "granite-small"
        names = [tensor.name for tensor in shapes.tensors]
        assert names[0] == "model.embed_tokens.weight"
        assert "model.layers.1.mlp.down_proj.weight" in names
        assert shapes.config == GRANITE


@pytest.mark.parametrize(
    ("named", "has_head"),
    [
        ("LlamaForCausalLM", True),
        ("LlamaForSequenceClassification", False),
        ("LlamaModel", False),
    ],
)
def test_a_model_without_a_head_of_language_has_none(
    tmp_path: Path, named: str, has_head: bool
) -> None:
    pytest.importorskip("transformers")
    path = write(tmp_path, {"model_type": "llama", **SMALL, "architectures": [named]})
    names = [tensor.name for tensor in find_model(str(path)).tensors]
    assert ("lm_head.weight" in names) == has_head


def test_the_context_of_a_family_that_transformers_builds_is_refused_with_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    path = write(tmp_path, GRANITE)
    assert main(["plan", str(path), "--context", "4096"]) == 1
    said = capsys.readouterr().err
    assert "the saved activations of model_type='granite' are not known" in said
    assert "leave out --context and --fit" in said


def test_the_class_is_that_of_the_file_else_the_first_that_takes_it() -> None:
    transformers = pytest.importorskip("transformers")
    named = build_on_meta(T5 | {"architectures": ["T5EncoderModel"]})
    assert type(named) is transformers.T5EncoderModel
    for nonsense in ([], None, ["Trainer"], [3]):
        built = build_on_meta(T5 | {"architectures": nonsense})
        assert type(built) is transformers.T5ForConditionalGeneration
    assert {parameter.device.type for parameter in built.parameters()} == {"meta"}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"model_type": "no-such-model"}, "no-such-model"),
        (GRANITE | {"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000"),
        (T5 | {"text_config": {"num_hidden_layers": 10**9}}, "num_hidden_layers=1000000000"),
        (GRANITE | {"hidden_size": "wide"}, "hidden_size"),
        ({"vocab_size": 3}, "model_type"),
    ],
)
def test_the_reason_of_transformers_is_told_beside_the_known_families(
    tmp_path: Path, content: dict[str, Any], reason: str
) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=r"Known: .*llama.*safetensors") as caught:
        find_model(str(write(tmp_path, content)))
    assert reason in str(caught.value).rpartition("transformers cannot build it: ")[2]


def test_without_transformers_the_known_families_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(plan_models, "build_on_meta", lambda content: pytest.fail("was built"))
    assert main(["plan", str(write(tmp_path, GRANITE))]) == 1
    assert "where transformers is installed" in capsys.readouterr().err


def test_a_known_family_needs_no_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_models, "build_on_meta", lambda content: pytest.fail("was built"))
    shapes = find_model(str(write(tmp_path / "mine", {"model_type": "llama", **SMALL})))
    assert shapes.name == "mine"
    with pytest.raises(ConfigError, match="num_hidden_layers must be"):
        find_model(str(write(tmp_path, {"model_type": "llama", **SMALL, "num_hidden_layers": 0})))


def cache(folder: Path, name: str, content: dict[str, Any]) -> None:
    """Lay out a model as the Hub's library does: one snapshot, which the branch main names."""
    model = folder / f"models--{name.replace('/', '--')}"
    for part in ("refs", "snapshots/1"):
        (model / part).mkdir(parents=True)
    (model / "refs" / "main").write_text("1", encoding="utf-8")
    write(model / "snapshots" / "1", content)


def test_a_name_on_the_hub_is_read_from_its_cache_before_a_built_in_relative_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    small = {"model_type": "llama", **SMALL}
    for name in ("me/my-own", "me/Qwen3-8B"):
        cache(tmp_path, name, small)
        found = find_model(name)
        assert (found.name, found.config) == (name, small)
    cache(tmp_path, "Qwen/Qwen3-8B", small)  # a built-in model's own name needs no cache
    assert find_model("Qwen/Qwen3-8B").name == "Qwen3-8B"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("Qwen/Qwen3-8B", "Qwen3-8B"),
        ("qwen3-8b", "Qwen3-8B"),
        ("mistralai/Mixtral-8x7B-v0.1", "Mixtral-8x7B"),
        ("Qwen/Qwen3-8B-Base", "Qwen/Qwen3-8B-Base (as Qwen3-8B)"),
        ("me/Qwen3-8B", "me/Qwen3-8B (as Qwen3-8B)"),
    ],
)
def test_another_model_than_the_built_in_one_is_shown_beside_it(
    name: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert find_model(name).name == shown


@pytest.mark.parametrize("name", ["google/gemma-2-9b", "me/--", "me/no..model"])
def test_a_name_that_is_neither_cached_nor_built_in_gets_the_command_that_fetches_it(
    name: str,
) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"`hf download {name} config.json`")):
        find_model(name)
    with pytest.raises(ConfigError, match=r"`hf download OWNER/gemma-2-9b config\.json`"):
        find_model("gemma-2-9b")
