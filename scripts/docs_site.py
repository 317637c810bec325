"""Builds the site of the repository's documents where they lie: a hook of mkdocs (mkdocs.yml).

Pages come from the whole repository under their own paths, and so does every file that a page
links. A link is then right in the repository, where tests/test_docs.py checks it, and on the site,
where mkdocs does.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
#: What is a page, in the repository.
PATTERNS = (
    "*.md",
    *(f"{folder}/**/README.md" for folder in ("configs", "deploy", "examples")),
    "docs/**/*.md",
)
#: The public address of the repository, in pyproject.toml (Python 3.10 reads no TOML).
ADDRESS = re.compile(r'^Repository = "(https://.+?)/?"', re.MULTILINE)
#: Where a page is on the site, when not under its own name.
ADDRESSES = {"README.md": "index.html"}
STYLE, ICON = "docs/pictures/site.css", "docs/pictures/icon.svg"
#: Of one page alone.
SCRIPTS = {"docs/memory.md": "docs/calculator.js"}
#: Whose pages are about files beside them; on the site those are listed below the page.
FOLDERS = ("configs", "examples")
FILES = ("*.json", "*.py", "*.yaml", "*/*.json", "*/*.py", "*/*.yaml", "data/*.jsonl")
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
FETCHED = re.compile(
    r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=\"?((?:https?:)?//[^\"> ]+)"
)


def documents() -> list[Path]:
    """Return every page of the site."""
    return sorted({path for pattern in PATTERNS for path in ROOT.glob(pattern)})


def linked_files() -> list[Path]:
    """Return what pages link to beside pages: pictures, configurations, programs."""
    found = {ROOT / name for name in (STYLE, ICON, *SCRIPTS.values())}
    for document in documents():
        for link in LINK.findall(document.read_text(encoding="utf-8")):
            target = (document.parent / link).resolve()
            if "://" not in link and target.suffix != ".md" and target.is_file():
                found.add(target)
        found.update(files_beside(document))
    return sorted(found)


def files_beside(document: Path) -> list[Path]:
    """Return the configurations and programs that a page is about, where it is about such."""
    if document.relative_to(ROOT).parts[0] not in FOLDERS:
        return []
    return sorted(path for pattern in FILES for path in document.parent.glob(pattern))


def repository() -> str | None:
    """Return the public address of the repository, which pyproject.toml has, if there is one."""
    found = ADDRESS.search((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return found and found[1]


def fetched_elsewhere(page: str) -> list[str]:
    """Return the addresses from which a reader's browser would fetch parts of a page."""
    return FETCHED.findall(page)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give headings the anchors that they have on GitHub, and the site the project's address."""
    from pymdownx.slugs import slugify

    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    config.repo_url = repository()
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace what lies in docs/ by the documents of the repository, and what they link to."""
    from mkdocs.structure.files import File

    found = type(files)([file for file in files if file.src_dir != config.docs_dir])
    for path in [*documents(), *linked_files()]:
        name = path.relative_to(ROOT).as_posix()
        file = File.generated(config, name, abs_src_path=str(path))
        if name in ADDRESSES:
            file.dest_uri = file.url = ADDRESSES[name]
        found.append(file)
    return found


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """List the files that a page is about below it."""
    document = ROOT / page.file.src_uri
    names = [path.relative_to(document.parent).as_posix() for path in files_beside(document)]
    links = [f"- [{name}]({name})" for name in names]
    return "\n".join([markdown, "", "## Files", "", *links]) if links else markdown


def on_page_content(html: str, page: Page, **_: Any) -> str:
    """Give a page its program. It is beside the page, and GitHub would show its text."""
    script = SCRIPTS.get(page.file.src_uri)
    return html if script is None else f'{html}\n<script src="{Path(script).name}"></script>'


def on_post_build(config: MkDocsConfig) -> None:
    """Refuse a site that cannot be read offline."""
    for path in sorted(Path(config.site_dir).rglob("*.html")):
        if found := fetched_elsewhere(path.read_text(encoding="utf-8")):
            raise SystemExit(f"{path} fetches {', '.join(found)}; the site has to work offline")
