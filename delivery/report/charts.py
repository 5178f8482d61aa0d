"""Charts: what the report draws, by Altair, as SVG that takes its ink from the page around it.

Every colour is of middle lightness, and text and lines are drawn in `currentColor`: the same drawing is read on a light
page and on a dark one.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import altair as alt
import vl_convert

from delivery.report.company import Company, Row
from delivery.report.history import FATES, SHARES, History
from delivery.report.retries import Retries

WIDTH: Final = 760
_INK: Final = "#010203"
"""Stands for the page's own colour until the drawing is done."""
BLUE, AMBER, RED, GREEN, VIOLET, GREY, PINK = (
    "#3d84c6",
    "#d68f26",
    "#d5485a",
    "#2f9e6d",
    "#8c6bc1",
    "#8b95a5",
    "#c2478f",
)
_FATES: Final = dict(zip(FATES, (BLUE, AMBER, GREEN, RED, VIOLET, GREY, PINK), strict=True))
_SHARES: Final = dict(zip(SHARES, (GREEN, AMBER, RED), strict=True))
_KINDS: Final = {"shared": RED, "single": AMBER, "chronic": GREY}
_CELL: Final = 22
_CLOCK: Final = (
    "utchours(datum.value) || utcminutes(datum.value) || utcseconds(datum.value) ? "
    "utcFormat(datum.value, utcseconds(datum.value) ? '%H:%M:%S' : '%H:%M') : utcFormat(datum.value, '%b %d')"
)
_FONT: Final = "Liberation Sans, Helvetica, Arial, sans-serif"
Point = dict[str, Any]


def history(told: History) -> str:
    """Deliveries by the time of their publish, stacked by what became of them."""
    seen = [fate for fate in FATES if told.total(fate)]
    points: list[Point] = []
    for moment in told.moments:
        low = 0
        for fate in seen:
            high = low + moment.fates[fate]
            if high > low:
                at, until = _time(moment.at), _time(moment.at) + told.step_s * 1000
                points.append({"at": at, "until": until, "fate": fate, "low": low, "high": high})
            low = high
    colour = alt.Color("fate:N", title=None, scale=_scale({fate: _FATES[fate] for fate in seen}), sort=seen)
    # Stacked here: Vega-Lite does not stack bars that have two ends.
    chart = alt.Chart(_data(points)).mark_bar(strokeWidth=0).encode(
        x=_when("at"), x2="until:T", color=colour, y2="high:Q",
        y=alt.Y("low:Q", title=f"deliveries in {span(told.step_s)}"),
    )  # fmt: skip
    return svg(chart.properties(width=WIDTH, height=240))


def latency(told: History) -> str:
    """Percentiles of the time from publish to delivery."""
    points = [
        {"at": _time(moment.at), "share": name, "s": took}
        for moment in told.moments
        for name, took in moment.took_s.items()
    ]
    colour = alt.Color("share:N", title=None, scale=_scale(_SHARES), sort=list(SHARES))
    chart = (
        alt.Chart(_data(points))
        .mark_line(strokeWidth=1.8, point=alt.OverlayMarkDef(size=14))
        .encode(
            x=_when("at"), y=alt.Y("s:Q", scale=alt.Scale(type="log"), title="seconds to delivery (log)"), color=colour
        )
    )
    return svg(chart.properties(width=WIDTH, height=220))


def timeline(told: Company) -> str:
    """Incidents as bars, a row a subscription."""
    shown = told.failing()
    labels = {one.id: one.label for one in shown}
    points = [
        {
            "subscription": labels[one],
            "began": _time(incident["began"]),
            "ended": _time(incident["ended"]),
            "kind": incident["kind"],
        }
        for incident in told.incidents
        for one in incident["subscriptions"]
        if one in labels
    ]
    kinds = {kind: colour for kind, colour in _KINDS.items() if any(point["kind"] == kind for point in points)}
    chart = (
        alt.Chart(_data(points))
        .mark_bar(cornerRadius=2, height=alt.RelativeBandSize(0.62))
        .encode(
            x=_when("began"),
            x2="ended:T",
            y=alt.Y("subscription:N", sort=list(labels.values()), title=None),
            color=alt.Color("kind:N", title=None, scale=_scale(kinds), sort=list(kinds)),
        )
    )
    return svg(chart.properties(width=WIDTH - 140, height=alt.Step(_CELL)))


def heat(told: Company) -> str:
    """Pairs by how many of their bad minutes they share; those that chance does not explain with a dot."""
    shown = told.paired()
    labels = {one.id: one.label for one in shown}
    points: list[Point] = []
    for pair in told.pairs:
        first, second = labels.get(pair["first_id"]), labels.get(pair["second_id"])
        if first is not None and second is not None:
            for x, y in ((first, second), (second, first)):
                points.append({"x": x, "y": y, "shared": pair["jaccard"], "significant": bool(pair["significant"])})
    order = list(labels.values())
    base = alt.Chart(_data(points)).encode(
        x=alt.X("x:N", sort=order, title=None, axis=alt.Axis(labelAngle=-50)),
        y=alt.Y("y:N", sort=order, title=None),
    )
    opacity = alt.Opacity(
        "shared:Q", title="bad minutes shared", scale=alt.Scale(domain=[0, 1], range=[0.06, 1]),
        legend=alt.Legend(format="%", values=[0, 0.25, 0.5, 0.75, 1], symbolType="square", symbolFillColor=RED, symbolStrokeWidth=0),
    )  # fmt: skip
    cells = base.mark_rect(color=RED, cornerRadius=2).encode(opacity=opacity)
    dots = base.transform_filter("datum.significant").mark_point(
        shape="circle", filled=True, size=18, color=_INK, opacity=0.9
    )
    return svg((cells + dots).properties(width=alt.Step(_CELL), height=alt.Step(_CELL)))


