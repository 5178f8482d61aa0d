"""Export, analysis and the way into PostgreSQL, one after the other, in one Spark session."""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from delivery.findings.published import Published
from delivery.findings.shares import share
from rooms.storage.analysis import owners, swap

if TYPE_CHECKING:
    from delivery.correlation.analysis import Analysis
    from delivery.export.exporter import Progress, Report

Tell = Callable[[str], None]
_LOOKS: Final = 8
"""So often the stream looks for segments between two exports: what was exported should not wait."""
STALE_S: Final = 300.0
"""So old may be what fails together, and advice, while the log is followed."""


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
        exported = self._export(progress) if export else None
        report = self._analysis().run(now=datetime.now(UTC), full=full)
        return self._loaded(exported, fresh=report is not None)

    def follow(self, *, every_s: float, export: bool = True, stale_s: float = STALE_S) -> Generator[Round]:
        """Rounds without an end, the analysis being a streaming job; take one every `every_s` seconds to have it done.

        What fails together and advice are at most `stale_s` old, everything else as new as the segments. As `round` raises.
        """
        from delivery.correlation.follow import following

        at = for_spark(self._place)
        analysis = self._analysis()
        runs: list[int] = []
        alone = Lock()

        def work() -> None:
            with alone:
                report = analysis.run(now=datetime.now(UTC), stale_s=stale_s)
            if report is not None:
                runs.append(report.run)

        with following(
            self._spark, segments_at=segments(at), out=tables(at), work=work, every_s=every_s / _LOOKS
        ) as stream:
            while True:
                exported = self._export(lambda _: None) if export else None
                stream.catch_up()
                # Findings grow stale even where nothing is new.
                work()
                yield self._loaded(exported, fresh=bool(runs))
                runs.clear()

    def _export(self, progress: "Progress") -> "Report":
        exported = exported_to(self._place, self._database_url, progress)
        self._tell(f"exported {exported.rows} rows")
        return exported

    def _analysis(self) -> "Analysis":
        from delivery.correlation.analysis import Analysis

        at = for_spark(self._place)
        return Analysis(self._spark, segments_at=segments(at), out=tables(at), tell=self._tell)

    def _loaded(self, exported: "Report | None", *, fresh: bool) -> Round:
        published = Published.open(tables(self._place))
        loaded = load(published, self._database_url)
        return Round(exported=exported, fresh=fresh, loaded=loaded, published=published)


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
