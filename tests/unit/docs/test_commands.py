"""Check the commands in the documentation without running them, as test_docs_commands.py does."""

import re
from pathlib import Path

import click
import pytest

from rooms.cli import build_cli
from tests.support.docs_shell import PageError, Step, steps
from tests.support.markdown import spans
from tests.support.prose import files_in
from tests.support.service import ROOT

TEMPLATES = ROOT / "rooms" / "console" / "templates"

PAGES = [
    page
    for page in (*sorted(ROOT.glob("*.md")), *files_in([ROOT / "docs"]))
    if page.suffix == ".md"
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_keeps_the_convention(page: Path) -> None:
    steps(page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_in_the_text_exists(page: Path) -> None:
    unknown = [(line, text) for line, text in spans(page.read_text()) if not _exists(text)]
    # The changelog names commands that were renamed.
    assert unknown == [] or page.name == "CHANGELOG.md"


@pytest.mark.parametrize("template", sorted(TEMPLATES.glob("*.html")), ids=lambda one: one.name)
def test_every_command_on_a_page_of_the_console_exists(template: Path) -> None:
    found = re.findall("command=.?(rooms [^~]*)", template.read_text())
    assert [text for text in found if not _exists(text.strip("'\" "))] == []


def _exists(text: str) -> bool:
    words = text.split()
    if words[:1] != ["rooms"] or len(words) == 1:
        return True
    command: click.Command | None = build_cli()
    for word in words[1:]:
        # A placeholder, an argument or an option ends the command's name.
        if not isinstance(command, click.Group) or not re.fullmatch("[a-z][a-z-]*", word):
            return True
        command = command.get_command(click.Context(command), word)
        if command is None or command.hidden:
            return False
    return True


def test_steps_are_commands_and_files_in_their_order() -> None:
    source = (
        "<!-- run:\nrooms room create a\n-->\n\n```sh\nrooms room list\n```\n\n<!-- shows: ^a -->\n"
        "<!-- not run: needs Java -->\n```sh\nmake run-full\n```\n"
        "<!-- file: shop.py -->\n```python\nx = 1\n```\n```text\nnothing\n```\n```console\n$ rooms status\nfine\n```\n"
    )
    assert steps(source) == [
        Step(line=1, commands="rooms room create a"),
        Step(line=5, commands="rooms room list\n", shows="^a"),
        Step(line=15, file="shop.py", text="x = 1\n"),
        Step(line=21, commands="rooms status\n"),
    ]
    assert steps("<!-- not run: needs Artemis; whole page -->\n```sh\nmake run-full\n```\n") == []


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("```\nrooms status\n```\n", "names no language"),
        ("<!-- not run: -->\n```sh\nrooms status\n```\n", "needs its reason"),
        ("<!-- shows: a -->\n", "no command"),
    ],
)
def test_a_block_that_breaks_the_convention_is_named(source: str, problem: str) -> None:
    with pytest.raises(PageError, match=problem):
        steps(source)


def test_python_that_does_not_parse_is_found() -> None:
    with pytest.raises(SyntaxError):
        steps("```python\nx = (\n```\n")
