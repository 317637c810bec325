"""What documents name exists, what is generated is current, and newcomers' pages stay short."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import ModuleType

import pytest

from memascend import errors
from memascend.deepspeed.seams import transformers as transformers_seams
from memascend.deepspeed.seams.table import SEAMS, WATCHED
from tests.support.documents import code_spans, each_document, read
from tests.support.scripts import load_script
from tests.support.source_tree import ROOT, floors, row_of

README = ROOT / "README.md"
ARCHITECTURE = ROOT / "docs" / "ARCHITECTURE.md"
SEAMS_PAGE = ROOT / "docs" / "SEAMS.md"
VERSIONS_PAGE = ROOT / "docs" / "versions.md"
ERRORS = ROOT / "docs" / "errors.md"
PUBLIC = ROOT / "docs" / "public.md"
CONFIGURATION = ROOT / "docs" / "configuration.md"
LINES_MAX = {README: 120, ARCHITECTURE: 250}
SOURCE_FOLDERS = (
    ".github",
    "benchmarks",
    "configs",
    "csrc",
    "deploy",
    "docs",
    "examples",
    "memascend",
    "scripts",
    "tests",
)
OF_COMMANDS = ("base/json_text.py", "checkpoint/to_universal.py", "cli/", "monitor/", "plan/")


def anchors(path: Path) -> set[str]:
    """Return the names under which GitHub reaches the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", read(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def first_column(text: str) -> list[str]:
    """Return the code in the first column of a text's tables."""
    cells = re.findall(r"^\|([^|]+)\|", text, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def short_names() -> dict[str, str]:
    """Return the full name of each short one, by the first table of SEAMS.md."""
    table = read(SEAMS_PAGE).partition("\n## ")[0]
    second = re.findall(r"^\|[^|]+\|([^|]+)\|", table, re.MULTILINE)
    full = [name for cell in second for name in re.findall(r"`([^`]+)`", cell)]
    return dict(zip(first_column(table), full, strict=True))


def in_full(name: str) -> str:
    """Return a name of SEAMS.md with its short beginning replaced."""
    begin, dot, rest = name.partition(".")
    return in_full(short_names()[begin] + dot + rest) if begin in short_names() else name


def names_below(heading: str) -> set[str]:
    """Return the names in full of the table below a heading of SEAMS.md."""
    section = read(SEAMS_PAGE).partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    names = [*map(in_full, first_column(section))]
    assert len(names) == len(set(names)), f"a name twice below {heading}"
    return set(names)


def texts_in(tree: ast.AST) -> list[str]:
    """Return every piece of text in code but docstrings, what is filled in as {}."""
    found = []
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
            found.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and id(node) not in docstrings:
            found.append(str(node.value))
    return found


def literals() -> str:
    """Return every piece of text in the product's code."""
    found = [text for path in ROOT.glob("memascend/**/*.py") for text in texts_in(parsed(path))]
    for path in ROOT.glob("csrc/**/*.cpp"):
        found += re.findall(r'"((?:[^"\\\n]|\\.)*)"', re.sub(r'"\s*\n\s*"', "", read(path)))
    return "\n".join(found)


def parsed(path: Path) -> ast.Module:
    return ast.parse(read(path))


def phrases() -> list[str]:
    """Return the phrases of messages that the page of errors has."""
    columns = re.findall(r"^\| (`[^|]+) \|", read(ERRORS), re.MULTILINE)
    return [phrase for column in columns for phrase in re.findall(r"`([^`]+)`", column)]


@pytest.fixture(scope="module")
def update_docs() -> ModuleType:
    return load_script("update_docs")


# -- what is named exists --------------------------------------------------------------------------


@each_document
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


@each_document
def test_every_test_named_exists(document: Path) -> None:
    named = {span for span in code_spans(document) if span.startswith("tests/") and "::" in span}
    missing = []
    for name in sorted(named):
        path, _, test = name.partition("::")
        text = read(ROOT / path) if (ROOT / path).exists() else ""
        if not re.search(rf"^(def|class) {re.escape(test)}\b", text, re.MULTILINE):
            missing.append(name)
    assert missing == []
    assert named or document.name not in ("faults.md", "SECURITY.md")


@each_document
def test_every_relative_link_leads_somewhere(document: Path) -> None:
    missing = []
    for link in re.findall(r"\]\(([^)]+)\)", read(document)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            missing.append(link)
    assert missing == []


# -- what exists is named --------------------------------------------------------------------------


#: Of each 1000 words of a page, below which number "what" must be; a single one is allowed.
CLAUSES_MAX = 3
PROSE = (
    *(README, ROOT / "CONTRIBUTING.md"),
    *(ROOT / name / "README.md" for name in ("configs", "examples", "deploy")),
    *sorted((ROOT / "docs").rglob("*.md")),
)


def hard_to_read(text: str) -> list[str]:
    """Return what a page's prose has too often, or opens a sentence with."""
    text = re.sub(r"^ *```.*?^ *```$|`[^`]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    begins = r"(?:^[-*|#> ]*|[.!?:|]\s+)"
    found = re.findall(rf"{begins}((?:Of|What|Whoever)\b.{{,40}})", text, re.MULTILINE)
    clauses = re.findall(r"\bwhat\b\s+\S+", text, re.IGNORECASE)
    words = len(re.findall(r"\w[\w'-]*", text))
    return found + clauses * (len(clauses) > 1 and len(clauses) * 1000 >= CLAUSES_MAX * words)


@pytest.mark.parametrize("page", PROSE, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_page_has_nouns_instead_of_clauses_with_what(page: Path) -> None:
    assert hard_to_read(read(page)) == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("It says what failed, and " + "names it " * 400 + "and what to do.", 0),
        ("It says what failed, and what to do.", 2),
        ("A page.\nOf these, two are read.", 1),
        ("| key | What it does |", 1),
        ("It ends. Whoever reads it, waits.", 1),
        ("```\nWhat is it\nwhat\nwhat\n```\nA `what`, so `what`.", 0),
    ],
)
def test_prose_that_is_hard_to_read_is_noticed(text: str, count: int) -> None:
    assert len(hard_to_read(text)) == count


def test_pythons_are_the_same_in_the_package_the_workflows_and_the_pages() -> None:
    package, tests, wheels = (
        read(ROOT / name)
        for name in ("pyproject.toml", ".github/workflows/ci.yml", ".github/workflows/wheels.yml")
    )
    named = re.findall(r'"Programming Language :: Python :: (\d\.\d+)"', package)
    span = f"{named[0]} to {named[-1]}"
    assert re.findall(r"^ +python: \[(.*)\]$", tests, re.MULTILINE) == [
        ", ".join(f'"{one}"' for one in named)
    ]
    built = [f"3.{minor}" for minor in re.findall(r"cp3(\d+)-\*", package)]
    assert f"python: [{', '.join(f'{chr(34)}{one}{chr(34)}' for one in built)}]" in wheels
    assert built == named
    assert f"Python {span};" in read(ROOT / "CHANGELOG.md")
    assert f"**Python** {span}:" in read(VERSIONS_PAGE)


def test_the_readme_leads_to_every_page() -> None:
    pages = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/*.md")}
    assert pages - set(re.findall(r"\]\(([^)#]+)\)", read(README))) == set()


def test_every_design_note_is_reached_from_the_architecture() -> None:
    notes = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/design/*.md")}
    assert notes - set(re.findall(r"\]\(([^)#]+)\)", read(ARCHITECTURE))) == set()


@pytest.mark.parametrize("document", LINES_MAX, ids=lambda path: path.name)
def test_a_page_for_newcomers_stays_short(document: Path) -> None:
    assert len(read(document).splitlines()) <= LINES_MAX[document]


def test_the_seams_page_has_a_row_for_each_seam() -> None:
    assert names_below("Replaced") == {f"{s.module}.{s.attribute}" for s in SEAMS}


def test_the_seams_page_has_a_row_for_each_watched_definition() -> None:
    assert names_below("Watched") == {f"{module}.{name}" for module, name in WATCHED}


def test_the_seams_page_has_what_is_wrapped_of_transformers() -> None:
    assert names_below("transformers") == {
        *transformers_seams.WRAPPERS,
        *transformers_seams.BY_NAME,
        transformers_seams.CONVERT[1],
        transformers_seams.RENAME[1],
    }
    for loader in transformers_seams.LOADERS:
        assert loader.releases in read(VERSIONS_PAGE)


def test_the_public_page_has_every_error() -> None:
    section = read(PUBLIC).partition("\n## The errors\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
    family = {name for name, found in vars(errors).items() if isinstance(found, type)}
    assert named == family - {"MemAscendError"}


def test_the_page_of_errors_has_phrases_of_the_code() -> None:
    known = literals()
    assert [phrase for phrase in phrases() if phrase not in known] == []


def test_the_page_of_errors_has_what_a_training_may_raise() -> None:
    """What only commands raise says all that there is to say."""
    family = {name for name, found in vars(errors).items() if isinstance(found, type)}
    in_class = {
        node.name: texts_in(node)
        for node in parsed(ROOT / "memascend" / "errors.py").body
        if isinstance(node, ast.ClassDef)
    }
    known, missing, count = phrases(), [], 0
    for path in sorted(ROOT.glob("memascend/**/*.py")):
        place = path.relative_to(ROOT / "memascend").as_posix()
        if place.startswith(OF_COMMANDS):
            continue
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
                continue
            name = ast.unparse(node.exc.func).rpartition(".")[2]
            said = [*texts_in(node.exc), *in_class.get(name, [])]
            if name in family and any(said):
                count += 1
                if not any(phrase in text for phrase in known for text in said):
                    missing.append(f"{place}:{node.lineno}: {max(said, key=len)}")
    assert missing == []
    assert count > 50, "the search found too little to check"


# -- the walks -------------------------------------------------------------------------------------

WALK_LINES_MAX = 10


def walks() -> dict[str, str]:
    """Return the walks of the architecture by title."""
    sections = re.findall(
        r"^## (A [a-z]+, [^\n]+ to [^\n]+)\n(.*?)(?=^## )",
        read(ARCHITECTURE),
        re.MULTILINE | re.DOTALL,
    )
    return {title: text.partition("\n1. ")[2] for title, text in sections}


def files_of(walk: str) -> list[Path]:
    """Return the file of each line; a name alone is in the folder of the line before."""
    found: list[Path] = []
    for named in re.findall(r"(?:^|\n\d+\. )`([^`]+)`", walk):
        found.append(Path(named) if "/" in named else found[-1].parent / named)
    return found


def test_a_walk_has_few_lines_and_never_goes_up_to_come_down_again() -> None:
    rows = floors()
    assert len(walks()) == 3
    for title, walk in walks().items():
        assert len(walk.splitlines()) <= WALK_LINES_MAX, title
        files = files_of(walk)
        assert [file for file in files if not (ROOT / file).is_file()] == []
        heights = [rows.index(row_of(file, rows)) for file in files]
        assert heights == sorted(heights, reverse=True), title


# -- what is generated is current ------------------------------------------------------------------


@pytest.mark.parametrize("name", load_script("update_docs").PARTS)
def test_what_is_generated_is_current(update_docs: ModuleType, name: str) -> None:
    text = read(update_docs.PARTS[name][0])
    assert update_docs.replaced(name, text) == text, "run scripts/update_docs.py"


def test_the_first_sentences_of_the_readme_have_the_numbers_of_its_chart_and_table() -> None:
    text = read(README)
    first = " ".join(text.partition("<!--")[0].split())
    peaks = dict(re.findall(r"^(stock DeepSpeed|stock, tuned|memascend) +█+ ([\d.]+)$", text, re.M))
    least, most, ours = (float(peaks[n]) for n in ("stock, tuned", "stock DeepSpeed", "memascend"))
    assert f"takes {least:.0f} to {most:.0f} GiB" in first
    assert "and under 1 GiB with memascend" in first
    assert ours < 1
    [row] = re.findall(r"^\| Llama-3\.1-8B \|.*", text, re.M)
    [seconds, _] = re.findall(r" (\d+) s ", row)
    assert "takes four minutes for a step of 131,072 tokens" in first
    assert round(int(seconds) / 60) == 4
    [billions] = re.findall(r" ([\d.]+) billion tokens", row)
    assert "rated writes last for a billion tokens" in first
    assert round(float(billions)) == 1


def test_a_configuration_key_that_is_gone_is_noticed(update_docs: ModuleType) -> None:
    text = read(CONFIGURATION)
    row = next(line for line in text.splitlines() if "`direct_nvme.engine`" in line)
    changed = text.replace(row, row.replace("engine", "motor"))
    assert update_docs.replaced("configuration reference", changed) == text
