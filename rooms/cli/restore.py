"""`rooms restore`, `rooms clear`, `rooms replay`, `rooms recover`: jobs that bring deliveries back, or clear them away."""

from collections.abc import Callable
from typing import Any

import click

from rooms.cli.errors import CliError
from rooms.cli.fields import given, paged, sure
from rooms.cli.job import ask
from rooms.cli.references import find_room, find_subscription, identity
from rooms.cli.session import Command, Session, pass_session
from rooms.domain.job import JobKind, JobState
from rooms.domain.states import UNFINISHED, Event
from rooms.domain.transitions import sources

_STATES = [state.value for state in sorted(UNFINISHED | sources(Event.RESTORE))]


def _followed(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--follow", is_flag=True, help="Wait for the end, with a progress bar.")(command)


@click.command(cls=Command)
@click.argument("room", required=False)
@click.option("--message", help="Only this message, by its id; in place of ROOM.")
@click.option("--include-expired", is_flag=True, help="Also what expired, with the room's lifetime anew.")
@click.option("--since", help="Only what was published at this time or later (RFC 3339).")
@click.option(
    "--states", type=click.Choice(_STATES), multiple=True, help="Only what is in this state; may be repeated."
)
@_followed
@pass_session
def restore(
    session: Session,
    /,
    *,
    room: str | None,
    message: str | None,
    include_expired: bool,
    since: str | None,
    states: tuple[str, ...],
    follow: bool,
) -> None:
    """Restore what is unfinished in ROOM, or of one message: what has lost its place is on its way again.

    `--states expired` (cancelled, dropped) brings back what ended, its attempts counted anew.
    """
    if (room is None) == (message is None):
        raise click.UsageError("either ROOM or --message says what to restore")
    if message is not None and since is not None:
        raise click.UsageError("--since goes with ROOM")
    body = given(since=since, states=states) | ({"include_expired": True} if include_expired else {})
    with session.client() as client:
        path = f"/rooms/{find_room(client, room)['id']}" if room else f"/messages/{identity(message or '')}"
        ask(session, client, client.call("POST", f"{path}/restore", json=body), follow=follow)


@click.command(cls=Command)
@click.argument("room")
@click.option("--confirm", help="The room's name: the same as --yes, checked.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@_followed
@pass_session
def clear(session: Session, /, *, room: str, confirm: str | None, yes: bool, follow: bool) -> None:
    """Cancel all that is unfinished in ROOM: nobody gets it any more. Sidelines stay as they are."""
    with session.client() as client:
        found = find_room(client, room)
        if confirm is not None and confirm != found["name"]:
            raise CliError(f"the room's name is {found['name']!r}, not {confirm!r}: nothing was changed")
        sure(f"Cancel all that is unfinished in room {found['name']!r}?", yes=yes or confirm is not None)
        answer = client.call("POST", f"/rooms/{found['id']}/clear", params={"confirm": found["name"]})
        ask(session, client, answer, follow=follow)


@click.command(cls=Command)
@click.argument("subscription")
@click.option("--since", help="What was published at this time or later (RFC 3339).")
@click.option("--from-message", "from_message_id", help="This message and all after it.")
@click.option("--until", help="Only what was published before this time (RFC 3339).")
@click.option("--event-type", "event_types", multiple=True, help="Only this type; may be repeated.")
@click.option("--rate", "rate_per_s", type=click.FloatRange(0, min_open=True), help="Deliveries a second.")
@click.option("--include-expired", is_flag=True, help="Also what expired, with the room's lifetime anew.")
@_followed
@pass_session
def replay(session: Session, /, *, subscription: str, include_expired: bool, follow: bool, **wanted: Any) -> None:
    """Give SUBSCRIPTION (an id, or ROOM/NAME) the room's past messages, whether it had them before or not."""
    if (wanted["since"] is None) == (wanted["from_message_id"] is None):
        raise click.UsageError("either --since or --from-message says where to begin")
    body = given(**wanted) | ({"include_expired": True} if include_expired else {})
    with session.client() as client:
        found = find_subscription(client, subscription)
        ask(session, client, client.call("POST", f"/subscriptions/{found['id']}/replay", json=body), follow=follow)


@click.command(cls=Command)
@_followed
@pass_session
def recover(session: Session, /, *, follow: bool) -> None:
    """Send again what a broker has lost: all that is unfinished and was in it."""
    with session.client() as client:
        ask(session, client, client.call("POST", "/recover"), follow=follow)


@click.command(cls=Command)
@click.option("--kind", type=click.Choice([kind.value for kind in JobKind]), help="Only jobs of this kind.")
@click.option("--state", type=click.Choice([state.value for state in JobState]), help="Only jobs in this state.")
@click.option("--room", help="Only jobs on this room.")
@paged
@pass_session
def jobs(session: Session, /, *, room: str | None, limit: int, cursor: str | None, whole: bool, **wanted: Any) -> None:
    """The jobs that were asked for, newest first."""
    with session.client() as client:
        of = None if room is None else find_room(client, room)["id"]
        page = client.page("/jobs", params=given(**wanted, room_id=of), limit=limit, cursor=cursor, whole=whole)
    columns = {"id": "id", "kind": "kind", "state": "state", "done": "done", "total": "total", "asked": "created_at"}
    session.output().listing(page, columns, empty="no jobs")
