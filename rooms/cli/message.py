"""`rooms messages`, `rooms message` and `rooms journey`: what was published, what happened to it, and what shall not happen."""

from contextlib import suppress
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from rooms.cli.errors import ProblemError
from rooms.cli.fields import filtered, given, paged
from rooms.cli.references import find_message, find_room, identity
from rooms.cli.session import Command, Group, Session, pass_session

if TYPE_CHECKING:
    from rooms.cli.client import Client

_COLUMNS = {
    "id": "id",
    "published": "published_at",
    "due": "due_at",
    "event type": "event_type",
    "version": "version",
    "correlation id": "correlation_id",
}

_MOST_NAMES = 20
_WAITS = {"published", "retry_scheduled", "restored"}


@click.command(cls=Command)
@click.argument("room")
@filtered
@click.option("--business-key", help="Only with this business key.")
@click.option("--id", help="Only the one that its publisher gave this id.")
@paged
@pass_session
def messages(session: Session, /, *, room: str, limit: int, cursor: str | None, whole: bool, **wanted: Any) -> None:
    """The messages of a room, newest first."""
    with session.client() as client:
        found = find_room(client, room)
        path = f"/rooms/{found['id']}/messages"
        page = client.page(path, params=given(**wanted), limit=limit, cursor=cursor, whole=whole)
    session.output().listing(page, _COLUMNS, empty="no messages")


@click.group(cls=Group)
def message() -> None:
    """One message: look at it, take it back or put it off before it is delivered.

    MESSAGE is the id that publishing answered, or ROOM/ID with an id of the publisher's own.
    """


@message.command()
@click.argument("message")
@pass_session
def show(session: Session, /, *, message: str) -> None:
    """A message with its payload, and how it stands."""
    with session.client() as client:
        found = client.call("GET", f"/messages/{find_message(client, message)}")
    session.output().resource(found)


@message.command()
@click.argument("message")
@pass_session
def withdraw(session: Session, /, *, message: str) -> None:
    """Cancel what nobody has yet of a message."""
    with session.client() as client:
        found = client.call("DELETE", f"/messages/{find_message(client, message)}")
    _show_fates(session, found)


@message.command()
@click.argument("message")
@click.option("--delay-ms", type=click.IntRange(0), help="Due so long from now.")
@click.option("--deliver-at", metavar="TIME", help="Due at this time, like 2026-01-31T12:00:00Z.")
@pass_session
def move(session: Session, /, *, message: str, **due: Any) -> None:
    """Have a message come due at another time; its lifetime moves with it."""
    body = given(**due)
    if len(body) != 1:
        raise click.UsageError("give --delay-ms or --deliver-at, one of them")
    with session.client() as client:
        found = client.call("PATCH", f"/messages/{find_message(client, message)}", json=body)
    _show_fates(session, found)


def _show_fates(session: Session, found: dict[str, Any]) -> None:
    out = session.output()
    if out.as_json:
        out.document(found)
        return
    if "due_at" in found:
        out.line(f"due {found['due_at']}, expires {found['expires_at'] or 'never'}")
    rows = [[one["delivery_id"], one["subscription_id"], one["result"]] for one in found["deliveries"]]
    out.table(["delivery", "subscription", "result"], rows)


@click.command(cls=Command)
@click.argument("message_id")
@pass_session
def journey(session: Session, /, *, message_id: str) -> None:
    """What happened to a message, step by step."""
    with session.client() as client:
        page = client.page(f"/messages/{identity(message_id)}/journey", whole=True)
        steps = page["items"]
        names = {} if session.as_json else _names(client, steps)
    out = session.output()
    if out.as_json:
        out.document(page)
        return
    begin = _moment(steps[0]) if steps else None
    rows = [
        [
            _after(step, begin),
            step.get("kind"),
            names.get(step.get("subscription_id"), _short(step.get("subscription_id"))),
            step.get("attempt"),
            step.get("http_status"),
            None if step.get("latency_ms") is None else f"{step['latency_ms']:.1f}",
            _by(step),
            _told(step),
        ]
        for step in steps
    ]
    if steps:
        out.line(f"{steps[0].get('event_type') or 'message'} {message_id}, {steps[0].get('ts')}")
    out.table(
        ["at", "step", "subscription", "attempt", "status", "ms", "by", "detail"], rows, empty="nothing is known of it"
    )


def _moment(step: dict[str, Any]) -> datetime | None:
    try:
        return datetime.fromisoformat(str(step.get("ts")))
    except ValueError:
        return None


def _after(step: dict[str, Any], begin: datetime | None) -> str:
    at = _moment(step)
    return str(step.get("ts")) if at is None or begin is None else f"+{(at - begin).total_seconds():.3f} s"


def _names(client: "Client", steps: list[dict[str, Any]]) -> dict[str | None, str]:
    """What the subscriptions are called, as far as they are there, may be read, and are not too many to ask for."""
    names: dict[str | None, str] = {}
    for one in islice(dict.fromkeys(step.get("subscription_id") for step in steps), _MOST_NAMES):
        with suppress(ProblemError):
            if one is not None:
                names[one] = client.call("GET", f"/subscriptions/{one}")["name"]
    return names


def _short(identity_: str | None) -> str | None:
    # The first digits of ids that were made together are alike; the last are the room's. The middle tells them apart.
    return None if identity_ is None else f"…{identity_[14:28]}…"


def _by(step: dict[str, Any]) -> str | None:
    parts = [step.get("writer_kind"), step.get("writer"), step.get("worker_host") and f"on {step['worker_host']}"]
    return " ".join(str(part) for part in parts if part) or None


def _told(step: dict[str, Any]) -> str | None:
    wait = f"due in {step['delay_ms']} ms" if step.get("kind") in _WAITS and step.get("delay_ms") is not None else None
    parts = [wait, step.get("error_class"), step.get("detail")]
    return ", ".join(str(part) for part in parts if part) or None
