"""Implement `rooms usage`, and `rooms subscription activity`: what was published and delivered.

Usage is counted by the minute, hour or day; activity is the last hour by the minute.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from rooms.cli.context import CliSession, Command, Group, pass_session
from rooms.cli.options import (
    Paging,
    find_organisation,
    find_subscription,
    paging_options,
    set_fields,
)
from rooms.cli.output import Column, Output, format_cell, write_export
from rooms.domain.ids import is_id
from rooms.domain.usage import MINUTE_COUNTERS, UsageDimension, UsagePeriod

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
_LATENCIES: Final = ("p50_ms", "p95_ms", "p99_ms")
_FIELDS: Final = ("start", *MINUTE_COUNTERS, *_LATENCIES)


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
        click.option(
            "--own",
            is_flag=True,
            help="Only what the organisation itself published or got, without what others do in "
            "its rooms.",
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
    client: "ApiClient",
    by: tuple[str, ...],
    organisation: str | None,
    *,
    own: bool,
    **others: str | None,
) -> dict[str, Any]:
    if not (organisation is None or organisation == _EVERY_ORGANISATION or is_id(organisation)):
        organisation = str(find_organisation(client, organisation)["id"])
    return set_fields(
        by=",".join(by), organisation_id=organisation, own="true" if own else None, **others
    )


def _room_name(row: Mapping[str, Any]) -> object:
    is_gone = row["room_name"] is None and row["room_id"] is not None
    return "(deleted, or not shared any more)" if is_gone else row["room_name"]


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
    own: bool,
    paging: Paging,
    **others: str | None,
) -> None:
    """List counts by time.

    Rows that are not closed still grow: a transaction that began in their time may be open.
    """
    with session.client() as client:
        params = _params(client, by, organisation, own=own, **others)
        page = client.page("/usage", params=params, **paging)
    names = [name for one in UsageDimension if one in by for name in _GROUPS[one]]
    shown = ("start", *names, *_COUNTS, "closed")
    columns: dict[str, Column] = {name.replace("_", " "): name for name in shown}
    if "room_name" in names:
        columns["room name"] = _room_name
    output = session.output()
    output.listing(page, columns, empty="nothing was counted in this time")
    if (counted := page.get("complete_until")) and not output.as_json:
        output.note(f"everything before {counted} is counted")


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
    own: bool,
    out: Path | None,
    **others: str | None,
) -> None:
    """Export counts as CSV. A file appears under its name only when it is complete."""
    with session.client() as client:
        params = _params(client, by, organisation, own=own, **others)
        chunks = client.stream_export("/usage/export", params)
        write_export(chunks, out)
    if out is not None:
        session.output().note(f"exported to {out}")


@usage.command("last-hour")
@click.option(
    "--organisation",
    help="Of another one, by id, name or member id, or '*'; needs the scope platform.",
)
@pass_session
def last_hour(session: CliSession, /, *, organisation: str | None) -> None:
    """Count the deliveries of the last hour by the minute, with the times that calls took.

    Minutes in which nothing happened are left out. The last one still grows.
    """
    with session.client() as client:
        if not (organisation is None or organisation == _EVERY_ORGANISATION or is_id(organisation)):
            organisation = str(find_organisation(client, organisation)["id"])
        found = client.call("GET", "/activity", params=set_fields(organisation_id=organisation))
    _show_activity(session.output(), found)


@click.command(cls=Command)
@click.argument("subscription")
@pass_session
def activity(session: CliSession, /, *, subscription: str) -> None:
    """Count the last hour of a subscription by the minute, with the times that calls took.

    Minutes in which nothing happened are left out. The last one still grows.
    """
    with session.client() as client:
        found = find_subscription(client, subscription)
        answer = client.call("GET", f"/subscriptions/{found['id']}/activity")
    _show_activity(session.output(), answer)


def _show_activity(output: Output, found: Mapping[str, Any]) -> None:
    if output.as_json:
        output.document(found)
        return
    rows = [one for one in found["minutes"] if any(one[name] for name in MINUTE_COUNTERS)]
    output.table(
        [name.replace("_", " ") for name in _FIELDS],
        [[one[name] for name in _FIELDS] for one in rows],
        empty="nothing was delivered in the last hour",
    )
    latency = found["latency"]
    if latency["p50_ms"] is not None:
        shares = ", ".join(f"{name[:3]} {format_cell(latency[name])} ms" for name in _LATENCIES)
        output.line(f"calls of the hour: {shares}")
