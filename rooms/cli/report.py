"""Implement `rooms report`: draw the last analysis, and what fails now, as HTML pages."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from rooms.cli.analytics import open_results, require_plots
from rooms.cli.context import CliSession, Command, pass_session
from rooms.cli.errors import CliError

if TYPE_CHECKING:
    from rooms.domain.usage import UsageRow

_USAGE_DAYS: Final = 30
_USAGE_ROWS: Final = 50
"""Rows of usage in the report: the largest organisations in their rooms."""


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
