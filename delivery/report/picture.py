"""The picture: some of the report's figures as one PNG, for places that show no HTML."""

import re
import textwrap
from collections.abc import Iterable
from html import escape
from typing import Final

import vl_convert

from delivery.report.page import Figure
from rooms.terminal import terminal_safe

_SIZE: Final = re.compile(r'<svg [^>]*?width="([\d.]+)" height="([\d.]+)"')
_WIDTH: Final = 1000
_MARGIN: Final = 28
_LINE: Final = 19
_LETTERS: Final = 132
"""Letters of a line of a caption."""
_FONT: Final = "Liberation Sans, Helvetica, Arial, sans-serif"


def picture(figures: Iterable[Figure], *, scale: float = 1.0) -> bytes:
    """The figures that have a chart, one below the other, each with its title and caption."""
    parts: list[str] = []
    y = float(_MARGIN)
    for figure in figures:
        size = None if figure.chart is None else _SIZE.search(figure.chart)
        if figure.chart is None or size is None:
            continue
        width, height = map(float, size.groups())
        parts.append(_text(figure.title, y + 16, size=19, weight="bold", colour="#1d2530"))
        y += 30
        shrunk = min(1.0, (_WIDTH - 2 * _MARGIN) / width)
        parts.append(f'<g transform="translate({_MARGIN} {y}) scale({shrunk})" color="#1d2530">{figure.chart}</g>')
        y += height * shrunk + 8
        for line in (part for said in figure.caption.splitlines() for part in textwrap.wrap(said, _LETTERS)):
            parts.append(_text(line, y + 14, size=14, weight="normal", colour="#5a6675"))
            y += _LINE
        y += 26
    body = f'<rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}'
    drawn = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{round(y)}">{body}</svg>'
    return bytes(vl_convert.svg_to_png(drawn, scale=scale))


def _text(said: str, y: float, *, size: int, weight: str, colour: str) -> str:
    told = f'x="{_MARGIN}" y="{y}" font-family="{_FONT}" font-size="{size}" font-weight="{weight}" fill="{colour}"'
    return f"<text {told}>{escape(terminal_safe(said))}</text>"
