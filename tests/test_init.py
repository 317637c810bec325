"""The public face of the package: its names, and that importing it costs nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import memascend
from memascend import errors

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("name", memascend.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(memascend, name) is not None
    assert name in dir(memascend)


def test_every_error_is_public() -> None:
    found = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert found <= set(memascend.__all__)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        memascend.no_such_name  # noqa: B018


def test_a_plan_takes_public_names_alone() -> None:
    tensor = memascend.TensorShape("weight", (4096, 4096), trainable=True)
    shapes = memascend.ModelShapes("tiny", (tensor,), {})
    request = memascend.PlanRequest.from_deepspeed(
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
        block=memascend.parse_block({}),
    )
    assert isinstance(memascend.derive(shapes, request=request), memascend.Plan)


def test_importing_it_stays_with_the_standard_library() -> None:
    program = (
        "import sys; import memascend; "
        "ours = {n for n in sys.modules if n.split('.')[0] == 'memascend'}; "
        "print(*sorted(ours)); "
        "print(*sorted({'torch', 'deepspeed', 'pydantic', 'numpy', 'psutil', 'rich'} "
        "& set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    ours, others = done.stdout.splitlines()
    assert ours.split() == [
        "memascend",
        "memascend.autoload",
        "memascend.base",
        "memascend.base.post_import",
        "memascend.errors",
        "memascend.version",
    ]
    assert others == ""
