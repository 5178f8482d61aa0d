"""Run export, analysis and the load into PostgreSQL.

The engine of a run is DuckDB in this process for small logs, and Spark for all others. The rows are
counted in the manifests of the segments, without reading a row.
"""

import os
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from delivery.analytics.local.files import LocalOutput
from delivery.analytics.results.by_organisation import findings_by_organisation
from delivery.analytics.results.reader import AnalysisTables
from delivery.analytics.runs.engine import Engine, OnStatus
from delivery.analytics.runs.errors import AnalysisError, NoJavaError
from delivery.analytics.runs.manifest import LOCAL, SPARK, load_known, state_engine
from delivery.analytics.runs.run import Analysis
from delivery.analytics.sealing.arrow_files import local_folder
from delivery.analytics.sealing.errors import ManifestError
from delivery.analytics.sealing.manifest import MAX_BYTES, parse_manifest
from rooms.db.queries.analytics import read_owners, replace_findings

AUTO: Final = "auto"
SMALL_ROWS: Final = 1_000_000
"""Rows of the log from which Spark analyses it."""
if TYPE_CHECKING:
    from delivery.analytics.export.exporter import ExportReport, OnProgress

_SCANS_PER_ROUND: Final = 8
"""Scans of the stream for new segments between two exports."""
STALE_S: Final = 300.0
"""Maximum age of co-failures, incidents and advice while following the log."""


_Version = tuple[int, datetime, datetime | None]
"""Identify published tables by their run, its time, and that of its findings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """Hold the engine of a run, and the reason for it, for people."""

    engine: str
    why: str


def choose_engine(
    asked: str,
    *,
    segments_at: str,
    output: str,
    full: bool = False,
    environment: Mapping[str, str] = os.environ,
) -> EngineChoice:
    """Return the engine for these addresses. `full`: the run starts over.

    Raise AnalysisError if the engine of this process is asked for where it cannot work.
    """
    segments, tables = local_folder(segments_at), local_folder(output)
    if segments is None or tables is None:
        if asked == LOCAL:
            raise AnalysisError(
                "the engine `local` reads folders of this machine only",
                where=segments_at,
                remedy="use --engine spark",
            )
        return EngineChoice(engine=SPARK, why="the log is not on this machine")
    if asked != AUTO:
        return EngineChoice(engine=asked, why="as --engine says")
    if _is_submitted(environment):
        return EngineChoice(engine=SPARK, why="spark-submit or PYSPARK_SUBMIT_ARGS names a master")
    if find_spec("duckdb") is None:
        return EngineChoice(engine=SPARK, why="the package duckdb is not installed")
    if not full and (kept := _only_state(segments, tables)) is not None:
        return kept
    rows = count_rows(segments)
    if rows < SMALL_ROWS:
        return EngineChoice(engine=LOCAL, why=f"the log has {rows:,} rows, under {SMALL_ROWS:,}")
    return EngineChoice(
        engine=SPARK, why=f"the log has {rows:,} rows, and from {SMALL_ROWS:,} on Spark takes it"
    )


def _is_submitted(environment: Mapping[str, str]) -> bool:
    return "PYSPARK_GATEWAY_PORT" in environment or "--master" in environment.get(
        "PYSPARK_SUBMIT_ARGS", ""
    )


def _only_state(segments: str, tables: str) -> EngineChoice | None:
    """Return the engine whose state has numbers that the other one could not count again."""
    files = LocalOutput(tables)
    engine = state_engine(files)
    if engine is None:
        return None
    gone = sum(not Path(segments, path).exists() for path in load_known(files))
    if not gone:
        return None
    return EngineChoice(
        engine=engine, why=f"only its state has the numbers of {gone:,} segments that are gone"
    )


def count_rows(segments: str) -> int:
    """Return how many rows the manifests below a folder state; damaged ones count nothing."""
    rows = 0
    for path in Path(segments).rglob("_*.parquet.manifest"):
        if not path.is_file():  # a FIFO would block
            continue
        try:
            with path.open("rb") as file:
                rows += parse_manifest(file.read(MAX_BYTES).decode()).rows
        except (OSError, ValueError, ManifestError):
            # Its segment is set aside by the run, which names it.
            continue
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Report the result of one round. `loaded` is True if the API now shows this run."""

    exported: "ExportReport | None"
    analysed: bool
    loaded: bool
    published: AnalysisTables


