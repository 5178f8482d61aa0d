"""Export, analysis and the way into PostgreSQL, one after the other, in one Spark session."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from delivery.findings.published import Published
from delivery.findings.shares import share
from rooms.storage.analysis import owners, swap

if TYPE_CHECKING:
    from delivery.export.exporter import Progress, Report

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What one round has done. `fresh`: there was something new to analyse; `loaded`: the API shows this run now."""

    exported: "Report | None"
    fresh: bool
    loaded: bool
    published: Published


class Analyst:
    """Analyses the log of one database, segments and tables lying in the folders of these names under `place`."""

    def __init__(self, spark: Any, *, database_url: str, place: str, tell: Tell) -> None:
        self._spark = spark
        self._database_url = database_url
        self._place = place
        self._tell = tell

    def round(self, *, export: bool = True, full: bool = False, progress: "Progress" = lambda _: None) -> Round:
        """Export what there is, analyse what is new, and swap the findings in.

        ExportError, AnalysisError, NotAnalysedError, StorageUnavailableError, StorageRefusedError.
        """
        from delivery.correlation.analysis import Analysis

        exported = exported_to(self._place, self._database_url, progress) if export else None
        if exported is not None:
            self._tell(f"exported {exported.rows} rows")
        at = for_spark(self._place)
        analysis = Analysis(self._spark, segments_at=segments(at), out=tables(at), tell=self._tell)
        report = analysis.run(now=datetime.now(UTC), full=full)
        published = Published.open(tables(self._place))
        loaded = load(published, self._database_url)
        return Round(exported=exported, fresh=report is not None, loaded=loaded, published=published)


@contextmanager
def analyst(*, database_url: str, place: str, tell: Tell) -> Iterator[Analyst]:
    """One with a session of its own. NoJavaError."""
    from delivery.correlation.session import spark_session

    tell("starting Spark")
    with spark_session() as spark:
        yield Analyst(spark, database_url=database_url, place=place, tell=tell)


def exported_to(place: str, database_url: str, progress: "Progress" = lambda _: None) -> "Report":
    """Export what there is. As `Exporter` and its `run` raise."""
    from delivery.export.exporter import Exporter

    return Exporter(database_url, segments(place)).run(progress=progress)


def load(published: Published, database_url: str) -> bool:
    """Put the findings where the API reads them; False where it has those of a later analysis."""
    findings = share(published.rows, owners(database_url))
    return swap(database_url, run=published.run, analysed_at=published.at, findings=findings)


def segments(place: str) -> str:
    """Where the sealed segments lie."""
    return f"{place}/segments"


def tables(place: str) -> str:
    """Where the analysis' tables and state lie."""
    return f"{place}/tables"


def for_spark(place: str) -> str:
    """The address as Hadoop's file systems call it."""
    return f"s3a://{place[5:]}" if place.startswith("s3://") else place
