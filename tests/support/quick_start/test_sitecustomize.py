"""torch imports its compiler when something is compiled, and then compiles it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import torch

from . import FOLDER

PROGRAM = """
import gc, json, sys
assert gc.isenabled()
import torch
assert gc.isenabled()

weight = torch.zeros(1, requires_grad=True)
torch.optim.SGD([weight], lr=0.5)
torch.utils.checkpoint.checkpoint(torch.sin, weight, use_reentrant=True).backward()
apart = torch.compiler.disable(lambda x: x + 1)
twice = torch.compile(backend="eager")(lambda x: apart(x * 2))
same = apart(weight).item()
before = "torch._dynamo" in sys.modules
values = [same, twice(torch.ones(1)).item()]
print(json.dumps([before, "torch._dynamo" in sys.modules, values, torch._dynamo.utils.counters]))
"""


def test_the_compiler_comes_with_the_first_function_that_is_compiled() -> None:
    assert os.environ["PYTHONPATH"].startswith(f"{FOLDER}{os.pathsep}")
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    before, after, values, counters = json.loads(done.stdout.splitlines()[-1])
    assert (before, after) == (False, True)
    assert values == [1.0, 3.0]
    assert counters["frames"]["ok"] > 0
    assert counters["graph_break"] != {}  # where the function begins that is never compiled


def test_here_torch_is_as_it_is() -> None:
    assert torch.compiler.disable.__code__.co_filename == torch.compiler.__file__
