"""Find the texts of the console, and add those that a catalogue lacks: `python -m tests.support.catalogues`.

New ones are added without a translation, which the unit test of the catalogues refuses; texts that
are gone are removed.
"""

import ast
import sys
from collections.abc import Iterator
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import Final

from babel.messages.catalog import Catalog
from babel.messages.pofile import read_po, write_po
from jinja2.ext import babel_extract

from rooms.console.app import DONE
from rooms.console.formatting import LANGUAGES, SOURCE_LANGUAGE
from rooms.console.labels import LABELS
from rooms.console.problem_texts import FIELD_LABELS, PROBLEM_TEXTS

_FUNCTIONS: Final = ("_", "gettext", "ngettext")
# By default the texts of a template that cannot be parsed are left out without a word.
_OPTIONS: Final = {
    "trim_blocks": "true",
    "lstrip_blocks": "true",
    "extensions": "jinja2.ext.do",
    "silent": "false",
}

Text = str | tuple[str, str]
"""A message, or the singular and the plural of one."""


def texts() -> Iterator[tuple[str, Text]]:
    """Yield the file and the text of each message."""
    folder = files("rooms.console")
    for template in sorted(folder.joinpath("templates").iterdir(), key=lambda one: one.name):
        if template.name.endswith(".html"):
            source = BytesIO(template.read_bytes())
            for _, function, message, _ in babel_extract(source, _FUNCTIONS, (), _OPTIONS):
                yield template.name, _text(function == "ngettext", message)
    for module in sorted(folder.iterdir(), key=lambda one: one.name):
        if module.name.endswith(".py"):
            for found in _texts_of_module(module.read_text(encoding="utf-8")):
                yield module.name, found
    for text in DONE.values():
        yield "DONE", text
    for text in LABELS.values():
        yield "LABELS", text
    for text in (*PROBLEM_TEXTS, *FIELD_LABELS.values()):
        yield "PROBLEM_TEXTS", text


def _texts_of_module(source: str) -> Iterator[str]:
    """Yield what a module passes to `page.text`, also under the name `text`."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="page" | "self"), attr="text")
                | ast.Name(id="text"),
                args=[ast.Constant(value=str(text)), *_],
            ):
                yield text


def _text(plural: bool, message: object) -> Text:  # noqa: FBT001
    if isinstance(message, str):
        return message
    assert isinstance(message, tuple | list)
    return (str(message[0]), str(message[1])) if plural else str(message[0])


def catalogue_path(language: str) -> Path:
    """Return the file of a language's catalogue."""
    return Path(str(files("rooms.console").joinpath("locale", f"{language}.po")))


def read_catalogue(language: str) -> Catalog:
    """Return the catalogue of a language."""
    return read_po(BytesIO(catalogue_path(language).read_bytes()), locale=language)


def text_of(identity: object) -> Text:
    """Return a message's text as `texts` yields it."""
    if isinstance(identity, list | tuple):
        return (str(identity[0]), str(identity[1]))
    return str(identity)


def update(language: str) -> int:
    """Add what a catalogue lacks, and remove what is gone; return how many were added."""
    old = {text_of(one.id): one.string for one in read_catalogue(language) if one.id}
    made = Catalog(locale=language, project="Rooms", version="1", charset="utf-8")
    wanted = dict.fromkeys(sorted((text for _, text in texts()), key=str))
    for text in wanted:
        made.add(text, old.get(text, ("", "") if isinstance(text, tuple) else ""))
    with catalogue_path(language).open("wb") as file:
        write_po(file, made, width=100, omit_header=False)
    return len(set(wanted) - set(old))


if __name__ == "__main__":
    for name in LANGUAGES:
        if name != SOURCE_LANGUAGE:
            sys.stdout.write(f"{name}: {update(name)} new texts\n")
