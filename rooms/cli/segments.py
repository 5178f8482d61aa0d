"""Implement `rooms segments`: manifests for segments of the log. Needs the extra `spark`."""

from pathlib import Path
from typing import Any, Final

import click

from rooms.cli.analytics import (
    EXIT_INCOMPLETE,
    require_arrow,
    set_aside_documents,
    translate_errors,
)
from rooms.cli.context import CliSession, Command, Group, pass_session
from rooms.cli.errors import CliError
from rooms.cli.job import progress_counter

_SHOWN: Final = 20


@click.group(cls=Group)
def segments() -> None:
    """Seal segments of the delivery log that come from elsewhere."""


@segments.command(cls=Command)
@click.argument("folder", required=False)
@pass_session
def seal(session: CliSession, /, *, folder: str | None) -> None:
    """Write a manifest for each segment in FOLDER that has none.

    FOLDER is a path or a URI (s3://, gs://, hdfs://); the default is the folder of the export. Each
    file is read whole, and its manifest states what it contains now. Segments with a manifest are
    verified, and never sealed again. Exit code 3 if a file cannot be sealed. Needs the extra
    `spark`.
    """
    require_arrow()
    from delivery.analytics.results.pipeline import segments_url
    from delivery.analytics.sealing.arrow_files import local_folder, open_files
    from delivery.analytics.sealing.errors import set_aside_lines
    from delivery.analytics.sealing.lock import exclusive
    from delivery.analytics.sealing.seal import seal_segments

    at = folder or segments_url(session.settings().analysis_location)
    local = local_folder(at)
    if local is not None and not Path(local).is_dir():
        raise CliError(f"there is no folder {local}")
    with (
        translate_errors(),
        exclusive(local, "seal"),
        progress_counter("segments", shown=not session.as_json) as progress,
    ):
        report = seal_segments(open_files(at), progress)
    refused = set_aside_documents(report.refused)
    output = session.output()
    if session.as_json:
        document: dict[str, Any] = {
            "folder": at,
            "sealed": report.sealed,
            "rows": report.rows,
            "already": report.already,
            "refused": refused,
        }
        output.document(document)
    else:
        output.line(
            f"{report.sealed} segments sealed, with {report.rows} rows; {report.already} were "
            f"sealed before, in {at}"
        )
        for line in set_aside_lines(refused, len(refused), limit=_SHOWN):
            output.note(line)
    if refused:
        click.get_current_context().exit(EXIT_INCOMPLETE)
