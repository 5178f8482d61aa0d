"""Draw charts as SVG elements of a page, coloured by the style sheet.

Each has a title that says in words what it shows, so nothing depends on seeing it.
"""

from collections.abc import Iterator, Sequence
from math import log10
from typing import Final

from markupsafe import Markup

_WIDTH: Final = 240
_HEIGHT: Final = 40
_PAD: Final = 2
MAX_POINTS: Final = 500


def sparkline(values: Sequence[float | None], title: str, *, kind: str = "plain") -> Markup:
    """Return a line through values at equal distances; None is a gap. `kind`: a CSS class."""
    return _svg(f"spark {kind}", title, _line("line", values, _top([values])))


def lines(series: Sequence[tuple[str, Sequence[float | None]]], title: str) -> Markup:
    """Return a line for each (class, values), all of them to the same scale; None is a gap."""
    top = _top([values for _, values in series])
    drawn = [_line(f"line {kind}", values, top) for kind, values in series]
    return _svg("spark", title, Markup("").join(drawn))


def _top(series: Sequence[Sequence[float | None]]) -> float:
    known = [value for values in series for value in values if value is not None]
    return max(known, default=0) or 1


def _line(kind: str, values: Sequence[float | None], top: float) -> Markup:
    values = values[-MAX_POINTS:]
    step = (_WIDTH - 2 * _PAD) / max(1, len(values) - 1)
    parts: list[str] = []
    # A value between gaps is a line without length, drawn as a point.
    points: list[str] = []
    is_open = False
    for index, value in enumerate(values):
        if value is None:
            is_open = False
            continue
        x = _PAD + index * step
        y = _HEIGHT - _PAD - (_HEIGHT - 2 * _PAD) * value / top
        if not is_open and (index + 1 == len(values) or values[index + 1] is None):
            points.append(f"M{x:.1f} {y:.1f}h0")
            continue
        parts.append(f"{'L' if is_open else 'M'}{x:.1f} {y:.1f}")
        is_open = True
    drawn = ((kind, parts), (f"{kind} point", points))
    return Markup("").join(
        Markup('<path class="{}" d="{}"/>').format(name, " ".join(one))
        for name, one in drawn
        if one
    )


def stacked_bars(series: Sequence[tuple[str, Sequence[float]]], title: str) -> Markup:
    """Return bars over equal times: of each (class, values), one on the other."""
    length = max((len(values) for _, values in series), default=0)
    totals = [
        sum(values[index] for _, values in series if index < len(values)) for index in range(length)
    ]
    top = max(totals, default=0) or 1
    width = (_WIDTH - 2 * _PAD) / max(1, length)
    bars: list[Markup] = []
    for index in range(min(length, MAX_POINTS)):
        bottom = float(_HEIGHT - _PAD)
        for kind, values in series:
            value = values[index] if index < len(values) else 0
            if value <= 0:
                continue
            height = max(1.0, (_HEIGHT - 2 * _PAD) * value / top)
            bottom -= height
            bars.append(
                Markup(
                    '<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>'
                ).format(kind, _PAD + index * width, bottom, max(0.8, width - 1), height)
            )
    return _svg("bars", title, Markup("").join(bars))


def share_bar(parts: Sequence[tuple[str, float]], title: str) -> Markup:
    """Return one bar that is divided by the shares of (class, amount)."""
    total = sum(amount for _, amount in parts) or 1
    x = 0.0
    drawn: list[Markup] = []
    for kind, amount in parts:
        width = _WIDTH * amount / total
        if width > 0:
            drawn.append(
                Markup('<rect class="{}" x="{:.1f}" y="0" width="{:.1f}" height="{}"/>').format(
                    kind, x, width, _HEIGHT // 4
                )
            )
        x += width
    return _svg("share", title, Markup("").join(drawn), height=_HEIGHT // 4)


_TICKS: Final = (
    (1, "1 s"),
    (10, "10 s"),
    (60, "1 min"),
    (600, "10 min"),
    (3600, "1 h"),
    (6 * 3600, "6 h"),
    (86_400, "1 d"),
    (7 * 86_400, "7 d"),
    (30 * 86_400, "30 d"),
    (365 * 86_400, "365 d"),
)
_TICK_DISTANCE: Final = 18
_RETRY_HEIGHT: Final = 30
_RETRY_AXIS: Final = 14


def retry_schedule(times_s: Sequence[tuple[float, float]], title: str) -> Markup:
    """Return attempts on a logarithmic line of time: each as (earliest, latest) in seconds."""
    latest = max((late for _, late in times_s), default=1)
    scale = (_WIDTH - 20) / log10(1 + max(1.0, latest))
    marks: list[Markup] = [
        Markup('<path class="axis" d="M4 {}H{}"/>').format(_RETRY_AXIS, _WIDTH - 4),
        *_ticks(latest, scale),
    ]
    for number, (early, late) in enumerate(times_s, start=1):
        first, last = 8 + scale * log10(1 + early), 8 + scale * log10(1 + late)
        if last - first > 1:
            marks.append(
                Markup('<rect class="jitter" x="{:.1f}" y="{}" width="{:.1f}" height="8"/>').format(
                    first, _RETRY_AXIS - 4, last - first
                )
            )
        marks.append(
            Markup(
                '<circle class="attempt" cx="{:.1f}" cy="{}" r="2.2"><title>{}</title></circle>'
            ).format(last, _RETRY_AXIS, number)
        )
    return _svg("retry", title, Markup("").join(marks), height=_RETRY_HEIGHT)


def _ticks(latest: float, scale: float) -> Iterator[Markup]:
    """Yield the round times up to the latest one, as far as their names have room."""
    before = -float(_TICK_DISTANCE)
    for seconds, name in _TICKS:
        x = 8 + scale * log10(1 + seconds)
        if seconds > max(1.0, latest) or x - before < _TICK_DISTANCE:
            continue
        before = x
        yield Markup(
            '<path class="axis" d="M{:.1f} {}v4"/><text class="label" x="{:.1f}" y="{}">{}</text>'
        ).format(x, _RETRY_AXIS, x, _RETRY_HEIGHT - 4, name)


def _svg(kind: str, title: str, content: Markup, *, height: int = _HEIGHT) -> Markup:
    return Markup(
        '<svg class="chart {}" viewBox="0 0 {} {}" role="img" preserveAspectRatio="none">'
        "<title>{}</title>{}</svg>"
    ).format(kind, _WIDTH, height, title, content)
