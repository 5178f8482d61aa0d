"""Implement `rooms export` and `rooms analyze`, and open the results that other commands show.

The modules `findings` and `report` read the tables of the last analysis. Where these lack segments
or findings, notes, JSON fields and the exit code say so. All need the extra `spark`.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from importlib.util import find_spec
from time import sleep
from traceback import format_exc
from typing import TYPE_CHECKING, Any, Final

import click

from rooms.cli.context import CliSession, Command, pass_session
from rooms.cli.errors import CliError, IncompleteError
from rooms.cli.job import progress_counter, show_accepted_job
from rooms.safe_text import lines_safe

if TYPE_CHECKING:
    from delivery.analytics.export.exporter import ExportReport
    from delivery.analytics.results.pipeline import RunResult
    from delivery.analytics.results.reader import AnalysisTables
    from delivery.analytics.sealing.errors import SetAside

_ARROW_MODULES: Final = ("numpy", "pyarrow")
_PLOT_MODULES: Final = (*_ARROW_MODULES, "altair", "vl_convert")
_LOCAL_MODULES: Final = (*_ARROW_MODULES, "duckdb")
_SPARK_MODULES: Final = (*_ARROW_MODULES, "pandas", "pyspark")
_MODULES_OF_ENGINE: Final = {
    "auto": _ARROW_MODULES,
    "local": _LOCAL_MODULES,
    "spark": _SPARK_MODULES,
}
EXIT_INCOMPLETE: Final = 3
_SHOWN: Final = 10


def require_arrow() -> None:
    """Raise CliError if the packages that read and write Parquet are missing."""
    _require(_ARROW_MODULES)


def require_plots() -> None:
    """Raise CliError if the packages that draw charts are missing."""
    _require(_PLOT_MODULES)


def require_engine(engine: str) -> None:
    """Raise CliError if the packages that run the analysis are missing.

    `auto` takes the engine whose packages are there.
    """
    _require(_MODULES_OF_ENGINE[engine])


@contextmanager
def translate_errors(*, debug: bool = False) -> Iterator[None]:
    """Raise errors of the export, the analysis and PostgreSQL as CliError.

    `debug`: also print the traceback.
    """
    from rooms.errors import DeliveryError, RoomsError

    try:
        yield
    except (DeliveryError, RoomsError) as exc:
        if debug:
            click.echo(lines_safe(format_exc()), err=True)
        kind = IncompleteError if getattr(exc, "is_incomplete", False) else CliError
        raise kind(str(exc)) from exc


def _require(modules: tuple[str, ...]) -> None:
    absent = [name for name in modules if find_spec(name) is None]
    if absent:
        raise CliError(
            f"this needs the extra `spark` ({', '.join(absent)} not found): "
            "pip install '.[spark]' in the clone, or `make setup`"
        )


@click.command(cls=Command)
@pass_session
def export(session: CliSession) -> None:
    """Export new rows of the delivery log as Parquet segments.

    Every row is exported once, to ROOMS_ANALYSIS_URL/segments, or else to
    ROOMS_DATA/analysis/segments. Needs the extra `spark`.
    """
    require_arrow()
    from delivery.analytics.results.pipeline import export_log, segments_url

    destination = session.settings().analysis_location
    with (
        translate_errors(),
        progress_counter("rows exported", shown=not session.as_json) as progress,
    ):
        report = export_log(destination, session.wait_for_database_url(), progress)
    if report.busy:
        raise CliError(
            "another export is running: that of `rooms upkeep` (ROOMS_EXPORT_S), or one in another "
            "terminal"
        )
    output = session.output()
    document = _report_document(report)
    if session.as_json:
        output.document({"to": segments_url(destination), **document})
        return
    output.line(
        f"{report.rows} rows in {report.files} new segments, {report.size / 1e6:.1f} MB, "
        f"in {segments_url(destination)}"
    )
    for writer, missing in report.gaps.items():
        output.note(f"writer {writer}: {missing} rows are not in the log")
    if (blocker := report.holder) is not None:
        output.note(
            f"later rows wait for a transaction that has been open for {blocker.age_s:.0f} s "
            f"(process {blocker.pid}, {blocker.name})"
        )


@click.command(cls=Command)
@click.option("--full", is_flag=True, help="Analyse every partition again.")
@click.option(
    "--follow",
    is_flag=True,
    help="Run until Ctrl-C, and analyse new rows within a minute.",
)
@click.option(
    "--every",
    type=click.FloatRange(1, 3600),
    default=20.0,
    show_default=True,
    help="Seconds between runs, with --follow.",
)
@click.option("--no-export", is_flag=True, help="Analyse the existing segments only.")
@click.option(
    "--accept-gone",
    is_flag=True,
    help="Segments that are gone were removed on purpose: keep their numbers, name them no more.",
)
@click.option(
    "--engine",
    type=click.Choice(tuple(_MODULES_OF_ENGINE)),
    default="auto",
    show_default=True,
    help="local: in this process, without Java. spark: needs Java. auto: local for logs of this "
    "machine under a million rows.",
)
@click.option("--debug", is_flag=True, help="Print everything that Spark logs, and tracebacks.")
@click.option(
    "--job",
    "as_job",
    is_flag=True,
    help="Let the maintenance process do it, by a job of the API, and wait for its result.",
)
@pass_session
def analyze(
    session: CliSession,
    /,
    *,
    full: bool,
    follow: bool,
    every: float,
    no_export: bool,
    accept_gone: bool,
    engine: str,
    debug: bool,
    as_job: bool,
) -> None:
    """Export the log, analyse what is new, and publish the results to the API.

    Logs under a million rows are analysed in this process. Larger ones, and those that are not on
    this machine, need Spark and Java; it runs here unless PYSPARK_SUBMIT_ARGS names another master,
    and logs to ROOMS_DATA/spark.log. Segments that are not as they were sealed are set aside and
    named: the result is then incomplete, and the exit code 3. Needs the extra `spark`. With --job
    it is needed where `rooms upkeep` runs, and nothing is needed here.
    """
    if as_job:
        if follow or no_export or accept_gone or debug or engine != "auto":
            raise click.UsageError("--job goes with --full only")
        _analyze_as_job(session, full=full)
        return
    require_engine(engine)
    from delivery.analytics.results.pipeline import open_pipeline

    settings, output = session.settings(), session.output()
    database_url = session.wait_for_database_url()

    def report_line(line: str) -> None:
        if not session.as_json:
            output.note(line)

    with (
        translate_errors(debug=debug),
        open_pipeline(
            database_url=database_url,
            root_url=settings.analysis_location,
            on_status=report_line,
            engine=engine,
            log=None if debug else settings.data / "spark.log",
        ) as one,
    ):
        done = one.run_once(export=not no_export, full=full, accept_gone=accept_gone)
        _show_run(session, done)
        if not follow:
            exit_incomplete(done.published)
            return
        # The generator must close before Spark does, also on Ctrl-C.
        with closing(one.follow(every_s=every, export=not no_export)) as rounds:
            for done in rounds:
                if done.analysed:
                    _show_run(session, done)
                sleep(every)


def _analyze_as_job(session: CliSession, *, full: bool) -> None:
    """Start the job, and show it at its end; exit with 3 if it is incomplete.

    CliError: it failed.
    """
    with session.client() as client:
        accepted = client.call("POST", "/analysis/runs", json={"full": full})
        found = show_accepted_job(session, client, accepted, follow=True)
    if (found["result"] or {}).get("incomplete"):
        click.get_current_context().exit(EXIT_INCOMPLETE)


def _show_run(session: CliSession, run: "RunResult") -> None:
    output, published = session.output(), run.published
    if session.as_json:
        exported = {} if run.exported is None else {"exported": _report_document(run.exported)}
        output.document(
            {
                "run": published.run,
                "at": published.at.isoformat(),
                "fresh": run.analysed,
                "loaded": run.loaded,
                **exported,
                "totals": dict(published.totals),
                **incomplete_fields(published),
            }
        )
        return
    totals = published.totals
    output.line(
        f"run {published.run}{'' if run.analysed else ' (nothing new)'}: "
        f"{totals['enqueued']} deliveries, "
        f"{totals['lost']} lost, {totals['missing']} missing, {totals.get('stuck', 0)} stuck, "
        f"{totals['duplicates']} duplicates"
    )
    note_incomplete(session, published)


def _report_document(report: "ExportReport") -> dict[str, Any]:
    holder = report.holder
    return {
        "rows": report.rows,
        "files": report.files,
        "bytes": report.size,
        "busy": report.busy,
        "gaps": {str(writer): missing for writer, missing in report.gaps.items()},
        "held_back_s": None if holder is None else holder.age_s,
    }


def open_results(session: CliSession) -> "AnalysisTables":
    """Open the tables of the last analysis. Raise CliError if there are none."""
    require_arrow()
    from delivery.analytics.results.pipeline import tables_url
    from delivery.analytics.results.reader import AnalysisTables

    with translate_errors():
        return AnalysisTables.open(tables_url(session.settings().analysis_location))


def set_aside_documents(found: Sequence["SetAside"]) -> list[dict[str, Any]]:
    """Return segments that are set aside for JSON."""
    return [one.document() for one in found]


def incomplete_fields(found: "AnalysisTables") -> dict[str, Any]:
    """Return the fields of a JSON document that name what was not read."""
    return {
        "incomplete": found.is_incomplete,
        "set_aside_total": found.set_aside_total,
        "set_aside": list(found.set_aside),
    }


def note_incomplete(session: CliSession, found: "AnalysisTables") -> None:
    """Name segments that were not read, for people."""
    from delivery.analytics.sealing.errors import set_aside_lines

    if not found.is_incomplete or session.as_json:
        return
    output = session.output()
    output.note(
        f"incomplete: {found.set_aside_total} segments are set aside, and not counted as loss"
    )
    for line in set_aside_lines(found.set_aside, found.set_aside_total, limit=_SHOWN):
        output.note(line)


def note_findings(session: CliSession, found: "AnalysisTables") -> None:
    """State the time of incidents and retry advice, which a run publishes after its books."""
    if found.findings_at is None:
        session.output().note(
            "not computed yet: `rooms analyze` publishes its books first; "
            "if none is running, run it again"
        )
        return
    session.output().note(
        f"as of {found.findings_at:%Y-%m-%d %H:%M:%S} UTC; `rooms analyze` updates it"
    )


def exit_incomplete(found: "AnalysisTables") -> None:
    """Exit with code 3 if segments are set aside."""
    if found.is_incomplete:
        click.get_current_context().exit(EXIT_INCOMPLETE)
