"""Draw the charts of the report with Altair, as SVG that takes its text colour from the page.

Every colour has medium lightness, and text and lines use `currentColor`, so a chart works on light
and dark pages. No colour has a meaning by itself: areas also differ by their hatching, lines by
dashes and marks, and cells have numbers.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
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
from delivery.analytics.report.formats import step_text

WIDTH: Final = 850
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
_HATCHINGS: Final = {
    AMBER: '<path d="M-2,2 l4,-4 M0,8 l8,-8 M6,10 l4,-4" stroke-width="1.6"/>',
    GREEN: '<circle cx="2" cy="2" r="1.1"/><circle cx="6" cy="6" r="1.1"/>',
    RED: '<path d="M0,0 l8,8 M0,8 l8,-8" stroke-width="1.2"/>',
    VIOLET: '<path d="M0,2 h8 M0,6 h8" stroke-width="1.2"/>',
    GREY: '<path d="M2,0 v8 M6,0 v8" stroke-width="1.2"/>',
    BROWN: '<path d="M0,0 l8,8" stroke-width="1.6"/>',
    SAND: '<circle cx="4" cy="4" r="2.4"/>',
    PINK: '<path d="M0,4 h8 M4,0 v8" stroke-width="1.6"/>',
}
"""Of areas by their colour; blue has none."""
_OUTCOME_COLOURS: Final = dict(
    zip(OUTCOMES, (BLUE, AMBER, GREEN, RED, VIOLET, GREY, BROWN, SAND, PINK), strict=True)
)
_PERCENTILE_COLOURS: Final = dict(zip(PERCENTILES, (BLUE, AMBER, RED), strict=True))
_PERCENTILE_DASHES: Final = ([1, 0], [6, 3], [2, 2])
_PERCENTILE_MARKS: Final = ("circle", "square", "triangle-up")
_KIND_COLOURS: Final = {"shared": RED, "single": AMBER, "chronic": GREY}
_EXTRA_WIDTH: Final = 1.3
"""Pixels left free for each character of a label."""
_CELL: Final = 22
_CLOCK: Final = (
    "utchours(datum.value) || utcminutes(datum.value) || utcseconds(datum.value) ? "
    "utcFormat(datum.value, utcseconds(datum.value) ? '%H:%M:%S' : '%H:%M') "
    ": utcFormat(datum.value, '%b %d')"
)
_SECONDS: Final = (
    "datum.value >= 86400 ? format(datum.value / 86400, '~r') + ' d' "
    ": datum.value >= 3600 ? format(datum.value / 3600, '.2~r') + ' h' "
    ": datum.value >= 60 ? format(datum.value / 60, '.2~r') + ' min' "
    ": datum.value >= 1 ? format(datum.value, '~r') + ' s' "
    ": format(datum.value * 1000, '~r') + ' ms'"
)
_TICKS_S: Final = (0.001, 0.01, 0.1, 1, 10, 60, 600, 3600, 6 * 3600, 86_400, 864_000)
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
        y=alt.Y("low:Q", title=f"deliveries in {step_text(data.step_s)}"),
    )  # fmt: skip
    return to_svg(chart.properties(width=WIDTH, height=240), hatched=("history", _HATCHINGS))


def latency_chart(data: History) -> str:
    """Plot percentiles of the time from publish to delivery."""
    points = [
        {"at": _time(bucket.at), "share": name, "s": seconds}
        for bucket in data.buckets
        for name, seconds in bucket.latency_s.items()
    ]
    order = list(PERCENTILES)
    legend = alt.Legend(symbolStrokeWidth=1.8, symbolSize=70)
    base = alt.Chart(_data(points)).encode(
        x=_time_axis("at"),
        y=alt.Y(
            "s:Q",
            scale=alt.Scale(type="log"),
            title="time to delivery",
            axis=alt.Axis(labelExpr=_SECONDS, values=list(_TICKS_S)),
        ),
        color=alt.Color(
            "share:N", title=None, scale=_scale(_PERCENTILE_COLOURS), sort=order, legend=legend
        ),
    )
    dashes = alt.Scale(domain=order, range=list(_PERCENTILE_DASHES))
    marks = alt.Scale(domain=order, range=list(_PERCENTILE_MARKS))
    lines = base.mark_line(strokeWidth=1.6).encode(
        strokeDash=alt.StrokeDash("share:N", title=None, scale=dashes, sort=order, legend=legend)
    )
    dots = base.mark_point(filled=True, size=24, opacity=0.9).encode(
        shape=alt.Shape("share:N", title=None, scale=marks, sort=order, legend=legend)
    )
    chart = lines + dots
    return to_svg(chart.properties(width=WIDTH, height=220))


def outage_timeline(names: SubscriptionNames) -> str:
    """Draw outages as bars, one row a subscription; an arrow marks those that go on."""
    shown = names.in_outages()
    labels = {one.id: one.label for one in shown}
    points = [
        {
            "subscription": labels[one],
            "began": _time(outage.began),
            "ended": _time(outage.ended),
            "kind": outage.kind,
            "open": outage.is_open or outage.went_on,
        }
        for outage in names.outages
        for one in outage.subscriptions
        if one in labels
    ]
    kinds = {
        kind: colour
        for kind, colour in _KIND_COLOURS.items()
        if any(point["kind"] == kind for point in points)
    }
    rows = alt.Y("subscription:N", sort=list(labels.values()), title=None)
    base = alt.Chart(_data(points))
    bars = base.mark_bar(cornerRadius=2, height=alt.RelativeBandSize(0.62)).encode(
        x=_time_axis("began"),
        x2="ended:T",
        y=rows,
        color=alt.Color("kind:N", title=None, scale=_scale(kinds), sort=list(kinds)),
    )
    open_ends = base.transform_filter("datum.open").mark_text(
        text="▶", align="left", dx=2, fontSize=12, color=_INK_PLACEHOLDER
    ).encode(x="ended:T", y=rows)  # fmt: skip
    chart = (bars + open_ends).properties(width=WIDTH - 180, height=alt.Step(_CELL))
    longest = max(map(len, labels.values()), default=0)
    return to_svg(chart, hatched=("outages", (AMBER, GREY)), longest_label=longest)


def cofailure_heatmap(names: SubscriptionNames) -> str:
    """Draw pairs by their share of common bad minutes; a frame marks significant pairs."""
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
                        "percent": pair["jaccard"] * 100,
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
    rings = base.transform_filter("datum.significant").mark_rect(
        filled=False, stroke=_INK_PLACEHOLDER, strokeWidth=1.2, cornerRadius=2
    )
    numbers = base.mark_text(fontSize=9, color=_INK_PLACEHOLDER).encode(
        text=alt.Text("percent:Q", format=".0f")
    )
    chart = (cells + rings + numbers).properties(width=alt.Step(_CELL), height=alt.Step(_CELL))
    return to_svg(chart, longest_label=max(map(len, order), default=0))


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
    return to_svg((bars + rules + counts).properties(width=WIDTH // 2 - 110, height=240))


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
        scale=alt.Scale(zero=False, domainMax=1.0, nice=False, padding=8),
        axis=alt.Axis(format=".1~%"),
        title="delivered",
    )
    decades = _decades([point["wait"] for point in points])
    size = alt.Size(
        "wait:Q",
        title="mean wait, s",
        scale=alt.Scale(type="log", range=[14, 160]),
        legend=alt.Legend(values=decades, symbolType="circle"),
    )
    front = (
        alt.Chart(_data(points))
        .mark_point(filled=True, opacity=0.55, color=BLUE)
        .encode(x=x, y=y, size=size)
    )
    rings = (
        alt.Chart(_data(marked))
        .mark_point(size=190, strokeWidth=2, color=_INK_PLACEHOLDER, filled=False)
        .encode(
            x=x,
            y=y,
            shape=alt.Shape("which:N", scale=alt.Scale(range=["diamond", "circle"]), legend=None),
        )
    )
    names = [
        alt.Chart(_data([point]))
        .mark_text(
            dy=point["dy"], align="center", fontSize=11.5, fontWeight="bold", color=_INK_PLACEHOLDER
        )
        .encode(x=x, y=y, text="which:N")
        for point in marked
    ]
    intervals = alt.Chart(_data(_ends(advice))).mark_rule(
        strokeWidth=1.4, strokeDash=[3, 2], color=_INK_PLACEHOLDER
    ).encode(x=alt.X("attempts:Q"), y=alt.Y("low:Q"), y2="high:Q")  # fmt: skip
    chart = alt.layer(front, intervals, rings, *names)
    return to_svg(chart.properties(width=WIDTH // 2 - 110, height=240))


def _ends(advice: Row) -> list[Point]:
    """Return the interval of the recommended policy's share; none of an earlier version."""
    low, high = (advice.get(f"recommended_delivered_{end}") for end in ("low", "high"))
    if low is None:
        return []
    return [{"attempts": advice["recommended_attempts"], "low": low, "high": high}]


