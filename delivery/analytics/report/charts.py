"""Draw the charts of the report with Altair, as SVG that takes its text colour from the page.

Every colour has medium lightness, and text and lines use `currentColor`, so a chart works on light
and dark pages.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import altair as alt
import vl_convert

from delivery.analytics.report.data import (
    OUTCOMES,
    PERCENTILES,
    History,
    Retries,
    Row,
    SubscriptionNames,
)

WIDTH: Final = 760
_INK_PLACEHOLDER: Final = "#010203"
"""Replaced by `currentColor` after rendering."""
BLUE, AMBER, RED, GREEN, VIOLET, GREY, PINK = (
    "#3d84c6",
    "#d68f26",
    "#d5485a",
    "#2f9e6d",
    "#8c6bc1",
    "#8b95a5",
    "#c2478f",
)
BROWN: Final = "#7d5230"
SAND: Final = "#b8a26a"
_OUTCOME_COLOURS: Final = dict(
    zip(OUTCOMES, (BLUE, AMBER, GREEN, RED, VIOLET, GREY, BROWN, SAND, PINK), strict=True)
)
_PERCENTILE_COLOURS: Final = dict(zip(PERCENTILES, (GREEN, AMBER, RED), strict=True))
_KIND_COLOURS: Final = {"shared": RED, "single": AMBER, "chronic": GREY}
_CELL: Final = 22
_CLOCK: Final = (
    "utchours(datum.value) || utcminutes(datum.value) || utcseconds(datum.value) ? "
    "utcFormat(datum.value, utcseconds(datum.value) ? '%H:%M:%S' : '%H:%M') "
    ": utcFormat(datum.value, '%b %d')"
)
_FONT: Final = "Liberation Sans, Helvetica, Arial, sans-serif"
Point = dict[str, Any]


def history_chart(data: History) -> str:
    """Stack deliveries by outcome over the time of publish."""
    seen = [outcome for outcome in OUTCOMES if data.total(outcome)]
    points: list[Point] = []
    for bucket in data.buckets:
        low = 0
        for outcome in seen:
            high = low + bucket.outcomes[outcome]
            if high > low:
                at, until = _time(bucket.at), _time(bucket.at) + data.step_s * 1000
                points.append(
                    {"at": at, "until": until, "outcome": outcome, "low": low, "high": high}
                )
            low = high
    colour = alt.Color(
        "outcome:N",
        title=None,
        scale=_scale({outcome: _OUTCOME_COLOURS[outcome] for outcome in seen}),
        sort=seen,
    )
    # Stacked here, as Vega-Lite does not stack bars with two ends.
    chart = alt.Chart(_data(points)).mark_bar(strokeWidth=0).encode(
        x=_time_axis("at"), x2="until:T", color=colour, y2="high:Q",
        y=alt.Y("low:Q", title=f"deliveries in {duration_text(data.step_s)}"),
    )  # fmt: skip
    return to_svg(chart.properties(width=WIDTH, height=240))


def latency_chart(data: History) -> str:
    """Plot percentiles of the time from publish to delivery."""
    points = [
        {"at": _time(bucket.at), "share": name, "s": seconds}
        for bucket in data.buckets
        for name, seconds in bucket.latency_s.items()
    ]
    colour = alt.Color(
        "share:N", title=None, scale=_scale(_PERCENTILE_COLOURS), sort=list(PERCENTILES)
    )
    chart = (
        alt.Chart(_data(points))
        .mark_line(strokeWidth=1.8, point=alt.OverlayMarkDef(size=14))
        .encode(
            x=_time_axis("at"),
            y=alt.Y("s:Q", scale=alt.Scale(type="log"), title="seconds to delivery (log)"),
            color=colour,
        )
    )
    return to_svg(chart.properties(width=WIDTH, height=220))


def incident_timeline(names: SubscriptionNames) -> str:
    """Draw incidents as bars, one row a subscription."""
    shown = names.in_incidents()
    labels = {one.id: one.label for one in shown}
    points = [
        {
            "subscription": labels[one],
            "began": _time(incident["began"]),
            "ended": _time(incident["ended"]),
            "kind": incident["kind"],
        }
        for incident in names.incidents
        for one in incident["subscriptions"]
        if one in labels
    ]
    kinds = {
        kind: colour
        for kind, colour in _KIND_COLOURS.items()
        if any(point["kind"] == kind for point in points)
    }
    chart = (
        alt.Chart(_data(points))
        .mark_bar(cornerRadius=2, height=alt.RelativeBandSize(0.62))
        .encode(
            x=_time_axis("began"),
            x2="ended:T",
            y=alt.Y("subscription:N", sort=list(labels.values()), title=None),
            color=alt.Color("kind:N", title=None, scale=_scale(kinds), sort=list(kinds)),
        )
    )
    return to_svg(chart.properties(width=WIDTH - 140, height=alt.Step(_CELL)))


def cofailure_heatmap(names: SubscriptionNames) -> str:
    """Draw pairs by their share of common bad minutes; a dot marks significant pairs."""
    shown = names.in_pairs()
    labels = {one.id: one.label for one in shown}
    points: list[Point] = []
    for pair in names.pairs:
        first, second = labels.get(pair["first_id"]), labels.get(pair["second_id"])
        if first is not None and second is not None:
            for x, y in ((first, second), (second, first)):
                points.append(
                    {
                        "x": x,
                        "y": y,
                        "shared": pair["jaccard"],
                        "significant": bool(pair["significant"]),
                    }
                )
    order = list(labels.values())
    base = alt.Chart(_data(points)).encode(
        x=alt.X("x:N", sort=order, title=None, axis=alt.Axis(labelAngle=-50)),
        y=alt.Y("y:N", sort=order, title=None),
    )
    opacity = alt.Opacity(
        "shared:Q", title="bad minutes shared", scale=alt.Scale(domain=[0, 1], range=[0.06, 1]),
        legend=alt.Legend(
            format="%", values=[0, 0.25, 0.5, 0.75, 1],
            symbolType="square", symbolFillColor=RED, symbolStrokeWidth=0,
        ),
    )  # fmt: skip
    cells = base.mark_rect(color=RED, cornerRadius=2).encode(opacity=opacity)
    dots = base.transform_filter("datum.significant").mark_point(
        shape="circle", filled=True, size=18, color=_INK_PLACEHOLDER, opacity=0.9
    )
    return to_svg((cells + dots).properties(width=alt.Step(_CELL), height=alt.Step(_CELL)))


def success_chart(retries: Retries) -> str:
    """Draw the success rate by attempt number, with its 95 % interval."""
    points = [
        {
            "attempt": step.attempt,
            "share": step.share,
            "low": step.low,
            "high": step.high,
            "n": step.attempts,
        }
        for step in retries.attempts
    ]
    base = alt.Chart(_data(points)).encode(
        x=alt.X(
            "attempt:O",
            title="attempt number (0: the first attempt)",
            axis=alt.Axis(labelAngle=0),
        )
    )
    scale = alt.Scale(domain=[0, 1])
    bars = base.mark_bar(color=BLUE, width=alt.RelativeBandSize(0.55), cornerRadiusEnd=2).encode(
        y=alt.Y("share:Q", scale=scale, axis=alt.Axis(format="%"), title="attempts that succeed")
    )
    # The interval is the sampling error of the share; it does not predict future rates.
    rules = base.mark_rule(color=_INK_PLACEHOLDER, strokeWidth=1.4, opacity=0.75).encode(
        y="low:Q", y2="high:Q"
    )
    counts = base.mark_text(dy=-8, fontSize=11, color=_INK_PLACEHOLDER).encode(
        y="high:Q", text=alt.Text("n:Q", format=",")
    )
    return to_svg((bars + rules + counts).properties(width=WIDTH // 2 - 60, height=240))


def policy_front_chart(advice: Row, policies: Sequence[Row]) -> str:
    """Draw the Pareto front of retry policies, with the deployed and the recommended one marked."""
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
    y = alt.Y(
        "delivered:Q",
        scale=alt.Scale(zero=False, padding=18),
        axis=alt.Axis(format=".1%"),
        title="delivered",
    )
    colour = alt.Color(
        "wait:Q", title="mean wait, s",
        scale=alt.Scale(type="log", range=[GREEN, AMBER, RED], interpolate="hcl"),
        legend=alt.Legend(gradientLength=110),
    )  # fmt: skip
    front = (
        alt.Chart(_data(points))
        .mark_point(filled=True, size=52, opacity=0.85)
        .encode(x=x, y=y, color=colour)
    )
    rings = (
        alt.Chart(_data(marked))
        .mark_point(size=190, strokeWidth=2, color=_INK_PLACEHOLDER, filled=False)
        .encode(x=x, y=y)
    )
    names = [
        alt.Chart(_data([point]))
        .mark_text(
            dy=point["dy"], align="center", fontSize=11.5, fontWeight="bold", color=_INK_PLACEHOLDER
        )
        .encode(x=x, y=y, text="which:N")
        for point in marked
    ]
    return to_svg(alt.layer(front, rings, *names).properties(width=WIDTH // 2 - 60, height=240))


def to_svg(chart: Any) -> str:
    """Render the chart as SVG with text and lines in `currentColor`."""
    subdued = {
        "labelColor": _INK_PLACEHOLDER,
        "titleColor": _INK_PLACEHOLDER,
        "labelFontSize": 11,
        "titleFontSize": 11.5,
        "titleFontWeight": "normal",
    }
    axis = {
        **subdued,
        "gridColor": _INK_PLACEHOLDER,
        "gridOpacity": 0.13,
        "domainColor": _INK_PLACEHOLDER,
        "domainOpacity": 0.4,
        "tickColor": _INK_PLACEHOLDER,
        "tickOpacity": 0.4,
        "labelLimit": 260,
    }
    styled = (
        chart.configure(background="transparent", font=_FONT)
        .configure_view(strokeWidth=0)
        .configure_axis(**axis)
    )
    styled = styled.configure_axisX(grid=False).configure_legend(
        **subdued, symbolType="square", labelLimit=260
    )
    drawn = str(vl_convert.vegalite_to_svg(styled.to_dict()))
    return re.sub(rf'"{_INK_PLACEHOLDER}"', '"currentColor"', drawn)


def duration_text(seconds: int) -> str:
    """Format a duration in words."""
    for unit, name in ((86_400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= unit:
            count = seconds // unit
            return (
                f"a {name}"
                if count == 1 and name != "hour"
                else "an hour"
                if count == 1
                else f"{count} {name}s"
            )
    return "a second" if seconds == 1 else f"{seconds} seconds"


def _data(points: Sequence[Mapping[str, Any]]) -> Any:
    return alt.InlineData(values=list(points))


def _scale(colours: Mapping[str, str]) -> Any:
    return alt.Scale(domain=list(colours), range=list(colours.values()))


def _time_axis(field: str) -> Any:
    axis = alt.Axis(labelOverlap=True, labelExpr=_CLOCK)
    return alt.X(f"{field}:T", title="UTC", scale=alt.Scale(type="utc"), axis=axis)


def _time(at: datetime) -> int:
    return round(at.timestamp() * 1000)
