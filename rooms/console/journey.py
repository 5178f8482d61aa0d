"""Draw the journey of a message: a line for each subscription, and each step at its time.

Time is logarithmic from the publish on, because milliseconds matter at first and days later.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import log10
from typing import Any, Final

from markupsafe import Markup

from rooms.domain.state_machine import LogKind

MAX_LINES: Final = 12
"""So many subscriptions are drawn; the table has all."""
_WIDTH: Final = 900
_LEFT: Final = 190
_TOP: Final = 26
_LINE: Final = 26
_RIGHT: Final = 14
_UNIT_S: Final = 0.01
_MIN_SPAN_S: Final = 0.1
_MIN_TICK_GAP: Final = 64
_MAX_LABEL: Final = 26
_TICKS: Final = (
    (0.1, "100 ms"),
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
_GOOD: Final = frozenset({LogKind.DELIVERED, LogKind.PULL_ACKED, LogKind.HANDED_OVER})
_BAD: Final = frozenset({LogKind.SIDELINED, LogKind.EXPIRED, LogKind.NACKED})
_WAITS: Final = frozenset({LogKind.RETRY_SCHEDULED, LogKind.HELD, LogKind.LEASE_ENDED})
_ENDED: Final = frozenset({LogKind.CANCELLED, LogKind.DROPPED, LogKind.PURGED})
_MAX_GOOD_STATUS: Final = 299
_RANKS: Final = ("bad", "warn", "busy", "off", "good")


@dataclass(frozen=True, slots=True, kw_only=True)
class JourneyLine:
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


def worst_first(lines: Iterable[JourneyLine]) -> list[JourneyLine]:
    """Return lines by their last steps: failures, what waits, what is under way, successes."""
    return sorted(lines, key=lambda line: _RANKS.index(step_kind(line.steps[-1])))


def draw_journey(began: datetime, lines: Sequence[JourneyLine], title: str) -> Markup:
    """Return the timeline as SVG. `began`: when the message was published."""
    shown = lines[:MAX_LINES]
    last = max((_after_s(began, step) for line in shown for step in line.steps), default=0.0)
    span = log10(1 + max(last, _MIN_SPAN_S) / _UNIT_S)
    scale = (_WIDTH - _LEFT - _RIGHT) / span

    def place(after_s: float) -> float:
        return _LEFT + scale * log10(1 + max(0.0, after_s) / _UNIT_S)

    height = _TOP + _LINE * len(shown)
    parts: list[Markup] = [Markup('<text class="tick" x="{}" y="14">0 s</text>').format(_LEFT)]
    end = float(_LEFT)
    for seconds, label in _TICKS:
        x = place(seconds)
        if x > _WIDTH - _RIGHT:
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
        '<svg class="journey" viewBox="0 0 {} {}" role="img"><title>{}</title>{}</svg>'
    ).format(_WIDTH, height + 4, title, Markup("").join(parts))


def _draw_line(line: JourneyLine, began: datetime, place: Any, y: float) -> Markup:
    name = line.name if len(line.name) <= _MAX_LABEL else f"{line.name[: _MAX_LABEL - 1]}…"
    parts = [
        Markup('<text class="name" x="0" y="{:.1f}">{}</text>').format(y + 4, name),
        Markup('<path class="axis" d="M{} {:.1f}H{}"/>').format(_LEFT, y, _WIDTH - _RIGHT),
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
