"""Implement the commands that list, show, cancel, reschedule and redeliver messages."""

from contextlib import suppress
from datetime import datetime
from http import HTTPStatus
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from rooms.cli.context import CliSession, Command, Group, pass_session, renamed
from rooms.cli.errors import CliError, ProblemError
from rooms.cli.options import (
    Paging,
    filter_options,
    find_message,
    find_room,
    find_subscription,
    list_of_subscription,
    message_path,
    paging_options,
    parse_id,
    set_fields,
)
from rooms.domain.ids import COUNTER_DIGITS
from rooms.domain.state_machine import State

if TYPE_CHECKING:
    from rooms.cli.client import ApiClient

_MESSAGE_COLUMNS = {
    "id": "id",
    "published": "published_at",
    "due": "due_at",
    "event type": "event_type",
    "version": "version",
    "status": "status",
    "correlation id": "correlation_id",
}

_MAX_NAMES = 20
_WAITING = {State.QUEUED, State.SCHEDULED}
_DELAYED_KINDS = {"published", "retry_scheduled", "restored"}
_DELIVERY_COLUMNS = {
    "id": "id",
    "message": "message_id",
    "state": "state",
    "reason": "reason",
    "attempts": "attempts",
    "next": "next_attempt_at",
    "status": "last_status",
    "error": "last_error",
}


@click.command(cls=Command)
@click.argument("room")
@filter_options
@click.option("--business-key", help="Only messages with this business key.")
@click.option("--id", help="Only the message with this id of its publisher.")
@click.option("--publisher", help="Only messages of the organisation with this id.")
@click.option("--application", help="Only messages of this application of their publishers.")
@click.option(
    "--subscription", help="Only messages with a delivery to this subscription (id, or ROOM/NAME)."
)
@paging_options
@pass_session
def messages(
    session: CliSession,
    /,
    *,
    room: str,
    publisher: str | None,
    subscription: str | None,
    paging: Paging,
    **wanted: Any,
) -> None:
    """List the messages of a room that you may see, newest first."""
    with session.client() as client:
        found = find_room(client, room)
        path = f"/rooms/{found['id']}/messages"
        if subscription is not None:
            subscription = find_subscription(client, subscription)["id"]
        params = set_fields(
            **wanted,
            publisher_organisation_id=publisher,
            subscription_id=subscription,
            with_states="true",
        )
        page = client.page(path, params=params, **paging)
    session.output().listing(page, _MESSAGE_COLUMNS, empty="no messages")


@click.group(cls=Group)
def message() -> None:
    """Show a message, or cancel or reschedule it before it is delivered.

    MESSAGE is the id that publishing returned, or ROOM/ID with the publisher's own id.
    """


@message.command()
@click.argument("message")
@pass_session
def show(session: CliSession, /, *, message: str) -> None:
    """Show a message with its payload and its state."""
    with session.client() as client:
        found = client.call("GET", message_path(client, message))
    session.output().resource(found)


@message.command()
@click.argument("message")
@pass_session
def cancel(session: CliSession, /, *, message: str) -> None:
    """Cancel the deliveries of a message that have not started."""
    with session.client() as client:
        found = client.call("DELETE", message_path(client, message))
    _show_results(session, found)


@message.command()
@click.argument("message")
@click.option("--delay-ms", type=click.IntRange(0), help="Delay in milliseconds from now.")
@click.option("--deliver-at", metavar="TIME", help="Due time, such as 2026-01-31T12:00:00Z.")
@pass_session
def reschedule(session: CliSession, /, *, message: str, **due: Any) -> None:
    """Change when a message is due. Its expiry moves by the same amount."""
    body = set_fields(**due)
    if len(body) != 1:
        raise click.UsageError("give one of --delay-ms and --deliver-at")
    with session.client() as client:
        found = client.call("PATCH", message_path(client, message), json=body)
    _show_results(session, found)


message.add_command(renamed(cancel, "message withdraw", "message cancel"))
message.add_command(renamed(reschedule, "message move", "message reschedule"))


def _show_results(session: CliSession, found: dict[str, Any]) -> None:
    out = session.output()
    if out.as_json:
        out.document(found)
        return
    if "due_at" in found:
        out.line(f"due {found['due_at']}, expires {found['expires_at'] or 'never'}")
    rows = [
        [one["delivery_id"], one["subscription_id"], one["result"]] for one in found["deliveries"]
    ]
    out.table(["delivery", "subscription", "result"], rows)


