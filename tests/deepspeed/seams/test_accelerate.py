"""The hook in accelerate: at once or at its import, once, and only where the function exists."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("deepspeed")

from memascend.deepspeed.seams import accelerate as accelerate_seams
from memascend.deepspeed.seams import arm as seams

pytestmark = pytest.mark.deepspeed
FUNCTION = accelerate_seams.FUNCTION


def stock(optimizer: Any) -> Any:
    return SimpleNamespace(adam_w_mode=True)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    accelerate_seams.forget()
    yield
    accelerate_seams.forget()


def loaded(monkeypatch: pytest.MonkeyPatch, **names: Any) -> ModuleType:
    module = ModuleType(accelerate_seams.MODULE)
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, accelerate_seams.MODULE, module)
    return module


def test_deepspeeds_import_has_the_function_wrapped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate calls it before there is a configuration, and so before arming."""
    module = loaded(monkeypatch, **{FUNCTION: stock})
    config = SimpleNamespace(DeepSpeedConfig=type("DeepSpeedConfig", (), {}))
    seams.observe(config)  # type: ignore[arg-type]
    wrapped = getattr(module, FUNCTION)
    assert wrapped.__wrapped__ is stock
    accelerate_seams.watch()
    assert getattr(module, FUNCTION) is wrapped


def test_a_later_import_of_accelerate_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "accelerate"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "accelerator.py").write_text(f"def {FUNCTION}(optimizer): ...\n")
    for name in [one for one in sys.modules if one.partition(".")[0] == "accelerate"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    accelerate_seams.watch()
    import accelerate.accelerator as module

    for name in (accelerate_seams.MODULE, "accelerate"):  # the real ones come back at the end
        del sys.modules[name]
    assert hasattr(getattr(module, FUNCTION), "__wrapped__")


@pytest.mark.parametrize("names", [{}, {FUNCTION: None}])
def test_an_accelerate_without_it_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch, names: dict[str, Any]
) -> None:
    module = loaded(monkeypatch, **names)
    accelerate_seams.watch()
    assert {name: value for name, value in vars(module).items() if name == FUNCTION} == names


def test_the_accelerate_that_is_installed_has_it() -> None:
    assert callable(getattr(pytest.importorskip(accelerate_seams.MODULE), FUNCTION))
