"""Test that the commands that pages show exist, with their options."""

import re
from importlib.resources import files
from typing import Final

import click
import pytest

from rooms.cli import build_cli

_SHOWN: Final = re.compile(r"""\brooms((?: [a-z][a-z-]*)+)((?:(?!\\n|\)|,)[^<"])*)""")
_OPTION: Final = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
_QUOTED: Final = re.compile(r"""command\(?=?["']rooms .*?$|<code>rooms .*?</code>""", re.MULTILINE)


def shown() -> list[tuple[str, list[str], list[str]]]:
    """Return the template, the words and the options of each command."""
    found = []
    for template in files("rooms.console").joinpath("templates").iterdir():
        for part in _QUOTED.findall(template.read_text(encoding="utf-8")):
            for words, rest in _SHOWN.findall(part):
                found.append((template.name, words.split(), _OPTION.findall(rest)))
    return found


def resolve(words: list[str]) -> click.Command:
    """Return the command that words name, without its arguments. KeyError: there is none."""
    command: click.Command = build_cli()
    context = click.Context(command)
    for word in words:
        if not isinstance(command, click.Group):
            break
        found = command.get_command(context, word)
        if found is None:
            raise KeyError(word)
        command = found
    assert not isinstance(command, click.Group), words
    return command


def test_there_are_commands_to_check() -> None:
    assert len(shown()) > 20


@pytest.mark.parametrize(("template", "words", "options"), shown())
def test_a_shown_command_exists(template: str, words: list[str], options: list[str]) -> None:
    known = {name for one in resolve(words).params for name in one.opts}
    assert set(options) <= known, template
