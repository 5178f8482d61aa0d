"""`rooms export` and `rooms analyze`: the log out of PostgreSQL, and through the analysis."""

from contextlib import closing
from time import sleep
from typing import TYPE_CHECKING, Any

import click

from delivery.cli.extra import explained, need_arrow, need_spark
from rooms.cli.errors import CliError
from rooms.cli.progress import counting
from rooms.cli.session import Command, Session, pass_session

if TYPE_CHECKING:
    from delivery.export.exporter import Report
    from delivery.findings.analyst import Round


@click.command(cls=Command)
@pass_session
def export(session: Session) -> None:
    """Export the delivery log as Parquet segments: every row that is not exported yet, once.

    They go to ROOMS_ANALYSIS_URL/segments, without it to ROOMS_DATA/analysis/segments. Needs the extra `spark`.
    """
    need_arrow()
    from delivery.findings.analyst import exported_to, segments

    place = session.settings().analysis
    with explained(), counting("rows exported", shown=not session.as_json) as progress:
        report = exported_to(place, session.answering_database_url(), progress)
    if report.busy:
        raise CliError("another export is at work: the upkeep's (ROOMS_EXPORT_S), or one in another terminal")
    output = session.output()
    told = _told(report)
    if session.as_json:
        output.document({"to": segments(place), **told})
        return
    output.line(f"{report.rows} rows in {report.files} new segments, {report.size / 1e6:.1f} MB, in {segments(place)}")
    for writer, missing in report.gaps.items():
        output.note(f"writer {writer}: {missing} rows are not in the log")
    if (holder := report.holder) is not None:
        output.note(
            f"later rows wait for a transaction that is open for {holder.age_s:.0f} s (process {holder.pid}, {holder.name})"
        )


@click.command(cls=Command)
@click.option("--full", is_flag=True, help="Work on every partition again, whatever was done before.")
@click.option(
    "--follow", is_flag=True, help="Go on until Ctrl-C: a streaming job analyses what comes, within a minute."
)
@click.option(
    "--every", type=click.FloatRange(1, 3600), default=20.0, show_default=True, help="Seconds between, with --follow."
)
@click.option("--no-export", is_flag=True, help="Analyse the segments that are there.")
@pass_session
def analyze(session: Session, /, *, full: bool, follow: bool, every: float, no_export: bool) -> None:
    """Export the log, analyse what is new in it on Spark, and give the findings to the API.

    Runs on this machine unless PYSPARK_SUBMIT_ARGS names another master. Needs the extra `spark`, and Java.
    """
    need_spark()
    from delivery.findings.analyst import analyst

    settings, output = session.settings(), session.output()
    database_url = session.answering_database_url()

    def tell(line: str) -> None:
        if not session.as_json:
            output.note(line)

    with explained(), analyst(database_url=database_url, place=settings.analysis, tell=tell) as one:
        _show(session, one.round(export=not no_export, full=full))
        if not follow:
            return
        # Closed before its Spark is, also by Ctrl-C.
        with closing(one.follow(every_s=every, export=not no_export)) as rounds:
            for done in rounds:
                if done.fresh:
                    _show(session, done)
                sleep(every)


def _show(session: Session, done: "Round") -> None:
    output, published = session.output(), done.published
    if session.as_json:
        exported = {} if done.exported is None else {"exported": _told(done.exported)}
        output.document(
            {
                "run": published.run,
                "at": published.at.isoformat(),
                "fresh": done.fresh,
                "loaded": done.loaded,
                **exported,
                "totals": dict(published.totals),
            }
        )
        return
    totals = published.totals
    output.line(
        f"run {published.run}{'' if done.fresh else ' (nothing is new)'}: {totals['enqueued']} deliveries, "
        f"{totals['lost'] + totals['missing']} lost, {totals['duplicates']} came twice"
    )


def _told(report: "Report") -> dict[str, Any]:
    holder = report.holder
    return {
        "rows": report.rows,
        "files": report.files,
        "bytes": report.size,
        "busy": report.busy,
        "gaps": {str(writer): missing for writer, missing in report.gaps.items()},
        "held_back_s": None if holder is None else holder.age_s,
    }
