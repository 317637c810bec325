"""Arming transformers: only where it is imported and known, and undone completely."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("deepspeed")
modeling_utils: Any = pytest.importorskip("transformers.modeling_utils")
import torch  # noqa: E402

from memascend.deepspeed.seams import arm as seams  # noqa: E402
from memascend.deepspeed.seams import transformers as transformers_seams  # noqa: E402
from memascend.deepspeed.weights import pretrained  # noqa: E402
from memascend.deepspeed.weights.mapped_files import MappedFiles  # noqa: E402


def standing() -> list[Any]:
    return [getattr(modeling_utils, name) for name in transformers_seams.WRAPPERS]


@pytest.fixture(autouse=True)
def stock() -> Iterator[list[Any]]:
    transformers_seams.disarm()
    found = standing()
    yield found
    transformers_seams.disarm()
    assert standing() == found


def test_arming_wraps_and_disarming_restores(
    stock: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    transformers_seams.arm()
    assert transformers_seams.is_armed()
    wrapped = standing()
    assert [one.__wrapped__ for one in wrapped] == stock
    transformers_seams.arm()
    assert standing() == wrapped
    seams.disarm()
    assert not transformers_seams.is_armed()
    assert standing() == stock
    assert caplog.records == []


def test_every_trainer_from_now_on_has_a_callback_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Base:
        pass

    trainer: Any = ModuleType(transformers_seams.TRAINER_MODULE)
    monkeypatch.setitem(sys.modules, trainer.__name__, trainer)
    transformers_seams.arm()  # another release, without the list
    trainer.DEFAULT_CALLBACKS, trainer.TrainerCallback = [Base], Base
    for _ in range(2):
        transformers_seams.arm()
    assert len(trainer.DEFAULT_CALLBACKS) == 2
    assert issubclass(trainer.DEFAULT_CALLBACKS[1], Base)
    transformers_seams.disarm()
    assert [Base] == trainer.DEFAULT_CALLBACKS


def test_a_trainer_that_is_imported_behind_the_model_has_the_callback_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`transformers.Trainer` is imported when it is first named, which may be its last use."""
    monkeypatch.setattr(transformers_seams, "TRAINER_MODULE", "late_trainer")
    source = "class TrainerCallback: pass\nDEFAULT_CALLBACKS = []\n"
    (tmp_path / "late_trainer.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    for _ in range(2):
        transformers_seams.arm()
    trainer = importlib.import_module("late_trainer")
    (added,) = trainer.DEFAULT_CALLBACKS
    assert issubclass(added, trainer.TrainerCallback)
    transformers_seams.disarm()
    assert trainer.DEFAULT_CALLBACKS == []
    del sys.modules["late_trainer"]
    finders = list(sys.meta_path)
    transformers_seams.arm()
    transformers_seams.disarm()
    assert sys.meta_path == finders


@pytest.mark.parametrize("field", ["load", "read", "convert", "rename"])
def test_code_that_is_not_known_is_left_alone_and_logged_once(
    field: str, stock: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = "0" * 16
    loaders = [
        replace(loader, **{field: other if field == "load" else (other,)})
        for loader in transformers_seams.LOADERS
    ]
    monkeypatch.setattr(transformers_seams, "LOADERS", loaders)
    with caplog.at_level(logging.WARNING):
        transformers_seams.arm()
        transformers_seams.arm()
    assert standing() == stock
    (record,) = caplog.records
    names = {
        "load": transformers_seams.LOAD,
        "read": transformers_seams.READ,
        "convert": transformers_seams.CONVERT[1],
        "rename": transformers_seams.RENAME[1],
    }
    assert names[field] in record.getMessage()
    assert "5.6 to 5.22" in record.getMessage()


def test_a_definition_that_a_loader_does_not_use_may_be_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def found(module: str, name: str) -> str:
        return {"load": "1", "read": "2"}.get(name, "missing")

    monkeypatch.setattr(transformers_seams, "_fingerprint", found)
    monkeypatch.setattr(transformers_seams, "READ", "read")
    older = transformers_seams.Loader("4", load="1", read=("2",))
    newer = transformers_seams.Loader("5", load="1", read=("2",), convert=("3",))
    assert list(older.unknown()) == []
    assert list(newer.unknown()) == [f"{transformers_seams.CONVERT[1]} (missing)"]


def test_a_function_that_is_gone_is_logged_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(modeling_utils, "_load_state_dict_into_zero3_model")
        transformers_seams.arm()
    assert not transformers_seams.is_armed()
    assert "missing" in caplog.text


def test_transformers_is_not_imported_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, transformers_seams.MODULE)
        transformers_seams.arm()
        assert transformers_seams.MODULE not in sys.modules
    assert not transformers_seams.is_armed()


# -- what stands there then ----------------------------------------------------------------------


def test_models_of_others_pass_through_untouched() -> None:
    model, weights = torch.nn.Linear(2, 2), {"weight": torch.ones(2, 2)}
    seen = []

    def original(*arguments: Any, **keywords: Any) -> str:
        seen.append((arguments, keywords))
        return "loaded"

    load = pretrained.wrap_load(original)
    assert load(model, weights, 7, load_config=8) == "loaded"
    assert seen == [((model, weights, 7), {"load_config": 8})]
    assert seen[0][0][1] is weights


@pytest.mark.parametrize(
    ("name", "location", "looked_at"),
    [
        ("model.safetensors", "cpu", [("/models/model.safetensors", True)]),
        ("model.safetensors", "meta", [("/models/model.safetensors", False)]),
        ("model.bin", "cpu", []),
    ],
)
def test_only_shards_that_are_mapped_are_looked_at_first(
    name: str, location: str, looked_at: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        pretrained, "read_starts", lambda path, *, tensors: seen.append((path, tensors))
    )

    def of_transformers_5(
        checkpoint_file: Path, map_location: str = "cpu", weights_only: bool = True
    ) -> str:
        return f"{checkpoint_file} {map_location} {weights_only}"

    def of_transformers_4(
        checkpoint_file: Path,
        is_quantized: bool = False,
        map_location: str = "cpu",
        weights_only: bool = True,
    ) -> str:
        assert is_quantized is False
        return f"{checkpoint_file} {map_location} {weights_only}"

    path = Path("/models") / name
    for original in (of_transformers_5, of_transformers_4):
        read = pretrained.wrap_read(original)
        answer = read(path, map_location=location, weights_only=False)
        assert answer == f"{path} {location} False"
    assert pretrained.wrap_read(of_transformers_5)(path, location) == f"{path} {location} True"
    assert seen == looked_at * 3


def test_pages_go_in_steps_and_hooks_go_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    safetensors_torch = pytest.importorskip("safetensors.torch")
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(6)))
    weights = {name: torch.randn(64, 64) for name in model.state_dict()}
    safetensors_torch.save_file(weights, tmp_path / "model.safetensors")
    mapped = safetensors_torch.load_file(tmp_path / "model.safetensors")
    monkeypatch.setattr(pretrained, "FLUSH_BYTES", 2 * 64 * 64 * 4)
    monkeypatch.setattr(pretrained, "swapper_of", lambda parameter: object())
    drops: list[int] = []
    drop = MappedFiles.drop

    def counted(files: MappedFiles) -> None:
        drops.append(len(files.mappings))
        drop(files)

    monkeypatch.setattr(MappedFiles, "drop", counted)
    pretrained.wrap_load(lambda module, state: module.load_state_dict(state))(model, mapped)
    assert len(drops) == 3  # before the third layer, the fifth, and at the end
    assert all(torch.equal(model.state_dict()[name], weights[name]) for name in weights)
    assert not any(module._load_state_dict_pre_hooks for module in model.modules())


