"""`rooms messages` and `rooms journey`: what was published, and what happened to it."""

from datetime import datetime
from typing import Any

import click

from rooms.cli.fields import filtered, given, paged
from rooms.cli.references import find_room, identity
from rooms.cli.session import Command, Session, pass_session

_COLUMNS = {
    "id": "id",
    "published": "published_at",
    "event type": "event_type",
    "version": "version",
    "correlation id": "correlation_id",
}


@click.command(cls=Command)
@click.argument("room")
@filtered
@paged
@pass_session
def messages(session: Session, /, *, room: str, limit: int, cursor: str | None, whole: bool, **wanted: Any) -> None:
    """The messages of a room, newest first."""
    with session.client() as client:
        found = find_room(client, room)
        path = f"/rooms/{found['id']}/messages"
        page = client.page(path, params=given(**wanted), limit=limit, cursor=cursor, whole=whole)
    session.output().listing(page, _COLUMNS, empty="no messages")


@click.command(cls=Command)
@click.argument("message_id")
@pass_session
def journey(session: Session, /, *, message_id: str) -> None:
    """What happened to a message, step by step."""
    with session.client() as client:
        page = client.page(f"/messages/{identity(message_id)}/journey", whole=True)
    out = session.output()
    if out.as_json:
        out.document(page)
        return
    steps = page["items"]
    begin = _moment(steps[0]) if steps else None
    rows = [
        [
            _after(step, begin),
            step.get("kind"),
            _short(step.get("subscription_id")),
            step.get("attempt"),
            step.get("http_status"),
            None if step.get("latency_ms") is None else f"{step['latency_ms']:.1f}",
            _told(step),
        ]
        for step in steps
    ]
    if steps:
        out.line(f"{steps[0].get('event_type') or 'message'} {message_id}, {steps[0].get('ts')}")
    out.table(["at", "step", "subscription", "attempt", "status", "ms", "detail"], rows, empty="nothing is known of it")


def _moment(step: dict[str, Any]) -> datetime | None:
    try:
        return datetime.fromisoformat(str(step.get("ts")))
    except ValueError:
        return None


def _after(step: dict[str, Any], begin: datetime | None) -> str:
    at = _moment(step)
    return str(step.get("ts")) if at is None or begin is None else f"+{(at - begin).total_seconds():.3f} s"


def _short(identity_: str | None) -> str | None:
    # The first digits of ids that were made together are alike; the last are the room's. The middle tells them apart.
    return None if identity_ is None else f"…{identity_[14:28]}…"


def _told(step: dict[str, Any]) -> str | None:
    wait = (
        f"due in {step['delay_ms']} ms"
        if step.get("kind") == "retry_scheduled" and step.get("delay_ms") is not None
        else None
    )
    parts = [wait, step.get("error_class"), step.get("detail")]
    return ", ".join(str(part) for part in parts if part) or None
