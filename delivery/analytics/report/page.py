"""Build the report page, one HTML file without scripts and external resources, and its PNG."""

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from importlib import resources
from string import Template
from typing import Any, Final, Protocol

import vl_convert

from delivery.analytics.report import captions, charts
from delivery.analytics.report.data import (
    ColumnBatch,
    History,
    Retries,
    SubscriptionNames,
    read_history,
    read_retries,
    read_subscription_names,
)
from delivery.analytics.results.reader import (
    Reconciliation,
    oldest_first,
    read_reconciliation,
)
from rooms.domain.usage import COUNTERS, UsageRow
from rooms.safe_text import terminal_safe


class ReportTables(Protocol):
    """Reads the tables of one run."""

    @property
    def run(self) -> int: ...

    @property
    def at(self) -> datetime: ...

    @property
    def set_aside(self) -> Sequence[Mapping[str, Any]]:
        """Return segments that were not read."""
        ...

    @property
    def set_aside_total(self) -> int: ...

    def rows(self, table: str) -> Sequence[Mapping[str, Any]]:
        """Return the rows of a small table."""
        ...

    def batches(self, table: str, columns: Sequence[str]) -> Iterator[ColumnBatch]:
        """Return a large table in batches."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A chart with its title and caption; `chart` is None if there is nothing to draw."""

    name: str
    title: str
    chart: str | None
    caption: str
    wide: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class HtmlReport:
    """The complete report."""

    run: int
    at: datetime
    reconciliation: Reconciliation
    history: History
    names: SubscriptionNames
    retries: Retries
    ages: Sequence[Mapping[str, Any]] = ()
    set_aside: Sequence[Mapping[str, Any]] = ()
    set_aside_total: int = 0
    usage: Sequence[UsageRow] = ()

    @classmethod
    def from_tables(cls, tables: ReportTables, usage: Sequence[UsageRow] = ()) -> "HtmlReport":
        """Read the tables of one run.

        `usage`: counts by organisation, application and room, largest first.
        """
        return cls(
            run=tables.run,
            at=tables.at,
            reconciliation=read_reconciliation(
                tables.rows, is_incomplete=tables.set_aside_total > 0
            ),
            history=read_history(lambda columns: tables.batches("journeys", columns)),
            names=read_subscription_names(tables.rows),
            retries=read_retries(tables.rows),
            ages=oldest_first(tables.rows("ages"))[:_MAX_AGES],
            set_aside=tables.set_aside,
            set_aside_total=tables.set_aside_total,
            usage=usage,
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
            name="incidents", title="Incidents",
            caption="\n".join(
                (captions.timeline_caption(names), *captions.incident_captions(names))
            ),
            chart=charts.incident_timeline(names) if names.incidents else None,
        )  # fmt: skip
        yield Figure(
            name="cofailures", title="Subscriptions that fail together",
            caption=captions.cofailure_caption(names),
            chart=charts.cofailure_heatmap(names) if names.pairs else None,
        )  # fmt: skip
        yield Figure(
            name="hazard", title="Success rate by attempt number",
            caption=captions.success_caption(retries),
            chart=charts.success_chart(retries) if retries.attempts else None, wide=False,
        )  # fmt: skip
        if not retries.drawn_advice:
            no_advice = (
                "There is no recommendation: too few deliveries failed, or no replay reproduces "
                "the measured results."
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
                name=f"advice-{number}", title="Recommended retry policy",
                caption=captions.advice_caption(advice, names), wide=False,
                chart=charts.policy_front_chart(
                    advice, retries.fronts[advice["subscription_id"]]
                ),
            )  # fmt: skip

    def html(self) -> str:
        """Return the HTML file."""
        template = Template(
            resources.files("delivery.analytics.report")
            .joinpath("page.html")
            .read_text(encoding="utf-8")
        )
        return template.substitute(
            run=self.run,
            at=f"{self.at:%Y-%m-%d %H:%M:%S} UTC",
            verdict=escape(captions.reconciliation_caption(self.reconciliation)),
            aside=self._aside_html(),
            ages=self._ages_html(),
            closed="well" if self.reconciliation.is_balanced else "wrong",
            tiles="".join(self._tile_html()),
            figures="".join(_figure_html(figure) for figure in self.figures()),
            subscribers="".join(self._subscriber_rows()),
            usage=self._usage_html(),
        )

    def _tile_html(self) -> Iterator[str]:
        totals = self.reconciliation.describe()
        for name in (
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
            "lost",
        ):
            if totals.get(name) or name in {"fanout", "delivered", "lost"}:
                label = "expected deliveries" if name == "fanout" else name
                yield f"<div><b>{totals.get(name, 0):,}</b>{label}</div>"

    def _aside_html(self) -> str:
        """Return the segments that were not read; empty if there are none."""
        lines = captions.set_aside_caption(self.set_aside, self.set_aside_total).splitlines()
        said = "".join(f"<li>{escape(terminal_safe(line))}</li>" for line in lines)
        return f'<ul id="aside" class="wrong">{said}</ul>' if said else ""

    def _ages_html(self) -> str:
        """Return the open deliveries by age; empty if there are none."""
        rows = "".join(
            _table_row(
                row["outcome"].replace("_", " "),
                f"{row['deliveries']:,}",
                f"{row['oldest_since']:%Y-%m-%d %H:%M}" if row["oldest_since"] else "",
                row["room_id"],
                row["subscription_id"] or "",
                row["oldest_delivery_id"],
            )
            for row in self.ages
        )
        if not rows:
            return ""
        headings = "".join(
            f"<th>{name}</th>"
            for name in ("outcome", "deliveries", "oldest since, UTC", "room", "subscription",
                         "oldest delivery")
        )  # fmt: skip
        return (
            '<section id="ages"><h2>Open deliveries, the oldest first</h2>'
            f'<div class="scroll"><table><thead><tr>{headings}</tr></thead><tbody>{rows}</tbody>'
            "</table></div></section>"
        )

    def _usage_html(self) -> str:
        """Return the section of usage; empty if there is none."""
        if not self.usage:
            return ""
        headings = "".join(
            f"<th>{name.replace('_', ' ')}</th>"
            for name in ("organisation", "", "application", "room", "", *COUNTERS)
        )
        rows = "".join(
            _table_row(
                row.organisation_name or "",
                row.organisation_id or "",
                row.application or "",
                row.room_name or "",
                row.room_id or "",
                *(f"{row.counts[name]:,}" for name in COUNTERS),
            )
            for row in self.usage
        )
        return (
            f'<section id="usage"><h2>Usage since {self.usage[0].start:%Y-%m-%d}</h2>'
            f'<div class="scroll"><table><thead><tr>{headings}</tr></thead><tbody>{rows}</tbody>'
            "</table></div></section>"
        )

    def _subscriber_rows(self) -> Iterator[str]:
        for one in sorted(self.names.subscribers.values(), key=lambda one: int(one.name[1:])):
            yield _table_row(
                one.name,
                one.id,
                one.room or "",
                one.host or "",
                f"{one.attempts:,}",
                f"{one.failures:,}",
            )


def _table_row(*cells: object) -> str:
    row = "".join(f"<td>{escape(terminal_safe(str(cell)))}</td>" for cell in cells)
    return f"<tr>{row}</tr>"


def _figure_html(figure: Figure) -> str:
    said = "".join(f"<p>{escape(terminal_safe(line))}</p>" for line in figure.caption.splitlines())
    title = escape(figure.title)
    drawn = (
        ""
        if figure.chart is None
        else f'<div class="chart" role="img" aria-label="{title}">{figure.chart}</div>'
    )
    size = "wide" if figure.wide else "half"
    return (
        f'<figure id="{figure.name}" class="{size}"><h2>{title}</h2>{drawn}'
        f"<figcaption>{said}</figcaption></figure>"
    )


_MAX_AGES: Final = 50
"""Rows of open deliveries."""
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
