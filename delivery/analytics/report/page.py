"""Build the report page, one HTML file without scripts and external resources, and its PNG.

First comes what fails now, then the worst of the period, then pictures, then each subscription.
"""

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from html import escape
from importlib import resources
from string import Template
from typing import Any, Final, Protocol

import vl_convert

from delivery.analytics.report import captions, charts, sections
from delivery.analytics.report.data import (
    MAX_SECTIONS,
    ColumnBatch,
    History,
    HourlyFailures,
    Retries,
    Subscriber,
    SubscriptionNames,
    read_history,
    read_hourly_failures,
    read_retries,
    read_subscription_names,
)
from delivery.analytics.report.formats import time_text
from delivery.analytics.report.live import LiveStatus, Names
from delivery.analytics.report.outages import by_cost, confirm_open
from delivery.analytics.results.reader import (
    Reconciliation,
    oldest_first,
    read_reconciliation,
)
from rooms.domain.usage import UsageRow
from rooms.safe_text import terminal_safe

_TILES: Final = (
    "fanout",
    "delivered",
    "acked",
    "sidelined",
    "expired",
    "waiting",
    "stuck",
    "unknown",
    "duplicates",
    "missing",
)
_MAX_AGES: Final = 50
"""Rows of open deliveries."""

_LINKS: Final = (
    ("now", "Now"),
    ("worst", "The worst"),
    ("pictures", "Pictures"),
    ("subscriptions", "Subscriptions"),
)


class ReportTables(Protocol):
    """Read the tables of one run."""

    @property
    def run(self) -> int: ...

    @property
    def at(self) -> datetime: ...

    @property
    def findings_at(self) -> datetime | None:
        """Return the time of incidents and retry advice; None if there are none yet."""
        ...

    @property
    def set_aside(self) -> Sequence[Mapping[str, Any]]:
        """Return segments that were not read."""
        ...

    @property
    def set_aside_total(self) -> int: ...

    def rows(self, table: str) -> Sequence[Mapping[str, Any]]:
        """Return the rows of a small table."""
        ...

    def each_row(
        self, table: str, columns: Sequence[str] | None = None
    ) -> Iterator[Mapping[str, Any]]:
        """Yield the rows of a table that grows with the log."""
        ...

    def batches(self, table: str, columns: Sequence[str]) -> Iterator[ColumnBatch]:
        """Return a large table in batches."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Hold what the tables do not: names, usage, and the present state by a running service."""

    names: Mapping[str, Names]
    usage: Sequence[UsageRow] = ()
    live: LiveStatus | None = None


