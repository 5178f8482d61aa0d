"""Every command that a page of docs/ shows, in its order, in one shell, against a service of the page's own.

CONTRIBUTING.md says how a page marks what cannot run here.
"""

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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_succeeds(page: Path, memory: Path, tmp_path: Path) -> None:
    with running(memory) as service, docs_shell(service, tmp_path) as shell:
        for step in steps(page.read_text()):
            shell.do(step)
