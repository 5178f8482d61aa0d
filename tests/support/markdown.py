"""Read code blocks, links, headings and tables of Markdown."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_TOKEN: Final = re.compile(
    r"^[ ]*<!--(?P<comment>.*?)-->"
    r"|^(?P<indent>[ ]*)(?P<fence>`{3,}|~{3,})[ ]*(?P<language>[^\s`]*)[^\n]*\n(?P<code>.*?)^[ ]*(?P=fence)[ ]*$",
    re.DOTALL | re.MULTILINE,
)
_SPAN: Final = re.compile(r"(`+)(.+?)\1", re.DOTALL)
_LINK: Final = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_DIVIDER: Final = re.compile(r"(?<!\\)\|")
_DEFINITION: Final = re.compile(r"^\[[^\]]+\]:\s+(\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Hold a fenced code block, or a comment (`language` is None)."""

    line: int
    language: str | None
    text: str


def blocks(source: str) -> Iterator[Block]:
    """Yield code blocks and comments in their order; `line` is the block's first line."""
    for found in _TOKEN.finditer(source):
        line = source.count("\n", 0, found.start()) + 1
        if found["comment"] is not None:
            yield Block(line=line, language=None, text=found["comment"].strip())
            continue
        indent = len(found["indent"])
        code = "".join(
            row[min(indent, len(row) - len(row.lstrip(" "))) :]
            for row in found["code"].splitlines(keepends=True)
        )
        yield Block(line=line, language=found["language"], text=code)


def prose_of(source: str) -> str:
    """Return the text without code blocks and comments, its line numbers kept."""
    return _TOKEN.sub(lambda found: "\n" * found[0].count("\n"), source)


def spans(source: str) -> list[tuple[int, str]]:
    """Return the inline code with its lines."""
    text = prose_of(source)
    return [
        (text.count("\n", 0, found.start()) + 1, found[2].strip()) for found in _SPAN.finditer(text)
    ]


def links(source: str) -> list[str]:
    """Return the targets of links and images."""
    text = _SPAN.sub("`code`", prose_of(source))
    return [*_LINK.findall(text), *_DEFINITION.findall(text)]


def headings(source: str) -> set[str]:
    """Return the anchors of the headings, as the site and GitHub make them."""
    found: set[str] = set()
    for title in re.findall(r"^#{1,6}\s+(.*?)\s*#*$", prose_of(source), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        plain = re.sub(r"[^\w\s-]", "", text.replace("`", "")).strip().lower()
        # The site joins neighbouring hyphens and spaces, GitHub does not.
        found |= {re.sub(r"[-\s]+", "-", plain), re.sub(r"\s", "-", plain)}
    return found


def cells_of(row: str) -> list[str]:
    r"""Return the cells of a table's row. As on GitHub, each `|` divides, in code as well; `\|` does not."""
    return [cell.strip() for cell in _DIVIDER.split(row.strip().removeprefix("|"))[:-1]]


def table_rows(source: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the cells of each row of each table, heads and rules too, with the row's line."""
    for number, line in enumerate(prose_of(source).split("\n"), 1):
        if line.lstrip().startswith("|"):
            yield number, cells_of(line)


def broken_rows(source: str) -> list[int]:
    """Return the lines of rows that have not the cells of their table's head, or are not whole."""
    broken = []
    width = 0
    for number, line in enumerate(prose_of(source).split("\n"), 1):
        row = line.strip()
        if not row:
            width = 0
        elif row.startswith("|") or width:
            width = width or len(cells_of(row))
            if not (row.startswith("|") and row.endswith("|") and len(cells_of(row)) == width):
                broken.append(number)
    return broken
