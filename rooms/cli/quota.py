"""Implement `rooms quota`: limits of organisations and rooms, and what is used of them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import click

from rooms.cli.context import CliSession, Group, pass_session
from rooms.cli.options import find_organisation, find_room, patch_body, set_fields
from rooms.domain.quota import QuotaLimit

if TYPE_CHECKING:
    from rooms.cli.client import ApiClient

_OPTIONS: Final = {
    QuotaLimit.MESSAGES_PER_S: "Messages in a second.",
    QuotaLimit.MESSAGES_PER_DAY: "Messages in a day of UTC.",
    QuotaLimit.BYTES_PER_DAY: "Bytes of payloads in a day of UTC.",
    QuotaLimit.PAYLOAD_BYTES: "Bytes of one payload.",
    QuotaLimit.STORED_MESSAGES: "Messages that are kept.",
    QuotaLimit.SUBSCRIPTIONS: "Subscriptions of the organisation, or to the room.",
    QuotaLimit.EXPIRATION_MS: "Longest lifetime of messages; of an organisation only.",
}
_LEAST: Final = {
    QuotaLimit.MESSAGES_PER_S: 1,
    QuotaLimit.PAYLOAD_BYTES: 1,
    QuotaLimit.EXPIRATION_MS: 1000,
}
"""The least values; that of the others is 0, which allows nothing."""


class _Limit(click.IntRange):
    """Take a limit. An error says how to remove one, because 0 does not."""

    def __init__(self, limit: QuotaLimit) -> None:
        super().__init__(min=_LEAST.get(limit, 0))
        self._limit = limit

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return int(super().convert(value, param, ctx))
        except click.BadParameter as exc:
            remedy = f"to remove the limit, use --clear {_flag_text(self._limit)}"
            self.fail(f"{exc.message.rstrip('.')}; {remedy}", param, ctx)


def _flag_text(limit: QuotaLimit) -> str:
    return limit.replace("_", "-")


@click.group(cls=Group)
def quota() -> None:
    """Show and set limits of an organisation or a room, and what is used of them.

    The platform sets those of organisations, the owner those of a room.
    """


def _subject_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--room", help="Of this room, by id or name; needs its owner's key."),
        click.option(
            "--organisation",
            help="Of this one, by id, name or member id; needs the scope platform.",
        ),
    ):
        command = option(command)
    return command


def _limit_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for name, help_text in reversed(_OPTIONS.items()):
        flag = f"--{_flag_text(name)}"
        command = click.option(flag, name.value, type=_Limit(name), help=help_text)(command)
    return command


def _path(client: "ApiClient", organisation: str | None, room: str | None) -> str | None:
    if organisation is not None and room is not None:
        raise click.UsageError("--organisation or --room, not both")
    if organisation is not None:
        return f"/organisations/{find_organisation(client, organisation)['id']}/quotas"
    return None if room is None else f"/rooms/{find_room(client, room)['id']}/quotas"


def _show(session: CliSession, found: dict[str, Any]) -> None:
    output = session.output()
    if output.as_json:
        output.document(found)
        return
    limits, used = found["limits"], found["used"]
    output.table(
        ["quota", "limit", "used"],
        [[name, limits[name], _used(name, limits[name], used.get(name))] for name in limits],
        empty="no limit",
    )


def _used(name: str, limit: int | None, used: int | None) -> object:
    """Return what is used as the table shows it: stored messages are counted up to their limit."""
    is_cut = name == QuotaLimit.STORED_MESSAGES and used is not None and used == limit
    return f"{used} or more" if is_cut else used


@quota.command()
@_subject_options
@pass_session
def show(session: CliSession, /, *, organisation: str | None, room: str | None) -> None:
    """Show limits and what is used: of the own organisation, or of another one or a room."""
    with session.client() as client:
        found = client.call("GET", _path(client, organisation, room) or "/quotas")
    _show(session, found)


@quota.command("set")
@_subject_options
@_limit_options
@click.option(
    "--clear",
    type=click.Choice([_flag_text(name) for name in QuotaLimit]),
    multiple=True,
    help="Remove this limit; repeat it for several.",
)
@pass_session
def set_quotas(
    session: CliSession,
    /,
    *,
    organisation: str | None,
    room: str | None,
    clear: tuple[str, ...],
    **limits: int | None,
) -> None:
    """Set or remove limits of an organisation or a room; others stay as they are.

    0 allows nothing; --clear removes a limit.
    """
    body = patch_body(set_fields(**limits), clear)
    with session.client() as client:
        path = _path(client, organisation, room)
        if path is None:
            raise click.UsageError("name whose quotas: --organisation or --room")
        found = client.call("PATCH", path, json=body)
    _show(session, found)
