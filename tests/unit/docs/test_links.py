"""Check links, images, files, tables and navigation of the documentation.

The site builder finds missing pages and anchors in docs/. These tests add files at the top, images,
links that leave docs/, names of files in backticks, broken tables, and pages that the navigation
omits.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.markdown import broken_rows, headings, links, prose_of, spans
from tests.support.prose import files_in
from tests.support.service import ROOT

DOCS = ROOT / "docs"
PAGES = [page for page in (*sorted(ROOT.glob("*.md")), *files_in([DOCS])) if page.suffix == ".md"]

_FOLDERS = ("rooms", "delivery", "tests", "migrations", "docs", "compose")
_OUR_PATH = re.compile(rf"(?:{'|'.join(_FOLDERS)})/[\w./*-]+")
_FILE_NAME = re.compile(r"[\w./-]+\.(?:py|sql|java)")
_OF_THE_READER = frozenset({"shop.py", "verify.py"})
"""Files that a guide lets its reader write."""


def navigation() -> list[str]:
    def pages(entries: Any) -> list[str]:
        if isinstance(entries, str):
            return [entries]
        values = entries.values() if isinstance(entries, dict) else entries
        return [page for value in values for page in pages(value)]

    return pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    wrong = []
    for target in links(page.read_text()):
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if (
            not file.exists()
            or (page.is_relative_to(DOCS) and not file.is_relative_to(DOCS))
            or (anchor and file.suffix == ".md" and anchor not in headings(file.read_text()))
        ):
            wrong.append(target)
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_in_backticks_exists(page: Path) -> None:
    """A path from the root is one of a file or folder; a shorter one is the end of such a path."""
    wrong = []
    for line, text in spans(page.read_text()):
        if _OUR_PATH.fullmatch(text):
            exists = any(ROOT.glob(text))
        elif _FILE_NAME.fullmatch(text) and text not in _OF_THE_READER:
            exists = any(next((ROOT / folder).rglob(text), None) for folder in _FOLDERS)
        else:
            continue
        if not exists:
            wrong.append(f"{line}: {text}")
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_row_of_a_table_has_the_cells_of_its_head(page: Path) -> None:
    assert broken_rows(page.read_text()) == []


def test_the_navigation_names_every_page_once() -> None:
    named = navigation()
    assert sorted(named) == sorted(
        str(page.relative_to(DOCS)) for page in PAGES if page.is_relative_to(DOCS)
    )


def test_no_page_takes_anything_from_another_host() -> None:
    for page in PAGES:
        text = prose_of(page.read_text())
        assert not re.search(r"!\[[^\]]*\]\(https?:|<(?:script|img|link|iframe)\b", text), page
