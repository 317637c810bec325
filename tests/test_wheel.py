"""What is installed: a source package, the wheel made of it, and a bare environment with that."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: What commands need at run time but torch and DeepSpeed, which are large.
REQUIRED = ("pydantic", "psutil", "rich")
ABSENT = {"torch", "deepspeed"}

pytestmark = pytest.mark.full


def called(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command that has to succeed, and return what it printed."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def pip(*arguments: str | Path, cwd: Path) -> None:
    called(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, cwd=cwd)


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """Return the files of the repository, without what was built in its folders."""
    return called("git", "ls-files", cwd=ROOT).splitlines()


@pytest.fixture(scope="module")
def source_package(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the source package in a copy of the repository."""
    folder = tmp_path_factory.mktemp("source")
    for name in tracked:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    build = "import setuptools.build_meta as backend; backend.build_sdist('dist')"
    called(sys.executable, "-c", build, cwd=folder)
    [package] = (folder / "dist").iterdir()
    return package


@pytest.fixture(scope="module")
def wheel(source_package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from nothing but the source package."""
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", "dist", source_package, cwd=folder)
    [built] = (folder / "dist").iterdir()
    return built


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel where neither torch, DeepSpeed nor a compiler is, and return its bin/."""
    folder = tmp_path_factory.mktemp("bare")
    called(sys.executable, "-m", "venv", "--without-pip", "venv", cwd=folder)
    programs = folder / "venv" / "bin"
    python = programs / "python"
    pip("--python", python, "install", "--quiet", "--no-deps", wheel, cwd=folder)
    pip("--python", python, "install", "--quiet", *REQUIRED, cwd=folder)
    return programs


def test_the_source_package_has_what_the_core_is_built_from(
    source_package: Path, tracked: list[str]
) -> None:
    with tarfile.open(source_package) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {name for name in tracked if name.startswith(("csrc/", "memascend/"))} <= names
    assert not [name for name in names if name.startswith(("tests", "docs", "scripts"))]


def test_the_wheel_has_the_package_and_nothing_else(wheel: Path, tracked: list[str]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        described = {
            name.rpartition("/")[2]: archive.read(name).decode()
            for name in archive.namelist()
            if ".dist-info/" in name
        }
    cores = {name for name in names if name.endswith(".so")}
    assert [name for name in cores if not name.startswith("memascend/_core.")] == []
    assert len(cores) == 1
    assert names - cores == {name for name in tracked if name.startswith("memascend/")}
    assert {"memascend/py.typed", "memascend/_core.pyi"} <= names
    hooks = described["entry_points.txt"]
    assert "[torch.backends]\nmemascend = memascend.autoload:install" in hooks
    assert "[console_scripts]\nmemascend = memascend.cli.main:main" in hooks
    assert "Apache License" in described["LICENSE"]


@pytest.mark.parametrize("address", ["https://example.org/me/memascend", None])
def test_links_of_the_description_lead_to_the_repository(
    address: str | None, tracked: list[str], tmp_path: Path
) -> None:
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "memascend/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    project = tmp_path / "pyproject.toml"
    if address:
        urls = f'[project.urls]\nRepository = "{address}"'
        project.write_text(project.read_text().replace("[project.urls]", urls))
    called(sys.executable, "setup.py", "--quiet", "dist_info", cwd=tmp_path)
    [described] = tmp_path.glob("*.dist-info/METADATA")
    text = described.read_text()
    assert "Description-Content-Type: text/markdown" in text
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    if address is None:
        assert "docs/limits.md" in links
        return
    assert links == []
    assert f"]({address}/blob/HEAD/docs/memory.md#wear)" in text
    assert f"]({address}/raw/HEAD/docs/pictures/report.png)" in text
    files = re.findall(rf"\]\({address}/(?:blob|raw)/HEAD/([^)#]+)", text)
    assert set(files) <= set(tracked)


def test_a_bare_environment_needs_no_compiler(bare: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [bare / "memascend", "doctor", "--json", "--path", tmp_path],
        env={"PATH": str(bare)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert {name for name, check in checks.items() if check["state"] == "problem"} <= ABSENT
    assert checks["trial"]["state"] == "ok", checks["trial"]
    assert checks["activation"]["state"] == "ok", checks["activation"]


def test_a_bare_environment_has_the_plan(bare: Path, tmp_path: Path) -> None:
    printed = called(
        bare / "memascend",
        *("plan", "Llama-3.1-8B", "--limit", "6GiB", "--json"),
        cwd=tmp_path,
        PYTHONPATH="",
    )
    assert json.loads(printed)["model"]


@pytest.mark.parametrize("command", ["dist_info", "build_ext"])
def test_without_a_compiler_two_lines_name_the_remedy(command: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "setup.py", command],
        cwd=tmp_path,
        env={**os.environ, "PATH": str(tmp_path), "CXX": "no-such-compiler"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    first, second = done.stdout.splitlines()
    assert "'no-such-compiler' not found" in first
    assert "apt-get install g++ python3-dev" in second
