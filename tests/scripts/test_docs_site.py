"""The site has every document once, and needs nothing from elsewhere (its links: `make docs`)."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.support.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]
PICTURES = sorted((ROOT / "docs" / "pictures").glob("*.svg"))


@pytest.fixture(scope="module")
def site() -> ModuleType:
    return load_script("docs_site")


@pytest.fixture(scope="module")
def config() -> Any:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def named(entries: list[Any]) -> list[str]:
    """Return the pages of a menu, in their order."""
    found: list[str] = []
    for entry in entries:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            found += named(value) if isinstance(value, list) else [value]
    return found


def test_the_menu_has_every_document_once(site: ModuleType, config: Any) -> None:
    pages = [path.relative_to(ROOT).as_posix() for path in site.documents()]
    assert sorted(named(config["nav"])) == pages
    assert "README.md" in pages


def test_no_two_pages_have_one_address(site: ModuleType) -> None:
    names = [path.relative_to(ROOT).as_posix() for path in site.documents()]
    known = [site.ADDRESSES.get(name, name.removesuffix(".md") + ".html") for name in names]
    assert len({address.lower() for address in known}) == len(known)
    assert set(site.ADDRESSES) <= set(names)


def test_what_a_page_links_to_is_on_the_site(site: ModuleType) -> None:
    assert {ROOT / "LICENSE", *PICTURES} <= set(site.linked_files())


def test_colours_follow_the_system_until_a_reader_chooses(config: Any) -> None:
    palette = config["theme"]["palette"]
    assert [entry["media"] for entry in palette] == [
        "(prefers-color-scheme)",
        "(prefers-color-scheme: light)",
        "(prefers-color-scheme: dark)",
    ]
    assert all({"icon", "name"} == set(entry["toggle"]) for entry in palette)
    assert (ROOT / config["theme"]["favicon"]).is_file()


def test_a_page_that_needs_another_host_is_noticed(site: ModuleType) -> None:
    page = '<a href="https://arxiv.org"><script src="a.js"></script><link rel=x href="b.css">'
    assert site.fetched_elsewhere(page) == []
    page += '<script async src="https://cdn.example/m.js"></script><img src=//example.org/i.png>'
    assert site.fetched_elsewhere(page) == ["https://cdn.example/m.js", "//example.org/i.png"]


def test_the_site_links_the_address_of_the_project(
    site: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(site, "ROOT", tmp_path)
    project = tmp_path / "pyproject.toml"
    project.write_text('[project.urls]\nRepository = "https://example.org/me/memascend"\n')
    assert site.repository() == "https://example.org/me/memascend"
    project.write_text('[project.urls]\nPaper = "https://example.org/paper"\n')
    assert site.repository() is None


def test_the_site_asks_for_no_fonts(config: Any) -> None:
    assert config["theme"]["font"] is False
    assert config["strict"] is True


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_a_picture_is_described_and_needs_nothing_from_elsewhere(picture: Path) -> None:
    text = picture.read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    known = {element.tag.rpartition("}")[2]: element.text for element in root}
    assert known["title"]
    assert known["desc"]
    assert text.replace('xmlns="http://www.w3.org/2000/svg"', "").count("://") == 0
    assert "prefers-color-scheme: dark" in text


def test_a_page_of_examples_has_their_files_and_others_have_none(site: ModuleType) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="examples/README.md"))
    listed = site.on_page_markdown("text", page)
    assert "- [trainer/ds_config.json](trainer/ds_config.json)" in listed
    assert "- [trainer/train.py](trainer/train.py)" in listed
    assert "- [data/text.jsonl](data/text.jsonl)" in listed
    page.file.src_uri = "docs/memory.md"
    assert site.on_page_markdown("text", page) == "text"
    named = ("examples/trainer/train.py", "examples/data/text.jsonl", "configs/nvme_gpu.json")
    assert {ROOT / name for name in named} <= set(site.linked_files())


def test_a_page_with_a_program_gets_it_and_others_do_not(site: ModuleType) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="docs/memory.md"))
    assert site.on_page_content("text", page).endswith('<script src="calculator.js"></script>')
    page.file.src_uri = "docs/faq.md"
    assert site.on_page_content("text", page) == "text"
    assert all((ROOT / script).is_file() for script in site.SCRIPTS.values())