def hazard(told: Retries) -> str:
    """The share of attempts that succeed, by their number, with its 95 % interval."""
    points = [
        {"attempt": step.attempt, "share": step.share, "low": step.low, "high": step.high, "n": step.attempts}
        for step in told.steps
    ]
    base = alt.Chart(_data(points)).encode(
        x=alt.X("attempt:O", title="number of the attempt (0: the first try)", axis=alt.Axis(labelAngle=0))
    )
    scale = alt.Scale(domain=[0, 1])
    bars = base.mark_bar(color=BLUE, width=alt.RelativeBandSize(0.55), cornerRadiusEnd=2).encode(
        y=alt.Y("share:Q", scale=scale, axis=alt.Axis(format="%"), title="attempts that succeed")
    )
    # The interval is the sampling error of the share; it says nothing about tomorrow's endpoint.
    rules = base.mark_rule(color=_INK, strokeWidth=1.4, opacity=0.75).encode(y="low:Q", y2="high:Q")
    counts = base.mark_text(dy=-8, fontSize=11, color=_INK).encode(y="high:Q", text=alt.Text("n:Q", format=","))
    return svg((bars + rules + counts).properties(width=WIDTH // 2 - 60, height=240))


def front(advice: Row, policies: Sequence[Row]) -> str:
    """Policies that no other one beats: delivered against attempts, coloured by the wait; what is set and what would be better."""
    points = [
        {
            "attempts": row["expected_attempts"],
            "delivered": row["expected_delivered"],
            "wait": max(row["expected_mean_wait_s"], 0.01),
        }
        for row in policies
    ]
    marked = [
        {
            "attempts": advice[f"{which}_attempts"],
            "delivered": advice[f"{which}_delivered"],
            "which": name,
            "dy": -14 if which == "recommended" else 16,
        }
        for which, name in (("measured", "as set now"), ("recommended", "recommended"))
    ]
    x = alt.X("attempts:Q", scale=alt.Scale(zero=False, padding=24), title="attempts a delivery")
    y = alt.Y("delivered:Q", scale=alt.Scale(zero=False, padding=18), axis=alt.Axis(format=".1%"), title="delivered")
    colour = alt.Color(
        "wait:Q", title="mean wait, s",
        scale=alt.Scale(type="log", range=[GREEN, AMBER, RED], interpolate="hcl"),
        legend=alt.Legend(gradientLength=110),
    )  # fmt: skip
    all_of_them = alt.Chart(_data(points)).mark_point(filled=True, size=52, opacity=0.85).encode(x=x, y=y, color=colour)
    rings = alt.Chart(_data(marked)).mark_point(size=190, strokeWidth=2, color=_INK, filled=False).encode(x=x, y=y)
    names = [
        alt.Chart(_data([point]))
        .mark_text(dy=point["dy"], align="center", fontSize=11.5, fontWeight="bold", color=_INK)
        .encode(x=x, y=y, text="which:N")
        for point in marked
    ]
    return svg(alt.layer(all_of_them, rings, *names).properties(width=WIDTH // 2 - 60, height=240))


def svg(chart: Any) -> str:
    """The drawing. Its text and lines are in `currentColor`."""
    quiet = {
        "labelColor": _INK,
        "titleColor": _INK,
        "labelFontSize": 11,
        "titleFontSize": 11.5,
        "titleFontWeight": "normal",
    }
    axis = {**quiet, "gridColor": _INK, "gridOpacity": 0.13, "domainColor": _INK, "domainOpacity": 0.4, "tickColor": _INK, "tickOpacity": 0.4, "labelLimit": 260}  # fmt: skip
    styled = chart.configure(background="transparent", font=_FONT).configure_view(strokeWidth=0).configure_axis(**axis)
    styled = styled.configure_axisX(grid=False).configure_legend(**quiet, symbolType="square", labelLimit=260)
    drawn = str(vl_convert.vegalite_to_svg(styled.to_dict()))
    return re.sub(rf'"{_INK}"', '"currentColor"', drawn)


def span(seconds: int) -> str:
    """A step of time in words."""
    for unit, name in ((86_400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= unit:
            count = seconds // unit
            return f"a {name}" if count == 1 and name != "hour" else "an hour" if count == 1 else f"{count} {name}s"
    return "a second" if seconds == 1 else f"{seconds} seconds"


def _data(points: Sequence[Mapping[str, Any]]) -> Any:
    return alt.InlineData(values=list(points))


def _scale(colours: Mapping[str, str]) -> Any:
    return alt.Scale(domain=list(colours), range=list(colours.values()))


def _when(field: str) -> Any:
    axis = alt.Axis(labelOverlap=True, labelExpr=_CLOCK)
    return alt.X(f"{field}:T", title="UTC", scale=alt.Scale(type="utc"), axis=axis)


def _time(at: datetime) -> int:
    return round(at.timestamp() * 1000)
