"""Draw charts as SVG elements of a page, coloured by the style sheet.

Each has a title that says in words what it shows, so nothing depends on seeing it.

The timeline of a message has a line for each subscription, and each step at its time. Time is
logarithmic from the publish on, because milliseconds matter at first and days later.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import log10
from typing import Any, Final

from markupsafe import Markup

from rooms.domain.state_machine import LogKind

_WIDTH: Final = 240
_HEIGHT: Final = 40
_PAD: Final = 2
MAX_POINTS: Final = 500
MAX_LINES: Final = 12
"""So many subscriptions are drawn; the table has all."""
_TIMELINE_WIDTH: Final = 900
_LEFT: Final = 190
_TOP: Final = 26
_LINE: Final = 26
_RIGHT: Final = 14
_UNIT_S: Final = 0.01
_MIN_SPAN_S: Final = 0.1
_MIN_TICK_GAP: Final = 64
_MAX_LABEL: Final = 26
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
    (365 * 86_400, "1 y"),
)
_TIMELINE_TICKS: Final = ((0.1, "100 ms"), *_TICKS)
_GOOD: Final = frozenset({LogKind.DELIVERED, LogKind.PULL_ACKED, LogKind.HANDED_OVER})
_BAD: Final = frozenset({LogKind.SIDELINED, LogKind.EXPIRED, LogKind.NACKED})
_WAITS: Final = frozenset({LogKind.RETRY_SCHEDULED, LogKind.HELD, LogKind.LEASE_ENDED})
_ENDED: Final = frozenset({LogKind.CANCELLED, LogKind.DROPPED, LogKind.PURGED})
_MAX_GOOD_STATUS: Final = 299
_RANKS: Final = ("bad", "warn", "busy", "off", "good")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineLine:
    """Hold the steps of one subscription, under its name."""

    name: str
    steps: Sequence[Mapping[str, Any]]


def step_kind(step: Mapping[str, Any]) -> str:
    """Return the kind of badge that a step has: good, bad, warn, busy or off."""
    kind = step["kind"]
    if kind in _GOOD:
        return "good"
    if kind in _BAD or (kind == LogKind.ATTEMPTED and not _succeeded(step)):
        return "bad"
    if kind in _WAITS:
        return "warn"
    return "off" if kind in _ENDED else "busy"


def _succeeded(step: Mapping[str, Any]) -> bool:
    status = step["http_status"]
    return step["error_class"] is None and (status is None or status <= _MAX_GOOD_STATUS)


def worst_first(lines: Iterable[TimelineLine]) -> list[TimelineLine]:
    """Return lines by their last steps: failures, what waits, what is under way, successes."""
    return sorted(lines, key=lambda line: _RANKS.index(step_kind(line.steps[-1])))


def draw_timeline(began: datetime, lines: Sequence[TimelineLine], title: str) -> Markup:
    """Return the timeline as SVG. `began`: when the message was published."""
    shown = lines[:MAX_LINES]
    last = max((_after_s(began, step) for line in shown for step in line.steps), default=0.0)
    span = log10(1 + max(last, _MIN_SPAN_S) / _UNIT_S)
    scale = (_TIMELINE_WIDTH - _LEFT - _RIGHT) / span

    def place(after_s: float) -> float:
        return _LEFT + scale * log10(1 + max(0.0, after_s) / _UNIT_S)

    height = _TOP + _LINE * len(shown)
    parts: list[Markup] = [Markup('<text class="tick" x="{}" y="14">0 s</text>').format(_LEFT)]
    end = float(_LEFT)
    for seconds, label in _TIMELINE_TICKS:
        x = place(seconds)
        if x > _TIMELINE_WIDTH - _RIGHT:
            break
        if x - end >= _MIN_TICK_GAP:
            end = x
            parts.append(
                Markup(
                    '<path class="axis" d="M{0:.1f} {1}V{2}"/>'
                    '<text class="tick" x="{0:.1f}" y="14">{3}</text>'
                ).format(x, _TOP - 6, height, label)
            )
    for number, line in enumerate(shown):
        parts.append(_draw_line(line, began, place, _TOP + _LINE * number + _LINE / 2))
    return Markup(
        '<svg class="timeline" viewBox="0 0 {} {}" role="img"><title>{}</title>{}</svg>'
    ).format(_TIMELINE_WIDTH, height + 4, title, Markup("").join(parts))


def _draw_line(line: TimelineLine, began: datetime, place: Any, y: float) -> Markup:
    name = line.name if len(line.name) <= _MAX_LABEL else f"{line.name[: _MAX_LABEL - 1]}…"
    parts = [
        Markup('<text class="name" x="0" y="{:.1f}">{}</text>').format(y + 4, name),
        Markup('<path class="axis" d="M{} {:.1f}H{}"/>').format(_LEFT, y, _TIMELINE_WIDTH - _RIGHT),
    ]
    for step in line.steps:
        after_s = _after_s(began, step)
        x = place(after_s)
        if step["kind"] == LogKind.ATTEMPTED and step["latency_ms"]:
            start = place(after_s - step["latency_ms"] / 1000)
            parts.append(
                Markup(
                    '<rect class="took" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="6"/>'
                ).format(start, y - 3, max(1.0, x - start))
            )
        label = f"{step['kind']} +{after_s:.3f} s"
        parts.append(_mark(step_kind(step), x, y, label))
    return Markup("").join(parts)


def _mark(kind: str, x: float, y: float, label: str) -> Markup:
    shapes = {
        "good": "M{0:.1f} {1:.1f}m-5 0a5 5 0 1 0 10 0a5 5 0 1 0-10 0",
        "bad": "M{0:.1f} {1:.1f}m-4.5-4.5h9v9h-9z",
        "warn": "M{0:.1f} {1:.1f}m0-5 5 9h-10z",
        "busy": "M{0:.1f} {1:.1f}m0-5 5 5-5 5-5-5z",
        "off": "M{0:.1f} {1:.1f}m-5-1.5h10v3h-10z",
    }
    return Markup('<path class="mark {}" d="{}"><title>{}</title></path>').format(
        kind, shapes[kind].format(x, y), label
    )


def _after_s(began: datetime, step: Mapping[str, Any]) -> float:
    return (datetime.fromisoformat(step["ts"]) - began).total_seconds()
