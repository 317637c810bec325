"""What the documents name exists, and what has to be named is: they cannot fall behind the code."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from memascend.deepspeed.seams import transformers as transformers_seams
from memascend.deepspeed.seams.table import SEAMS, WATCHED

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "configs" / "README.md", *sorted(ROOT.glob("docs/*.md"))]
ARCHITECTURE = ROOT / "docs" / "ARCHITECTURE.md"
SOURCE_FOLDERS = ("benchmarks", "configs", "csrc", "docs", "memascend", "scripts", "tests")
SHORT_NAMES = {"zero.": "deepspeed.runtime.zero.", "swap.": "deepspeed.runtime.swap_tensor."}


def code_spans(path: Path) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", path.read_text(encoding="utf-8")))


def first_column(heading: str, column: int) -> set[str]:
    """The code in a column of the table below a heading of SEAMS.md, names in full."""
    text = (ROOT / "docs" / "SEAMS.md").read_text(encoding="utf-8")
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[column] for line in section.splitlines() if line.startswith("|")]
    names = [match.group(1) for row in rows if (match := re.search(r"`([^`]+)`", row))]
    for short, full in SHORT_NAMES.items():
        names = [
            full + name.removeprefix(short) if name.startswith(short) else name for name in names
        ]
    assert len(names) == len(set(names)), f"a row twice below {heading}"
    return set(names)


@pytest.fixture(scope="module")
def update_readme() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "update_readme", ROOT / "scripts" / "update_readme.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_named_exists(document: Path) -> None:
    named = {
        span
        for span in code_spans(document)
        if span.startswith(tuple(f"{folder}/" for folder in SOURCE_FOLDERS))
        and "::" not in span
        and not set(span) & set("<>* ")
    }
    missing = [name for name in sorted(named) if not (ROOT / name).exists()]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_test_named_exists(document: Path) -> None:
    named = {span for span in code_spans(document) if span.startswith("tests/") and "::" in span}
    missing = []
    for name in sorted(named):
        path, _, test = name.partition("::")
        text = (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).exists() else ""
        if not re.search(rf"^(def|class) {re.escape(test)}\b", text, re.MULTILINE):
            missing.append(name)
    assert missing == []
    assert named or document != ROOT / "docs" / "faults.md"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8"))
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (document.parent / link).exists()] == []


def test_the_architecture_names_every_python_file_and_every_header() -> None:
    sources = [*ROOT.glob("memascend/**/*.py"), *ROOT.glob("csrc/*/*.hpp")]
    assert len(sources) > 60, "the patterns found too little to check"
    packages = {
        path for path in sources if path.name == "__init__.py" and path.parent.parent != ROOT
    }
    named = code_spans(ARCHITECTURE)
    expected = {str(path.relative_to(ROOT)) for path in sources if path not in packages}
    assert sorted(expected - named) == []


def test_the_seams_page_has_a_row_for_each_seam() -> None:
    assert first_column("Replaced", 2) == {f"{s.module}.{s.attribute}" for s in SEAMS}


def test_the_seams_page_has_a_row_for_each_watched_definition() -> None:
    assert first_column("Watched", 1) == {f"{module}.{name}" for module, name in WATCHED}


def test_the_seams_page_has_what_is_wrapped_of_transformers() -> None:
    assert first_column("transformers", 1) == set(transformers_seams.WRAPPERS)
    text = (ROOT / "docs" / "SEAMS.md").read_text(encoding="utf-8")
    assert all(version in text for version in transformers_seams.VERSIONS)


def test_the_readme_has_the_configuration_as_it_is(update_readme: ModuleType) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert update_readme.replaced(text) == text, "run scripts/update_readme.py"


def test_a_configuration_key_that_is_gone_is_noticed(update_readme: ModuleType) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    row = next(line for line in text.splitlines() if "`direct_nvme.engine`" in line)
    assert update_readme.replaced(text.replace(row, row.replace("engine", "motor"))) == text