def _decades(values: Sequence[float]) -> list[float]:
    """Return the powers of ten in the range of the values, four at most."""
    low, high = (round(math.log10(one)) for one in (min(values), max(values)))
    step = -(-(high - low + 1) // 4)
    return [float(10**power) for power in range(low, high + 1, step)]


def to_svg(
    chart: Any, *, hatched: tuple[str, Iterable[str]] | None = None, longest_label: int = 0
) -> str:
    """Render the chart as SVG with text and lines in `currentColor`.

    `longest_label`: characters of the longest label of a row.
    `hatched`: the name of the patterns, and the colours whose areas are hatched.
    """
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
    # Where this font is missing, texts are wider than Vega measures.
    padding = {"left": 5 + _EXTRA_WIDTH * longest_label, "top": 5, "right": 16, "bottom": 5}
    styled = (
        chart.configure(background="transparent", font=_FONT, padding=padding)
        .configure_view(strokeWidth=0)
        .configure_axis(**axis)
    )
    styled = styled.configure_axisX(grid=False).configure_legend(
        **subdued,
        symbolType="square",
        labelLimit=260,
        orient="top",
        symbolSize=130,
        columnPadding=26,
    )
    drawn = str(vl_convert.vegalite_to_svg(styled.to_dict()))
    drawn = re.sub(rf'"{_INK_PLACEHOLDER}"', '"currentColor"', drawn)
    return drawn if hatched is None else _with_hatching(drawn, *hatched)


def _with_hatching(drawn: str, name: str, colours: Iterable[str]) -> str:
    """Fill every area of these colours with the pattern of its colour."""
    patterns = []
    for number, colour in enumerate(colours):
        lines = _HATCHINGS[colour]
        if f'fill="{colour}"' not in drawn:
            continue
        identity = f"{name}-{number}"
        patterns.append(
            f'<pattern id="{identity}" width="8" height="8" patternUnits="userSpaceOnUse">'
            f'<rect width="8" height="8" fill="{colour.upper()}"/>'
            f'<g stroke="#fff" fill="#fff" stroke-opacity="0.75">{lines}</g></pattern>'
        )
        drawn = drawn.replace(f'fill="{colour}"', f'fill="url(#{identity})"')
    place = drawn.index(">", drawn.index("<svg")) + 1
    return f"{drawn[:place]}<defs>{''.join(patterns)}</defs>{drawn[place:]}"


def _data(points: Sequence[Mapping[str, Any]]) -> Any:
    return alt.InlineData(values=list(points))


def _scale(colours: Mapping[str, str]) -> Any:
    return alt.Scale(domain=list(colours), range=list(colours.values()))


def _time_axis(field: str) -> Any:
    axis = alt.Axis(labelOverlap="greedy", labelSeparation=10, labelExpr=_CLOCK)
    return alt.X(f"{field}:T", title="UTC", scale=alt.Scale(type="utc"), axis=axis)


def _time(at: datetime) -> int:
    return round(at.timestamp() * 1000)