@click.command(cls=Command)
@click.argument("message")
@click.option("--delivery", metavar="ID", help="Only the steps of this delivery.")
@pass_session
def timeline(session: CliSession, /, *, message: str, delivery: str | None) -> None:
    """Show every step of a message in order.

    MESSAGE is the id that publishing returned, or ROOM/ID with the publisher's own id.
    """
    with session.client() as client:
        message_id = find_message(client, message)
        page = client.page(
            f"/messages/{message_id}/journey", params={"delivery_id": delivery}, whole=True
        )
        steps = page["items"]
        names = {} if session.as_json else _subscription_names(client, steps)
    out = session.output()
    if out.as_json:
        out.document(page)
        return
    begin = _step_time(steps[0]) if steps else None
    rows = [
        [
            _format_elapsed(step, begin),
            step.get("kind"),
            names.get(step.get("subscription_id"), _short_id(step.get("subscription_id"))),
            step.get("attempt"),
            step.get("http_status"),
            None if step.get("latency_ms") is None else f"{step['latency_ms']:.1f}",
            _format_actor(step),
            _format_detail(step),
        ]
        for step in steps
    ]
    if steps:
        out.line(f"{steps[0].get('event_type') or 'message'} {message_id}, {steps[0].get('ts')}")
    out.table(
        ["at", "step", "subscription", "attempt", "status", "ms", "by", "detail"],
        rows,
        empty="no steps are recorded",
    )


journey = renamed(timeline, "journey", "timeline")


def _step_time(step: dict[str, Any]) -> datetime | None:
    try:
        return datetime.fromisoformat(str(step.get("ts")))
    except ValueError:
        return None


def _format_elapsed(step: dict[str, Any], begin: datetime | None) -> str:
    at = _step_time(step)
    return (
        str(step.get("ts"))
        if at is None or begin is None
        else f"+{(at - begin).total_seconds():.3f} s"
    )


def _subscription_names(client: "ApiClient", steps: list[dict[str, Any]]) -> dict[str | None, str]:
    """Return the names of at most _MAX_NAMES subscriptions that exist and that the key may read."""
    names: dict[str | None, str] = {}
    for one in islice(dict.fromkeys(step.get("subscription_id") for step in steps), _MAX_NAMES):
        with suppress(ProblemError):
            if one is not None:
                names[one] = client.call("GET", f"/subscriptions/{one}")["name"]
    return names


def _short_id(subscription_id: str | None) -> str | None:
    return None if subscription_id is None else f"…{subscription_id[COUNTER_DIGITS]}…"


def _format_actor(step: dict[str, Any]) -> str | None:
    parts = [
        step.get("writer_kind"),
        step.get("writer"),
        step.get("worker_host") and f"on {step['worker_host']}",
    ]
    return " ".join(str(part) for part in parts if part) or None


def _format_detail(step: dict[str, Any]) -> str | None:
    wait = (
        f"due in {step['delay_ms']} ms"
        if step.get("kind") in _DELAYED_KINDS and step.get("delay_ms") is not None
        else None
    )
    parts = [wait, step.get("error_class"), step.get("detail")]
    return ", ".join(str(part) for part in parts if part) or None


@click.command(cls=Command)
@click.argument("subscription")
@filter_options
@paging_options
@pass_session
def deliveries(session: CliSession, /, *, subscription: str, **wanted: Any) -> None:
    """List the deliveries of SUBSCRIPTION (an id, or ROOM/NAME), newest first."""
    list_of_subscription(
        session, subscription, "deliveries", _DELIVERY_COLUMNS, empty="no deliveries", **wanted
    )


@click.command(cls=Command)
@click.argument("delivery_id")
@pass_session
def redeliver(session: CliSession, /, *, delivery_id: str) -> None:
    """Send a delivery again, with new attempts: a sidelined, expired, cancelled or dropped one.

    `rooms subscription retry` sends at once what waits for its next attempt.
    """
    path = f"/deliveries/{parse_id(delivery_id)}"
    with session.client() as client:
        try:
            answer = client.call("POST", f"{path}/redeliver")
        except ProblemError as exc:
            exc.advice = _advise(client, path, exc.status)
            raise
    if answer is not None:
        session.output().resource(answer)


def _advise(client: "ApiClient", path: str, status: int) -> str:
    """Return the better command where a delivery is unknown, or waits for its next attempt."""
    if status == HTTPStatus.NOT_FOUND:
        return (
            "`rooms deliveries SUBSCRIPTION` lists deliveries; "
            "`rooms subscription retry SUBSCRIPTION` sends at once what waits for a retry"
        )
    if status == HTTPStatus.CONFLICT:
        with suppress(CliError):
            found = client.call("GET", path)
            if found["state"] in _WAITING and found["attempt"]:
                return (
                    f"it waits for a retry: `rooms subscription retry {found['subscription_id']}`"
                    " sends at once what waits for one"
                )
    return ""