class AnalysisPipeline:
    """Analyse the log of one database; segments and tables are in folders under `root_url`."""

    def __init__(
        self,
        *,
        database_url: str,
        root_url: str,
        on_status: OnStatus,
        engine: str,
        spark: Callable[[EngineChoice], Any],
    ) -> None:
        """`spark` opens the session when the first run needs it, and returns it from then on."""
        self._database_url = database_url
        self._root_url = root_url
        self._on_status = on_status
        self._asked = engine
        self._spark = spark
        self._chosen: EngineChoice | None = None
        self._last_loaded: tuple[_Version, bool] | None = None

    def run_once(
        self,
        *,
        export: bool = True,
        full: bool = False,
        accept_gone: bool = False,
    ) -> RunResult:
        """Export new rows, analyse new segments, and load the findings.

        Raise ExportError, AnalysisError, BusyError, NotAnalysedError, StorageUnavailableError or
        StorageRefusedError.
        """
        exported = self._export_log() if export else None
        choice = self._choose(full=full)
        report = Analysis(self._engine(choice)).run(
            now=datetime.now(UTC), full=full, accept_gone=accept_gone
        )
        return self._load_results(exported, analysed=report is not None)

    def follow(self, *, every_s: float, export: bool = True) -> Generator[RunResult]:
        """Yield rounds without end, one for each call; take one every `every_s` seconds.

        A small log is analysed in each round; with Spark the analysis runs as a streaming job.
        Co-failures, incidents and advice are at most STALE_S old, everything else as new as the
        segments. Raises as `run_once`.
        """
        while True:
            exported = self._export_log() if export else None
            choice = self._choose()
            if choice.engine == SPARK:
                break
            report = Analysis(self._engine(choice)).run(now=datetime.now(UTC), stale_s=STALE_S)
            yield self._load_results(exported, analysed=report is not None)
        yield from self._follow_by_spark(choice, every_s=every_s, export=export)

    def _follow_by_spark(
        self, choice: EngineChoice, *, every_s: float, export: bool
    ) -> Generator[RunResult]:
        analysis = Analysis(self._engine(choice))
        from delivery.analytics.spark.follow import follow_segments

        at = spark_url(self._root_url)
        runs: list[int] = []
        running = Lock()

        def work() -> None:
            with running:
                report = analysis.run(now=datetime.now(UTC), stale_s=STALE_S)
            if report is not None:
                runs.append(report.run)

        with follow_segments(
            self._spark(choice),
            segments_at=segments_url(at),
            output=tables_url(at),
            work=work,
            every_s=every_s / _SCANS_PER_ROUND,
        ) as stream:
            while True:
                exported = self._export_log() if export else None
                stream.catch_up()
                # Findings become stale even without new segments.
                work()
                yield self._load_results(exported, analysed=bool(runs))
                runs.clear()

    def _export_log(self) -> "ExportReport":
        exported = export_log(self._root_url, self._database_url)
        self._on_status(f"exported {exported.rows} rows")
        return exported

    def _choose(self, *, full: bool = False) -> EngineChoice:
        choice = choose_engine(
            self._asked,
            segments_at=segments_url(self._root_url),
            output=tables_url(self._root_url),
            full=full,
        )
        if self._chosen is None or choice.engine != self._chosen.engine:
            self._on_status(f"engine {choice.engine}: {choice.why}")
        self._chosen = choice
        return choice

    def _engine(self, choice: EngineChoice) -> Engine:
        if choice.engine == LOCAL:
            from delivery.analytics.local.engine import LocalEngine

            segments = local_folder(segments_url(self._root_url))
            output = local_folder(tables_url(self._root_url))
            assert segments is not None, "the choice has checked it"
            assert output is not None, "the choice has checked it"
            return LocalEngine(segments_at=segments, output=output, on_status=self._on_status)
        spark = self._spark(choice)
        from delivery.analytics.spark.engine import SparkEngine

        at = spark_url(self._root_url)
        return SparkEngine(
            spark, segments_at=segments_url(at), output=tables_url(at), on_status=self._on_status
        )

    def _load_results(self, exported: "ExportReport | None", *, analysed: bool) -> RunResult:
        published = AnalysisTables.open(tables_url(self._root_url))
        version = published.run, published.at, published.findings_at
        if self._last_loaded is None or self._last_loaded[0] != version:
            self._last_loaded = version, load_results(published, self._database_url)
        loaded = self._last_loaded[1]
        return RunResult(exported=exported, analysed=analysed, loaded=loaded, published=published)


