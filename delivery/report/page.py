"""The page: charts and words in one HTML file, without a script and without anything from elsewhere."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from importlib import resources
from string import Template
from typing import Any, Protocol

from delivery.findings.books import Books, books_of
from delivery.report import charts, words
from delivery.report.company import Company, company_of
from delivery.report.history import Batch, History, history_of
from delivery.report.retries import Retries, retries_of
from rooms.terminal import terminal_safe


class Tables(Protocol):
    """One run's tables, as the analysis has left them."""

    @property
    def run(self) -> int: ...

    @property
    def at(self) -> datetime: ...

    def rows(self, table: str) -> Sequence[Mapping[str, Any]]:
        """A small table."""
        ...

    def batches(self, table: str, columns: Sequence[str]) -> Iterator[Batch]:
        """A large one, batch by batch."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A chart (None where there is nothing to draw) under its title, and what is seen in it."""

    name: str
    title: str
    chart: str | None
    caption: str
    wide: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that is told."""

    run: int
    at: datetime
    books: Books
    history: History
    company: Company
    retries: Retries

    @classmethod
    def of(cls, tables: Tables) -> "Report":
        """From one run's tables."""
        return cls(
            run=tables.run,
            at=tables.at,
            books=books_of(tables.rows),
            history=history_of(lambda columns: tables.batches("journeys", columns)),
            company=company_of(tables.rows),
            retries=retries_of(tables.rows),
        )

    def figures(self) -> Iterator[Figure]:
        """Every figure in its order."""
        past, company, retries = self.history, self.company, self.retries
        yield Figure(
            name="history", title="Deliveries over time", caption=words.of_history(past),
            chart=charts.history(past) if past.total() else None,
        )  # fmt: skip
        yield Figure(
            name="latency", title="From publish to delivery: p50, p95, p99", caption=words.of_latency(past),
            chart=charts.latency(past) if past.worst("p99") else None,
        )  # fmt: skip
        yield Figure(
            name="incidents", title="Incidents: what failed together", caption="\n".join((words.of_timeline(company), *words.of_incidents(company))),
            chart=charts.timeline(company) if company.incidents else None,
        )  # fmt: skip
        yield Figure(
            name="cofailures", title="Who fails with whom", caption=words.of_heat(company),
            chart=charts.heat(company) if company.pairs else None,
        )  # fmt: skip
        yield Figure(
            name="hazard", title="Success by number of the attempt", caption=words.of_hazard(retries),
            chart=charts.hazard(retries) if retries.steps else None, wide=False,
        )  # fmt: skip
        if not retries.told:
            unheard = (
                "Too little has failed, or the replay of no policy gives what was measured: nothing is recommended."
            )
            yield Figure(name="advice", title="How retries should be set", chart=None, caption=unheard, wide=False)
        for number, advice in enumerate(retries.told, 1):
            yield Figure(
                name=f"advice-{number}", title="How retries should be set", caption=words.of_front(advice, company),
                chart=charts.front(advice, retries.fronts[advice["subscription_id"]]), wide=False,
            )  # fmt: skip

    def html(self) -> str:
        """The file."""
        template = Template(resources.files("delivery.report").joinpath("page.html").read_text(encoding="utf-8"))
        return template.substitute(
            run=self.run,
            at=f"{self.at:%Y-%m-%d %H:%M:%S} UTC",
            verdict=escape(words.of_books(self.books)),
            closed="well" if self.books.closed else "wrong",
            tiles="".join(self._tiles()),
            figures="".join(_figure(figure) for figure in self.figures()),
            subscribers="".join(self._subscribers()),
        )

    def _tiles(self) -> Iterator[str]:
        told = self.books.told()
        for name in ("fanout", "delivered", "acked", "sidelined", "expired", "waiting", "duplicates", "lost"):
            if told.get(name) or name in {"fanout", "delivered", "lost"}:
                label = "to be delivered" if name == "fanout" else name
                yield f"<div><b>{told.get(name, 0):,}</b>{label}</div>"

    def _subscribers(self) -> Iterator[str]:
        for one in sorted(self.company.subscribers.values(), key=lambda one: int(one.name[1:])):
            cells = (one.name, one.id, one.room or "", one.host or "", f"{one.attempts:,}", f"{one.failures:,}")
            yield f"<tr>{''.join(f'<td>{escape(terminal_safe(str(cell)))}</td>' for cell in cells)}</tr>"


def _figure(figure: Figure) -> str:
    said = "".join(f"<p>{escape(terminal_safe(line))}</p>" for line in figure.caption.splitlines())
    drawn = (
        ""
        if figure.chart is None
        else f'<div class="chart" role="img" aria-label="{escape(figure.title)}">{figure.chart}</div>'
    )
    size = "wide" if figure.wide else "half"
    return f'<figure id="{figure.name}" class="{size}"><h2>{escape(figure.title)}</h2>{drawn}<figcaption>{said}</figcaption></figure>'
