"""Test that the style sheet is free of left and right, so that a page may be turned."""

import re
from importlib.resources import files
from typing import Final

SHEET: Final = files("rooms.console").joinpath("static", "console.css").read_text(encoding="utf-8")
_COMMENT: Final = re.compile(r"/\*.*?\*/", re.DOTALL)
_DECLARATION: Final = re.compile(r"([a-z-]+)\s*:\s*([^;{}]+)[;}]")
_SIDED: Final = frozenset({"margin", "padding", "inset", "border-width", "border-style"})
_CORNERED: Final = "border-radius"


def values(text: str) -> list[str]:
    """Return the values of a shorthand; a function with its arguments is one of them."""
    found, depth = [""], 0
    for char in text.strip():
        depth += (char == "(") - (char == ")")
        if char.isspace() and not depth:
            found.append("")
        else:
            found[-1] += char
    return [one for one in found if one]


def physical(name: str, value: str) -> bool:
    """Return whether a declaration names a side of the screen, or treats left and right unlike."""
    if re.search(r"\b(left|right)\b", name) or re.search(r"\b(left|right)\b", value):
        return True
    parts = values(value)
    if name in _SIDED:
        return len(parts) == 4 and parts[1] != parts[3]
    return name == _CORNERED and len(parts) > 1


def test_the_check_finds_sides() -> None:
    for name, value in (
        ("margin-left", "1px"),
        ("text-align", "right"),
        ("padding", "0 calc(3 * var(--step)) 0 0"),
        ("border-radius", "0 4px 4px 0"),
        ("left", "0"),
    ):
        assert physical(name, value), (name, value)
    for name, value in (
        ("margin", "0 auto"),
        ("padding", "0 1px 2px 1px"),
        ("margin", "0 calc(1px + 2px) 0"),
        ("margin-inline", "0 1px"),
        ("text-align", "end"),
        ("border-radius", "4px"),
    ):
        assert not physical(name, value), (name, value)


def test_no_declaration_names_a_side() -> None:
    declared = _DECLARATION.findall(_COMMENT.sub("", SHEET))
    assert len(declared) > 300
    assert [f"{name}: {value}" for name, value in declared if physical(name, value)] == []