@contextmanager
def open_pipeline(
    *,
    database_url: str,
    root_url: str,
    on_status: OnStatus,
    engine: str = AUTO,
    log: Path | None = None,
) -> Iterator[AnalysisPipeline]:
    """Open a pipeline. Spark starts when a run needs it, and ends with the pipeline.

    `engine`: AUTO, LOCAL or SPARK. `log`: the file for what Spark logs; None: the
    terminal.
    """
    with ExitStack() as open_sessions:
        sessions: list[Any] = []

        def spark(choice: EngineChoice) -> Any:
            if not sessions:
                on_status("starting Spark")
                sessions.append(open_sessions.enter_context(_open_spark(choice, log)))
            return sessions[0]

        yield AnalysisPipeline(
            database_url=database_url,
            root_url=root_url,
            on_status=on_status,
            engine=engine,
            spark=spark,
        )


@contextmanager
def _open_spark(choice: EngineChoice, log: Path | None) -> Iterator[Any]:
    """Open the session. Raise NoJavaError, with the reason why Spark is needed."""
    if find_spec("pyspark") is None:
        raise AnalysisError(
            "the package pyspark is not installed",
            where=f"Spark is needed: {choice.why}",
            remedy="install the extra `spark`, or use --engine local",
        )
    from delivery.analytics.spark.session import find_java, spark_session

    try:
        find_java()
    except NoJavaError as exc:
        raise NoJavaError(
            str(exc),
            where=f"Spark is needed: {choice.why}",
            remedy="or use --engine local, which takes longer the larger the log is",
        ) from exc
    with spark_session(log=log) as session:
        yield session


def export_log(
    root_url: str, database_url: str, progress: "OnProgress" = lambda _: None
) -> "ExportReport":
    """Export new rows. Raises as `Exporter.run`."""
    from delivery.analytics.export.exporter import Exporter

    return Exporter(database_url, segments_url(root_url)).run(on_progress=progress)


def load_results(published: AnalysisTables, database_url: str) -> bool:
    """Load the findings for the API.

    Return False if those of a later analysis are there, or if none are published yet.
    """
    if published.findings_at is None:
        return False
    findings = findings_by_organisation(published, read_owners(database_url))
    return replace_findings(
        database_url,
        run=published.run,
        analysed_at=published.at,
        findings=findings,
        set_aside=published.hours_set_aside(),
    )


def segments_url(root_url: str) -> str:
    """Return the address of the sealed segments."""
    return f"{root_url}/segments"


def tables_url(root_url: str) -> str:
    """Return the address of the tables and the state of the analysis."""
    return f"{root_url}/tables"


def spark_url(url: str) -> str:
    """Return the address with the scheme that Hadoop uses."""
    return f"s3a://{url[5:]}" if url.startswith("s3://") else url
