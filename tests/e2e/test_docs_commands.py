"""Every command that a page of docs/ shows, in its order, in one shell, against a service of the page's own.

CONTRIBUTING.md says how a page marks what cannot run here.
"""

import re
from pathlib import Path

import pytest

from tests.support.docs_shell import docs_shell, has_commands, steps
from tests.support.prose import files_in
from tests.support.service import ROOT, running

PAGES = [
    page
    for page in files_in([ROOT / "docs"])
    if page.suffix == ".md" and has_commands(page.read_text())
]

_SECRET = re.compile(rb'\bwhsec_[\w+/]{16}|\brooms_[\w-]{20}|PRIVATE KEY|"d": ?"')
"""Signing secrets, API keys, tokens of links, and private keys."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_succeeds(page: Path, memory: Path, tmp_path: Path) -> None:
    with running(memory) as service, docs_shell(service, tmp_path) as shell:
        for step in steps(page.read_text()):
            shell.do(step)
        # The page's folder is a reader's clone; what is below .rooms/ is in another one here.
        assert [
            str(file.relative_to(shell.folder))
            for file in shell.folder.rglob("*")
            if file.is_file() and _SECRET.search(file.read_bytes())
        ] == []