NOTHING_ELSE: Final = Surroundings(names={})


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Hold a chart with its title and caption; `chart` is None if there is nothing to draw."""

    name: str
    title: str
    chart: str | None
    caption: str
    wide: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class HtmlReport:
    """Write the complete report."""

    run: int
    at: datetime
    findings_at: datetime | None
    reconciliation: Reconciliation
    history: History
    names: SubscriptionNames
    retries: Retries
    hourly: HourlyFailures | None
    around: Surroundings
    ages: Sequence[Mapping[str, Any]] = ()
    set_aside: Sequence[Mapping[str, Any]] = ()
    set_aside_total: int = 0

    @classmethod
    def from_tables(cls, tables: ReportTables, around: Surroundings = NOTHING_ELSE) -> "HtmlReport":
        """Read the tables of one run."""
        history = read_history(lambda columns: tables.batches("journeys", columns), tables.at)
        known = {**(around.live.names if around.live else {}), **around.names}
        names = read_subscription_names(tables.rows, tables.each_row, known, history.log_end)
        if around.live is not None:
            failing = frozenset(one["subscription_id"] for one in around.live.failing)
            names = replace(names, outages=confirm_open(names.outages, failing))
        return cls(
            run=tables.run,
            at=tables.at,
            findings_at=tables.findings_at,
            reconciliation=read_reconciliation(
                tables.each_row, is_incomplete=tables.set_aside_total > 0
            ),
            history=history,
            names=names,
            retries=read_retries(tables.rows, tables.each_row),
            hourly=read_hourly_failures(
                lambda columns: tables.batches("rollups_hourly", columns),
                [one.id for one in names.worst(MAX_SECTIONS)],
                tables.at,
            ),
            around=around,
            ages=oldest_first(tables.rows("ages"))[:_MAX_AGES],
            set_aside=tables.set_aside,
            set_aside_total=tables.set_aside_total,
        )

    def figures(self) -> Iterator[Figure]:
        """Return every figure in order."""
        past, names, retries = self.history, self.names, self.retries
        yield Figure(
            name="history", title="Deliveries over time", caption=captions.history_caption(past),
            chart=charts.history_chart(past) if past.total() else None,
        )  # fmt: skip
        yield Figure(
            name="latency", title="Time from publish to delivery: p50, p95, p99",
            caption=captions.latency_caption(past),
            chart=charts.latency_chart(past) if past.worst_bucket("p99") else None,
        )  # fmt: skip
        yield Figure(
            name="outages", title="Outages over time", caption=captions.timeline_caption(names),
            chart=charts.outage_timeline(names) if names.outages else None,
        )  # fmt: skip
        yield Figure(
            name="cofailures", title="Subscriptions that fail together",
            caption=captions.cofailure_caption(names),
            chart=charts.cofailure_heatmap(names) if names.pairs else None,
        )  # fmt: skip
        yield Figure(
            name="success", title="Success rate by attempt number",
            caption=captions.success_caption(retries),
            chart=charts.success_chart(retries) if retries.attempts else None, wide=False,
        )  # fmt: skip
        if not retries.drawn_advice:
            no_advice = (
                "There is no recommendation: too few deliveries failed, no policy is surely "
                "better, or no replay reproduces the measured results."
            )
            yield Figure(
                name="advice",
                title="Recommended retry policy",
                chart=None,
                caption=no_advice,
                wide=False,
            )
        for number, advice in enumerate(retries.drawn_advice, 1):
            yield Figure(
                name=f"advice-{number}",
                title=f"Retries of {names.label(advice['subscription_id'])}",
                caption=f"{captions.advice_caption(advice, names)} "
                "Each point is a policy that no other policy beats.", wide=False,
                chart=charts.policy_front_chart(
                    advice, retries.fronts[advice["subscription_id"]]
                ),
            )  # fmt: skip

    def html(self) -> str:
        """Return the HTML file."""
        outages = self.names.outages
        body = (
            sections.now_section(self.names, self.around.live, self.history.log_end),
            sections.worst_section(by_cost(outages), self.names),
            "<section id='pictures'><h2>Pictures</h2><div class='figures'>",
            *(_figure_html(figure) for figure in self.figures()),
            "</div></section>",
            sections.directory_section(self.names),
            "<div class='columns'>",
            *(self._subscription_html(one) for one in self.names.worst(MAX_SECTIONS)),
            "</div>",
            sections.ages_section(self.ages, self.names),
            sections.usage_section(self.around.usage),
        )
        return self._page(
            "Delivery report",
            "".join(body),
            tiles="".join(self._tile_html()),
            verdict=captions.reconciliation_caption(self.reconciliation),
        )

    def subscription_html(self, identity: str) -> str | None:
        """Return a page about one subscription, or None if the analysis does not know it."""
        found = self.names.subscribers.get(identity)
        if found is None:
            return None
        live = sections.troubled_of(self.around.live, identity)
        body = sections.now_of_subscription(live, self.around.live, self.names, identity)
        return self._page(found.label, body + self._subscription_html(found, back_link=False))

    def _subscription_html(self, one: Subscriber, *, back_link: bool = True) -> str:
        return sections.subscription_section(
            one,
            self.names,
            self.hourly,
            next((row for row in self.retries.advice if row["subscription_id"] == one.id), None),
            back_link=back_link,
        )

    def _page(self, title: str, body: str, *, tiles: str = "", verdict: str | None = None) -> str:
        template = Template(
            resources.files("delivery.analytics.report")
            .joinpath("page.html")
            .read_text(encoding="utf-8")
        )
        balanced = self.reconciliation.is_balanced
        mark, kind = ("✓", "well") if balanced else ("✕", "wrong")
        said = (
            "" if verdict is None else f"<p class='{kind}'>{mark} {sections.html_text(verdict)}</p>"
        )
        end = self.history.log_end
        links = "".join(f"<a href='#{anchor}'>{text}</a>" for anchor, text in _LINKS)
        return template.substitute(
            nav=tiles and f"<nav aria-label='Sections'>{links}</nav>",
            title=escape(title),
            run=self.run,
            at=f"{self.at:%Y-%m-%d %H:%M:%S}",
            findings=captions.findings_caption(self.at, self.findings_at),
            period="" if end is None else f" The log ends at {time_text(end)}.",
            verdict=said,
            aside=self._aside_html(),
            tiles=tiles and f"<div class='tiles'>{tiles}</div>",
            body=body,
        )

    def _aside_html(self) -> str:
        """Return the segments that were not read; empty if there are none."""
        lines = captions.set_aside_caption(self.set_aside, self.set_aside_total).splitlines()
        said = "".join(f"<li>{sections.html_text(line)}</li>" for line in lines)
        return f'<ul id="aside" class="wrong">{said}</ul>' if said else ""

    def _tile_html(self) -> Iterator[str]:
        totals = self.reconciliation.describe()
        for name in (*_TILES, "lost"):
            if totals.get(name) or name in {"fanout", "delivered", "lost"}:
                label = "expected deliveries" if name == "fanout" else name
                yield f"<div><b>{totals.get(name, 0):,}</b>{label}</div>"


def _figure_html(figure: Figure) -> str:
    said = "".join(f"<p>{sections.html_text(line)}</p>" for line in figure.caption.splitlines())
    title = sections.html_text(figure.title)
    drawn = (
        ""
        if figure.chart is None
        else f'<div class="chart" role="img" tabindex="0" aria-label="{title}">{figure.chart}</div>'
    )
    size = "wide" if figure.wide else "half"
    return (
        f'<figure id="{figure.name}" class="{size}"><h3>{title}</h3>{drawn}'
        f"<figcaption>{said}</figcaption></figure>"
    )


_SIZE: Final = re.compile(r'<svg [^>]*?width="([\d.]+)" height="([\d.]+)"')
_WIDTH: Final = 1000
_MARGIN: Final = 28
_LINE: Final = 19
_CAPTION_WIDTH: Final = 132
"""Characters in a line of a caption."""
_FONT: Final = "Liberation Sans, Helvetica, Arial, sans-serif"


def render_png(figures: Iterable[Figure], *, scale: float = 1.0) -> bytes:
    """Render the figures that have a chart, one below the other, with title and caption."""
    parts: list[str] = []
    y = float(_MARGIN)
    for figure in figures:
        size = None if figure.chart is None else _SIZE.search(figure.chart)
        if figure.chart is None or size is None:
            continue
        width, height = map(float, size.groups())
        parts.append(_svg_text(figure.title, y + 16, size=19, weight="bold", colour="#1d2530"))
        y += 30
        shrunk = min(1.0, (_WIDTH - 2 * _MARGIN) / width)
        parts.append(
            f'<g transform="translate({_MARGIN} {y}) scale({shrunk})" color="#1d2530">'
            f"{figure.chart}</g>"
        )
        y += height * shrunk + 8
        for line in (
            part
            for said in figure.caption.splitlines()
            for part in textwrap.wrap(said, _CAPTION_WIDTH)
        ):
            parts.append(_svg_text(line, y + 14, size=14, weight="normal", colour="#5a6675"))
            y += _LINE
        y += 26
    body = f'<rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}'
    drawn = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{round(y)}">{body}</svg>'
    )
    return bytes(vl_convert.svg_to_png(drawn, scale=scale))


def _svg_text(text: str, y: float, *, size: int, weight: str, colour: str) -> str:
    attributes = (
        f'x="{_MARGIN}" y="{y}" font-family="{_FONT}" font-size="{size}" '
        f'font-weight="{weight}" fill="{colour}"'
    )
    return f"<text {attributes}>{escape(terminal_safe(text))}</text>"
