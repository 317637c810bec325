"""The bundle for a machine with a GPU and no network: its parts, its size, and installing it."""

from __future__ import annotations

import ensurepip
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.scripts import SCRIPTS, load_script

PYTHON = ".".join(map(str, sys.version_info[:2]))
SMOKE = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"


@pytest.fixture(scope="module")
def bundle() -> ModuleType:
    return load_script("gpu_bundle")


def wheel(folder: Path, name: str, *requires: str, files: dict[str, str] | None = None) -> Path:
    """Write a wheel of one module, which says so."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    metadata = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0"]
    metadata += [f"Requires-Dist: {one}" for one in requires]
    content = {
        **(files or {f"{name}.py": "FROM = 'the bundle'"}),
        f"{info}/METADATA": "\n".join(metadata) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    names = "".join(f"{name},,\n" for name in [*content, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in {**content, f"{info}/RECORD": names}.items():
            archive.writestr(file, text)
    return path


# -- making one ----------------------------------------------------------------------------------


def test_requirements_are_those_of_the_wheels_without_torch_and_extras(
    bundle: ModuleType, tmp_path: Path
) -> None:
    some = [
        wheel(tmp_path, "one", "torch>=2.5", "pydantic>=2.5", 'pytest; extra == "dev"'),
        wheel(tmp_path, "two", "deepspeed<0.20,>=0.19.8", "py-cpuinfo", "pydantic>=2.5"),
    ]
    assert bundle.requirements(some) == ["py-cpuinfo", "pydantic>=2.5"]


def test_an_interpreter_has_the_version_and_the_headers(
    bundle: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "python9.9"
    other.write_text("#!/bin/sh\necho 9.9 False\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert bundle.interpreter("9.9") is None
    other.write_text("#!/bin/sh\necho 9.9 True\n")
    assert bundle.interpreter("9.9") == str(other)
    assert bundle.interpreter("9.8", str(other)) is None


def test_every_file_that_the_checks_and_the_core_need_is_known_to_git(
    bundle: ModuleType, tmp_path: Path
) -> None:
    bundle.copy_tracked(bundle.CHECKS, tmp_path / "checks")
    bundle.copy_tracked(bundle.SOURCES, tmp_path / "sources")
    for name in (*bundle.CHECKS, "benchmarks/bench_gpu.py", "configs/nvme_gpu.json"):
        assert (tmp_path / "checks" / name).exists()
    assert not (tmp_path / "checks" / "memascend").exists()  # or it would hide the one with a core
    assert (tmp_path / "sources" / "csrc" / "bindings").is_dir()
    assert not list(tmp_path.rglob("*.so"))
    assert bundle.check_size(tmp_path) < 10_000_000


def test_a_bundle_that_is_too_large_names_its_largest_files(
    bundle: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "large").write_bytes(b"x" * 2_000_000)
    (tmp_path / "small").write_bytes(b"x")
    assert bundle.check_size(tmp_path, 2_000_001) == 2_000_001
    with pytest.raises(SystemExit, match=r"2\.0 MB.*large \(2\.0 MB\), small"):
        bundle.check_size(tmp_path, 2_000_000)


def test_a_folder_that_exists_is_not_written_over(bundle: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="exists"):
        bundle.main(["--python", PYTHON, "--out", str(tmp_path)])


# -- running one ---------------------------------------------------------------------------------


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Make a bundle of small packages, with a program that shows how it was started."""
    bundled = sorted((Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl"))
    if not bundled:
        pytest.skip("this Python has no wheel of pip to make a bundle of")
    folder = tmp_path / "bundle"
    shutil.copytree(SCRIPTS / "gpu_bundle", folder)
    (folder / "wheels").mkdir()
    shutil.copy(bundled[0], folder / "wheels")
    (folder / "checks" / "scripts").mkdir(parents=True)
    (folder / "checks" / "scripts" / "gpu_smoke.py").write_text(SMOKE)
    wheel(folder / "wheels", "needed", "further")
    wheel(folder / "wheels", "further")
    wheel(folder / "wheels", "pytest")  # an older one than that of this environment
    core = {"memascend/__init__.py": "", "memascend/_core.py": ""}
    wheel(folder / "wheels", "memascend", files=core)
    facts = {"python": PYTHON, "commit": "0", "requirements": ["needed>=1", "pytest", "torch"]}
    (folder / "bundle.json").write_text(json.dumps(facts))
    return folder


def run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "TRITON_INTERPRET": "1", **variables}
    return subprocess.run(
        ["bash", str(folder / "run.sh"), *arguments],
        cwd=folder.parent,
        env=environment | {"PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_first_call_installs_what_is_missing_and_the_next_one_nothing(made: Path) -> None:
    (made / "cuda" / "lib64" / "stubs").mkdir(parents=True)
    (made.parent / "memascend").mkdir()  # as in a checkout without a core, where it is started
    (made.parent / "memascend" / "__init__.py").touch()
    done = run(made, "smoke", "--first", "slots", CUDA_HOME=str(made / "cuda"))
    assert done.returncode == 0, done.stdout + done.stderr
    first, last = done.stdout.splitlines()
    assert "installing" in first
    site = made / "work" / "site"
    modules = {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")}
    assert modules == {"needed.py", "further.py", "memascend", "bundle.json"}
    arguments: list[str]
    variables: dict[str, Any]
    arguments, variables = json.loads(last)
    assert arguments[-2:] == ["--first", "slots"]
    assert arguments[arguments.index("--results") + 1] == str(made / "work" / "smoke.json")
    assert int(arguments[arguments.index("--spent") + 1]) >= 0
    assert variables["PYTHONPATH"] == str(site)
    assert variables["PATH"].startswith(f"{site}/bin:")
    assert variables["TORCH_EXTENSIONS_DIR"].startswith(str(made / "work"))
    assert (variables["NCCL_SOCKET_IFNAME"], variables["PYTHONUNBUFFERED"]) == ("lo", "1")
    assert variables["LIBRARY_PATH"].split(":")[0] == str(made / "cuda" / "lib64" / "stubs")
    assert "TRITON_INTERPRET" not in variables
    assert len(run(made, "smoke").stdout.splitlines()) == 1


def test_another_python_is_refused_by_its_version(made: Path) -> None:
    facts = json.loads((made / "bundle.json").read_text())
    (made / "bundle.json").write_text(json.dumps(facts | {"python": "3.99"}))
    done = run(made, "smoke")
    assert done.returncode == 1
    assert "for Python 3.99" in done.stderr
    assert f"--python {PYTHON}" in done.stderr


def test_a_word_that_is_no_program_shows_the_usage(made: Path) -> None:
    done = run(made, "sing")
    assert done.returncode == 2
    assert "run.sh smoke" in done.stderr
