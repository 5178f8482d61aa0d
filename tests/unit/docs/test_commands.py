"""Check the commands in the documentation without running them, as test_docs_commands.py does."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from rooms.cli import build_cli
from tests.support.docs_shell import SHELL, PageError, Step, steps
from tests.support.markdown import blocks, prose_of, spans
from tests.support.prose import files_in
from tests.support.service import ROOT

TEMPLATES = ROOT / "rooms" / "console" / "templates"

READING = frozenset(
    {"counts", "deliveries", "list", "messages", "show", "sideline", "status", "timeline"}
)
"""Commands that change nothing, of those that wait for something or check it."""
SECRET_FOLDER = ".rooms/"
"""It is in no commit, and `make run` makes it so that only its owner may enter."""
_QUOTED = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*\"""", re.DOTALL)
_WAITS_OR_CHECKS = re.compile(
    r"eventually \S.*|\w+\(\) \{ .*; \}|[^|&;]+\| python3 -c ''|[^|&;]+\| grep -q .*"
)
_CHANGES = re.compile(r"(?<!&)&(?!&)|>|(?:^| )(?:-d|-X|--data|--request)(?= |$)", re.MULTILINE)
_MAKES_A_SECRET = re.compile(
    r"\bkey (?:create|rotate)\b|subscription create\b(?!.*--type pull)|\brotate-(?:secret|password)\b"
    r"|\bsigning-key generate\b|\b(?:portal|sign-in)-link\b|\bcurl\b.* -c |\b-keyout\b|-keyout "
)
_WRITTEN = re.compile(
    r"(?:(?<![0-9&])>>?\s*|\btee (?:-a )?| -c | -o | --out | -keyout |\bgenerate )(?!&|/dev/null)(\S+)"
)

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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_hidden_commands_only_wait_or_check(page: Path) -> None:
    """A reader does not see them, so what they made would be missing in the reader's service."""
    assert list(_hidden_changes(page.read_text())) == []


@pytest.mark.parametrize(
    "hidden",
    [
        "rooms publish orders order.created '{}'",
        "eventually sh -c 'rooms publish orders order.created'",
        "made() { rooms room create a; }\neventually made",
        "python3 receiver.py 2>receiver.log &",
        "eventually true &",
        "eventually true > log",
        "call $API/rooms -d '{}' | grep -q id",
        'call $API/rooms | python3 -c "print(1)"',
        "export A=1",
    ],
)
def test_a_hidden_command_that_changes_something_is_found(hidden: str) -> None:
    assert list(_hidden_changes(f"<!-- run:\n{hidden}\n-->\n")) != []


@pytest.mark.parametrize(
    "hidden",
    [
        "eventually sh -c 'rooms timeline orders/order-1 | grep -q delivered'",
        "done() { rooms deliveries orders/a | grep -q done; }\neventually done",
        'call $API/rooms | python3 -c "\nimport json\nassert json"',
    ],
)
def test_a_hidden_command_that_waits_or_checks_is_accepted(hidden: str) -> None:
    assert list(_hidden_changes(f"<!-- run:\n{hidden}\n-->\n")) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_readers_are_shown_no_command_that_only_the_tests_have(page: Path) -> None:
    assert [line for line in _shown_lines(page.read_text()) if "eventually" in line.split()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_secrets_are_written_only_below_the_folder_for_them(page: Path) -> None:
    assert list(_exposed_secrets(page.read_text())) == []


@pytest.mark.parametrize(
    ("command", "exposed"),
    [
        ("rooms --json key create --name a > key.json", "key.json"),
        (
            "rooms --json organisation key create b \\\n  --name c | field key > $name.key",
            "$name.key",
        ),
        ("health --json key rotate ward | field key >> ward.key", "ward.key"),
        ("rooms --json subscription create a b --push-url http://c/d | tee e.json", "e.json"),
        ("rooms signing-key generate signing.json", "signing.json"),
        ('curl -sS -c cookies "$LINK"', "cookies"),
        ("openssl req -x509 -nodes -keyout tls-key.pem -out .rooms/tls.pem", "tls-key.pem"),
        ("rooms --json key create --name a > .rooms/key.json", None),
        ("rooms --json subscription create a b --type pull > queue.json", None),
        ("rooms key create --name a 2> errors", None),
        ("rooms usage export --out usage.csv", None),
    ],
)
def test_a_secret_that_others_may_read_is_found(command: str, exposed: str | None) -> None:
    found = list(_exposed_secrets(f"```sh\n{command}\n```\n"))
    assert found == ([] if exposed is None else [exposed])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_readers_see_the_name_of_each_file_that_a_command_uses(page: Path) -> None:
    source = page.read_text()
    shown = prose_of(source) + "\n".join(_shown_lines(source))
    asked = steps(source)
    used = [
        one.file
        for one in asked
        if one.file
        and any(
            re.search(rf"\b{Path(one.file).stem}\b", other.commands or other.text)
            for other in asked
            if other is not one
        )
    ]
    # A reader writes a file only under a name that the text says.
    assert [name for name in used if name not in shown] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_a_portal_name_the_person(page: Path) -> None:
    """Without it the customer sees the operator's login."""
    source = page.read_text()
    shown = [*(text for _, text in spans(source)), *_shown_lines(source)]
    links = [line for line in shown if line.startswith("rooms portal-link ")]
    unnamed = [line for line in links if " --name " not in line]
    # The changelog names options, and shows no command to run.
    assert unnamed == [] or page.name == "CHANGELOG.md"


def _hidden_changes(source: str) -> Iterator[str]:
    """Yield what the page's hidden blocks do besides waiting and checking."""
    for block in blocks(source):
        if block.language is not None or not block.text.startswith("run:"):
            continue
        commands = block.text.removeprefix("run:").strip()
        outside = _QUOTED.sub("''", commands)
        yield from (
            line for line in outside.splitlines() if not _WAITS_OR_CHECKS.fullmatch(line.strip())
        )
        yield from _CHANGES.findall(outside)
        yield from (set(re.findall(r"[\w-]+", commands)) & _command_names()) - READING
        if "python3 -c" in commands and not re.search(r"\bassert\b|create_connection", commands):
            yield commands


def _shown_lines(source: str) -> Iterator[str]:
    for block in blocks(source):
        if block.language in SHELL:
            yield from block.text.splitlines()


def _exposed_secrets(source: str) -> Iterator[str]:
    """Yield the names of files that get a secret and are not in the folder for them."""
    for block in blocks(source):
        if block.language in SHELL:
            for command in block.text.replace("\\\n", " ").splitlines():
                if _MAKES_A_SECRET.search(command):
                    for name in _WRITTEN.findall(command):
                        if not name.startswith(SECRET_FOLDER):
                            yield name


@cache
def _command_names() -> frozenset[str]:
    """Return the last word of each command."""

    def leaves(command: click.Command, name: str) -> Iterator[str]:
        if not isinstance(command, click.Group):
            yield name
            return
        context = click.Context(command)
        for word in command.list_commands(context):
            if (found := command.get_command(context, word)) is not None:
                yield from leaves(found, word)

    return frozenset(leaves(build_cli(), ""))


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
