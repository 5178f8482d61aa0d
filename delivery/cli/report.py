"""`rooms report`: what the last analysis has found, as one HTML file."""

from pathlib import Path

import click

from delivery.cli.extra import need_plots
from delivery.cli.findings import published
from rooms.cli.errors import CliError
from rooms.cli.session import Command, Session, pass_session


@click.command(cls=Command)
@click.option(
    "--to", type=click.Path(dir_okay=False, path_type=Path), help="The file.  [default: ROOMS_DATA/report.html]"
)
@click.option(
    "--picture", type=click.Path(dir_okay=False, path_type=Path), help="Draw the charts into this PNG as well."
)
@pass_session
def report(session: Session, /, *, to: Path | None, picture: Path | None) -> None:
    """Write what the last analysis has found into one HTML file, with charts and what is seen in them.

    Deliveries over time, percentiles, incidents, who fails with whom, what a retry is worth, and how retries should be set.
    The file needs nothing but itself. Needs the extra `spark`, and no Java.
    """
    need_plots()
    found = published(session)
    from delivery.report.page import Report

    told = Report.of(found)
    at = to or session.settings().data / "report.html"
    files = {at: told.html().encode()}
    if picture is not None:
        from delivery.report import picture as pictures

        files[picture] = pictures.picture(told.figures())
    for path, content in files.items():
        try:
            path.write_bytes(content)
        except OSError as exc:
            raise CliError(f"{path}: {exc.strerror}") from exc
    output = session.output()
    if output.as_json:
        output.document({"run": told.run, "analysed_at": told.at.isoformat(), "files": [str(path) for path in files]})
        return
    for path in files:
        output.line(str(path))
    output.note(f"as of {told.at:%Y-%m-%d %H:%M:%S} UTC; `rooms analyze` looks again")
