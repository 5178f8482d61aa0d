"""Implement `rooms report`: draw the last analysis, and what fails now, as HTML pages."""

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from rooms.cli.analytics import (
    exit_incomplete,
    incomplete_fields,
    note_incomplete,
    open_results,
    require_plots,
)
from rooms.cli.context import CliSession, Command, pass_session
from rooms.cli.errors import CliError
from rooms.cli.options import parse_id

if TYPE_CHECKING:
    from delivery.analytics.report.live import LiveStatus
    from delivery.analytics.report.page import Surroundings

_MAX_TROUBLED: Final = 200
_USAGE_DAYS: Final = 30
_USAGE_ROWS: Final = 50
"""Rows of usage in the report: the largest applications of organisations, in a room each."""


def _read_surroundings(
    session: CliSession, ids: Collection[str], subscription: str | None
) -> "Surroundings":
    """Return names, usage of the last days, and what fails now, as far as they can be had.

    `subscription`: ask the service about this one only.
    """
    import asyncio
    from datetime import UTC, datetime, timedelta

    from delivery.analytics.report.live import Names
    from delivery.analytics.report.page import Surroundings
    from rooms.db.connection import open_engine, transaction
    from rooms.db.queries.analytics import subscription_names
    from rooms.db.usage.read import largest_usage
    from rooms.errors import RoomsError

    live = _read_live(session, subscription)

    async def read(url: str) -> Surroundings:
        engine = open_engine(url, size=1)
        try:
            async with transaction(engine) as connection:
                since = datetime.now(UTC) - timedelta(days=_USAGE_DAYS)
                usage = await largest_usage(connection, since=since, limit=_USAGE_ROWS)
                found = await subscription_names(connection, ids)
        finally:
            await engine.dispose()
        names = {
            one.id: Names(name=one.name, room=one.room, organisation=one.organisation)
            for one in found
        }
        return Surroundings(names=names, usage=usage, live=live)

    try:
        return asyncio.run(read(session.wait_for_database_url()))
    except (CliError, RoomsError) as exc:
        session.output().note(f"the report is without usage, and with fewer names: {exc}")
        return Surroundings(names={}, live=live)


def _read_live(session: CliSession, subscription: str | None = None) -> "LiveStatus | None":
    """Ask the service what fails now. None, with a note, if none answers.

    `subscription`: of this one only, as it may be beyond the limit of the others.
    """
    from delivery.analytics.report.live import LiveStatus

    narrowed = {} if subscription is None else {"subscription_id": subscription}
    try:
        with session.client() as client:
            answer = client.call("GET", "/status", params={"limit": _MAX_TROUBLED, **narrowed})
            return LiveStatus.from_answer(client.url, answer)
    except CliError as exc:
        session.output().note(f"the report shows the end of the log, not what fails now: {exc}")
        return None


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
@click.option("--subscription", metavar="ID", help="Write a page about this subscription only.")
@pass_session
def report(
    session: CliSession, /, *, to: Path | None, picture: Path | None, subscription: str | None
) -> None:
    """Write what fails now and the results of the last analysis as one HTML file.

    Asks the service (--url) what fails now, and shows the worst outages, charts, retry advice and
    every subscription; where PostgreSQL answers, also names and usage of the last 30 days. Where no
    service answers, it shows the end of the log. The file is self-contained, and for the operator
    only: it has the results of all organisations. Needs the extra `spark`, but no Java.
    """
    require_plots()
    identity = None if subscription is None else parse_id(subscription)
    found = open_results(session)
    from delivery.analytics.report import page as pages

    ids = {
        row["subscription_id"]
        for row in found.distinct("rollups_daily", ["subscription_id"])
        if row["subscription_id"] is not None
    }
    summary = pages.HtmlReport.from_tables(found, _read_surroundings(session, ids, identity))
    content = summary.html() if identity is None else summary.subscription_html(identity)
    if content is None:
        raise CliError(f"the last analysis has no subscription {identity}: run `rooms analyze`")
    name = "report.html" if identity is None else f"report-{identity}.html"
    files = {to or session.settings().data / name: content.encode()}
    if picture is not None:
        files[picture] = pages.render_png(summary.figures())
    for path, written in files.items():
        try:
            path.write_bytes(written)
        except OSError as exc:
            raise CliError(f"{path}: {exc.strerror}") from exc
    output = session.output()
    if output.as_json:
        live = summary.around.live
        output.document(
            {
                "run": summary.run,
                "analysed_at": summary.at.isoformat(),
                "asked_at": None if live is None else live.at.isoformat(),
                "files": [str(path) for path in files],
                **incomplete_fields(found),
            }
        )
        exit_incomplete(found)
        return
    for path in files:
        output.line(str(path))
    output.note(f"as of {summary.at:%Y-%m-%d %H:%M:%S} UTC; `rooms analyze` updates it")
    note_incomplete(session, found)
    exit_incomplete(found)
