"""Implement `rooms usage`: read and export what was published and delivered."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from rooms.cli.activity import last_hour
from rooms.cli.context import CliSession, Group, pass_session
from rooms.cli.options import Paging, find_organisation, paging_options, set_fields
from rooms.cli.output import write_whole
from rooms.domain.ids import is_id
from rooms.domain.usage import UsageDimension, UsagePeriod

if TYPE_CHECKING:
    from rooms.cli.client import ApiClient

_EVERY_ORGANISATION: Final = "*"
_COUNTS: Final = (
    "messages",
    "bytes",
    "deliveries",
    "delivered",
    "attempts",
    "failed_attempts",
    "sidelined",
    "expired",
)
_GROUPS: Final[dict[str, tuple[str, ...]]] = {
    UsageDimension.ORGANISATION: ("organisation_name", "organisation_id"),
    UsageDimension.ROOM: ("room_name", "room_id"),
    UsageDimension.EVENT_TYPE: ("event_type",),
    UsageDimension.APPLICATION: ("application",),
}


@click.group(cls=Group)
def usage() -> None:
    """Count messages, bytes and deliveries by minute, hour or day, from the log.

    An organisation sees what it published, what its subscriptions got, and its own rooms.
    """


def _query_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option(
            "--organisation",
            help="Of another one, by id, name or member id, or '*'; needs the scope platform.",
        ),
        click.option(
            "--application",
            help="Only what this application of an organisation published or got; '*': those "
            "beyond the first 100 of an hour.",
        ),
        click.option("--until", help="Hours that begin before this time (RFC 3339)."),
        click.option("--since", help="From the hour or day of this time on (RFC 3339)."),
        click.option(
            "--per",
            type=click.Choice([one.value for one in UsagePeriod]),
            default=UsagePeriod.HOUR.value,
            show_default=True,
            help="The length of a row's time, in UTC.",
        ),
        click.option(
            "--by",
            type=click.Choice([one.value for one in UsageDimension]),
            multiple=True,
            default=(UsageDimension.ORGANISATION.value,),
            show_default=True,
            help="A row for each; repeat it for several.",
        ),
    ):
        command = option(command)
    return command


def _params(
    client: "ApiClient", by: tuple[str, ...], organisation: str | None, **others: str | None
) -> dict[str, Any]:
    if not (organisation is None or organisation == _EVERY_ORGANISATION or is_id(organisation)):
        organisation = str(find_organisation(client, organisation)["id"])
    return set_fields(by=",".join(by), organisation_id=organisation, **others)


@usage.command("list")
@_query_options
@paging_options
@pass_session
def list_usage(
    session: CliSession,
    /,
    *,
    by: tuple[str, ...],
    organisation: str | None,
    paging: Paging,
    **others: str | None,
) -> None:
    """List counts by time.

    Rows that are not closed still grow: a transaction that began in their time may be open.
    """
    with session.client() as client:
        params = _params(client, by, organisation, **others)
        page = client.page("/usage", params=params, **paging)
    names = [name for one in UsageDimension if one in by for name in _GROUPS[one]]
    columns = {name.replace("_", " "): name for name in ("start", *names, *_COUNTS, "closed")}
    session.output().listing(page, columns, empty="nothing was counted in this time")


@usage.command()
@_query_options
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write to this file.  [default: standard output]",
)
@pass_session
def export(
    session: CliSession,
    /,
    *,
    by: tuple[str, ...],
    organisation: str | None,
    out: Path | None,
    **others: str | None,
) -> None:
    """Export counts as CSV. A file appears under its name only when it is complete."""
    with session.client() as client:
        params = _params(client, by, organisation, **others)
        chunks = client.stream_export("/usage/export", params)
        if out is None:
            for chunk in chunks:
                sys.stdout.buffer.write(chunk)
            return
        write_whole(out, chunks)
    session.output().note(f"exported to {out}")


usage.add_command(last_hour)
