"""Implement the commands of the delivery analytics.

`rooms export` and `rooms analyze` write the log and analyse it. `rooms reconcile`, `retry-advice`
and `report` read the tables of the last analysis. All need the extra `spark`.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Any, Final

import click

from rooms.cli.context import CliSession, Command, pass_session, renamed
from rooms.cli.errors import CliError
from rooms.cli.options import parse_id
from rooms.cli.output import Output
from rooms.cli.progress import progress_counter

if TYPE_CHECKING:
    from delivery.analytics.export.exporter import ExportReport
    from delivery.analytics.results.pipeline import RunResult
    from delivery.analytics.results.reader import AnalysisTables
    from rooms.domain.usage import UsageRow

_ARROW_MODULES: Final = ("numpy", "pyarrow")
_PLOT_MODULES: Final = (*_ARROW_MODULES, "altair", "vl_convert")
_SPARK_MODULES: Final = (*_ARROW_MODULES, "pandas", "pyspark")
EXIT_LOST: Final = 1
_USAGE_DAYS: Final = 30
_USAGE_ROWS: Final = 50
"""Rows of usage in the report: the largest organisations in their rooms."""


def require_arrow() -> None:
    """Raise CliError if the packages that read and write Parquet are missing."""
    _require(_ARROW_MODULES)


def require_plots() -> None:
    """Raise CliError if the packages that draw charts are missing."""
    _require(_PLOT_MODULES)


def require_spark() -> None:
    """Raise CliError if the packages that run the analysis are missing."""
    _require(_SPARK_MODULES)


@contextmanager
def translate_errors() -> Iterator[None]:
    """Raise errors of the export, the analysis and PostgreSQL as CliError."""
    from delivery.errors import DeliveryError
    from rooms.errors import RoomsError

    try:
        yield
    except (DeliveryError, RoomsError) as exc:
        raise CliError(str(exc)) from exc


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
@pass_session
def analyze(
    session: CliSession, /, *, full: bool, follow: bool, every: float, no_export: bool
) -> None:
    """Export the log, analyse what is new on Spark, and publish the results to the API.

    Runs on this machine unless PYSPARK_SUBMIT_ARGS names another master. Needs the extra `spark`,
    and Java.
    """
    require_spark()
    from delivery.analytics.results.pipeline import open_pipeline

    settings, output = session.settings(), session.output()
    database_url = session.wait_for_database_url()

    def report_line(line: str) -> None:
        if not session.as_json:
            output.note(line)

    with (
        translate_errors(),
        open_pipeline(
            database_url=database_url, root_url=settings.analysis_location, on_status=report_line
        ) as one,
    ):
        _show_run(session, one.run_once(export=not no_export, full=full))
        if not follow:
            return
        # The generator must close before Spark does, also on Ctrl-C.
        with closing(one.follow(every_s=every, export=not no_export)) as rounds:
            for done in rounds:
                if done.analysed:
                    _show_run(session, done)
                sleep(every)


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
            }
        )
        return
    totals = published.totals
    output.line(
        f"run {published.run}{'' if run.analysed else ' (nothing new)'}: "
        f"{totals['enqueued']} deliveries, "
        f"{totals['lost'] + totals['missing']} lost, {totals['duplicates']} duplicates"
    )


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


@click.command(cls=Command)
@click.pass_context
@pass_session
def reconcile(session: CliSession, ctx: click.Context, /) -> None:
    """Compare published messages with their outcomes. Exit code 1 if any delivery is lost.

    A delivery that was never created also counts as lost. The exit code is also 1 if rows of the
    log itself are missing, because the totals then do not match.
    """
    found = open_results(session)
    from delivery.analytics.results.reader import read_reconciliation

    books = read_reconciliation(found.rows)
    output = session.output()
    rows = {"analysed_at": found.at.isoformat(), **books.describe()}
    if output.as_json:
        output.document(rows)
    else:
        shown = [
            (name, value)
            for name, value in rows.items()
            if isinstance(value, int) and not isinstance(value, bool)
        ]
        output.table(
            ["", "deliveries"],
            [[name.replace("_", " "), value] for name, value in shown if value or name == "lost"],
        )
        if books.rooms:
            output.table(
                ["room", "lost", "missing", "never enqueued"],
                [
                    [room, of["lost"], of["missing"], of["never_enqueued"]]
                    for room, of in books.rooms.items()
                ],
            )
        output.note(_format_balance(books.is_balanced))
    if not books.is_balanced:
        ctx.exit(EXIT_LOST)


def _format_balance(balanced: bool) -> str:
    return (
        "nothing is lost: every delivery is accounted for"
        if balanced
        else "the totals do not match"
    )


@click.command("retry-advice", cls=Command)
@click.argument("subscription_id", required=False)
@click.option(
    "--apply", "chosen", metavar="SUB", help="Show the advice for this subscription, then apply it."
)
@pass_session
def retry_advice(
    session: CliSession, /, *, subscription_id: str | None, chosen: str | None
) -> None:
    """Recommend retry settings for one subscription, or for all.

    Recommends nothing where a simulation of the current policy does not reproduce the measurements.
    """
    from delivery.analytics.results.by_organisation import advice_body

    wanted_id = chosen or subscription_id
    one = None if wanted_id is None else parse_id(wanted_id)
    found = [advice_body(row) for row in open_results(session).rows("advice")]
    if one is not None:
        found = [advice for advice in found if advice["subscription_id"] == one]
        if not found:
            raise CliError(
                f"there is no advice for {one}: it has too few failures, or was not analysed yet"
            )
    output = session.output()
    if chosen is None:
        if output.as_json:
            output.document({"items": found})
            return
        _show_advice_table(output, found)
        return
    _apply_advice(session, found[0])


advise = renamed(retry_advice, "advise", "retry-advice")


def _apply_advice(session: CliSession, advice: dict[str, Any]) -> None:
    policy = advice["recommended"]
    if not advice["reproduced"] or policy is None:
        raise CliError("nothing is recommended: the simulation does not reproduce the measurements")
    output = session.output()
    if not output.as_json:
        _show_advice_table(output, [advice])
    overrides = {
        "delivery_delay_ms": round(policy["delay_ms"]),
        "delivery_delay_multiplier": policy["multiplier"],
        "delivery_attempts": policy["redeliveries"],
    }
    with session.client() as client:
        changed = client.call(
            "PATCH", f"/subscriptions/{advice['subscription_id']}", json=overrides
        )
    if output.as_json:
        output.document({"advice": advice, "subscription": changed})
        return
    output.line(f"applied to {changed['name']}")


def _show_advice_table(output: Output, found: list[dict[str, Any]]) -> None:
    output.table(
        [
            "subscription",
            "",
            "first wait",
            "growth",
            "redeliveries",
            "delivered",
            "attempts",
            "mean wait",
            "p95 wait",
        ],
        [
            [
                advice["subscription_id"] if which == "now" else "",
                which,
                *_policy_cells(policy),
                *_effect_cells(effect),
            ]
            for advice in found
            for which, policy, effect in (
                ("now", advice["deployed"], advice["measured"]),
                ("simulated", None, advice["replayed"]),
                ("better", advice["recommended"], advice["expected"]),
            )
            if policy is not None or effect is not None
        ],
        empty="no subscription has enough failures for advice",
    )


def _policy_cells(policy: dict[str, Any] | None) -> list[object]:
    if policy is None:
        return ["", "", ""]
    return [f"{policy['delay_ms'] / 1000:g} s", f"{policy['multiplier']:g}", policy["redeliveries"]]


def _effect_cells(effect: dict[str, Any] | None) -> list[object]:
    if effect is None or effect["delivered"] is None:
        return ["", "", "", ""]
    waits = [
        "-" if effect[name] is None else f"{effect[name]:.1f} s"
        for name in ("mean_wait_s", "p95_wait_s")
    ]
    return [f"{effect['delivered']:.2%}", f"{effect['attempts']:.2f}", *waits]


def _read_usage(session: CliSession) -> Sequence["UsageRow"]:
    """Return the usage of the last days. It is left out, with a note, if PostgreSQL is away."""
    import asyncio
    from datetime import UTC, datetime, timedelta

    from rooms.db.connection import open_engine, transaction
    from rooms.db.usage.read import largest_usage
    from rooms.errors import RoomsError

    async def read(url: str) -> Sequence["UsageRow"]:
        engine = open_engine(url, size=1)
        try:
            async with transaction(engine) as connection:
                since = datetime.now(UTC) - timedelta(days=_USAGE_DAYS)
                return await largest_usage(connection, since=since, limit=_USAGE_ROWS)
        finally:
            await engine.dispose()

    try:
        return asyncio.run(read(session.wait_for_database_url()))
    except (CliError, RoomsError) as exc:
        session.output().note(f"the report is without usage: {exc}")
        return ()


@click.command(cls=Command)
@click.option(
    "--to",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file.  [default: ROOMS_DATA/report.html]",
)
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write the charts to this PNG file.",
)
@pass_session
def report(session: CliSession, /, *, to: Path | None, picture: Path | None) -> None:
    """Write the results of the last analysis as one HTML file with charts.

    Shows deliveries over time, percentiles, incidents, correlated subscriptions, the value of
    retries, and recommended retry settings; where PostgreSQL answers, also the usage of the last 30
    days. The file is self-contained. Needs the extra `spark`, but no Java.
    """
    require_plots()
    found = open_results(session)
    from delivery.analytics.report.page import HtmlReport

    summary = HtmlReport.from_tables(found, _read_usage(session))
    at = to or session.settings().data / "report.html"
    files = {at: summary.html().encode()}
    if picture is not None:
        from delivery.analytics.report import page as pictures

        files[picture] = pictures.render_png(summary.figures())
    for path, content in files.items():
        try:
            path.write_bytes(content)
        except OSError as exc:
            raise CliError(f"{path}: {exc.strerror}") from exc
    output = session.output()
    if output.as_json:
        output.document(
            {
                "run": summary.run,
                "analysed_at": summary.at.isoformat(),
                "files": [str(path) for path in files],
            }
        )
        return
    for path in files:
        output.line(str(path))
    output.note(f"as of {summary.at:%Y-%m-%d %H:%M:%S} UTC; `rooms analyze` updates it")