def test_each_shard_of_a_checkpoint_is_dropped_once_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers 4 loads one after the other, and gets messages alone."""
    safetensors_torch = pytest.importorskip("safetensors.torch")
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(2)))
    monkeypatch.setattr(pretrained, "swapper_of", lambda parameter: object())
    dropped: list[str] = []
    monkeypatch.setattr(
        MappedFiles, "drop", lambda files: dropped.extend(one.path for one in files.mappings)
    )

    def original(module: torch.nn.Module, state: dict[str, torch.Tensor]) -> list[str]:
        module.load_state_dict(state, strict=False)
        return [f"a message about {key}" for key in state]

    load = pretrained.wrap_load(original)
    for name in model.state_dict():
        path = tmp_path / f"{name}.safetensors"
        safetensors_torch.save_file({name: torch.randn(64, 64)}, path)
        messages = load(model, safetensors_torch.load_file(path))
        assert messages == [f"a message about {name}"]
        assert dropped.pop() == str(path)
        assert not dropped


def test_a_loader_that_merges_all_is_called_for_each_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(2, 2)
    monkeypatch.setattr(pretrained, "swapper_of", lambda parameter: object())
    parts = [{"one": torch.ones(1)}, {"two": torch.ones(1)}]
    monkeypatch.setattr(pretrained, "one_at_a_time", lambda *given: parts)
    seen = []

    def original(
        model: torch.nn.Module, state: dict[str, Any], load_config: Any
    ) -> tuple[list[str], set[str]]:
        seen.append((state, load_config))
        return [f"a message about {key}" for key in state], {"weight", *({"bias"} - {*state})}

    errors, missing = pretrained.wrap_load(original)(model, {}, 7)
    assert seen == [(parts[0], 7), (parts[1], 7)]
    assert errors == ["a message about one", "a message about two"]
    assert missing == {"weight", "bias"}
