"""`rooms sideline`: what could not be delivered to a subscription."""

from collections.abc import Callable
from typing import Any

import click

from rooms.cli.errors import CliError
from rooms.cli.fields import given, paged, sure
from rooms.cli.job import ask
from rooms.cli.output import Output
from rooms.cli.references import find_subscription, identity
from rooms.cli.session import Group, Session, pass_session
from rooms.domain.states import Reason

_COLUMNS = {
    "delivery": "delivery_id",
    "sidelined": "sidelined_at",
    "reason": "reason",
    "attempts": "attempts",
    "shovels": "shovel_count",
    "status": "last_status",
    "error": "last_error",
    "event type": "event_type",
    "correlation id": "correlation_id",
}
_REASONS = [
    reason.value
    for reason in (
        Reason.ATTEMPTS_EXHAUSTED,
        Reason.TERMINAL_STATUS,
        Reason.NACKED,
        Reason.STUCK,
        Reason.UNREADABLE,
        Reason.ORPHAN,
    )
]


def _narrowed(command: Callable[..., Any]) -> Callable[..., Any]:
    """What of a sideline is meant; each option is named as its field of the request."""
    for option in (
        click.option("--error", help="Only where the last error contains this text."),
        click.option("--event-type", help="Only this type."),
        click.option("--reason", type=click.Choice(_REASONS), help="Only what was sidelined for this reason."),
        click.option("--until", help="Sidelined before this time (RFC 3339)."),
        click.option("--since", help="Sidelined at this time or later (RFC 3339)."),
    ):
        command = option(command)
    return command


def _chosen(command: Callable[..., Any]) -> Callable[..., Any]:
    """`_narrowed`, and single ones by name."""
    for option in (
        click.option("--delivery-id", "delivery_ids", multiple=True, help="Only this delivery; may be repeated."),
        click.option("--correlation-id", "correlation_ids", multiple=True, help="Only these; may be repeated."),
    ):
        command = option(command)
    return _narrowed(command)


def _body(delivery_ids: tuple[str, ...], **wanted: Any) -> dict[str, Any]:
    return given(**wanted, delivery_ids=tuple(identity(one) for one in delivery_ids))


@click.group(cls=Group)
def sideline() -> None:
    """What could not be delivered: look through it, bring it back, or end it. SUBSCRIPTION is an id, or ROOM/NAME."""


@sideline.command("list")
@click.argument("subscription")
@_narrowed
@click.option("--correlation-id", help="Only this one.")
@paged
@pass_session
def list_sidelined(
    session: Session, /, *, subscription: str, limit: int, cursor: str | None, whole: bool, **wanted: Any
) -> None:
    """What rests in SUBSCRIPTION's sideline and why, the longest resting first."""
    with session.client() as client:
        found = find_subscription(client, subscription)
        path = f"/subscriptions/{found['id']}/sideline"
        page = client.page(path, params=given(**wanted), limit=limit, cursor=cursor, whole=whole)
    session.output().listing(page, _COLUMNS, empty="the sideline is empty")


@sideline.command()
@click.argument("subscription")
@pass_session
def show(session: Session, /, *, subscription: str) -> None:
    """How much rests in SUBSCRIPTION's sideline, by reason, since when, and how its magazine stands."""
    with session.client() as client:
        found = find_subscription(client, subscription)
        # A purge would end all that rests; a shovel leaves some of it.
        would = client.call("POST", f"/subscriptions/{found['id']}/sideline/purge", json={"dry_run": True})
        magazine = client.call("GET", f"/magazines/subscription-{found['id']}_SIDELINE")
    session.output().resource(
        {
            "subscription_id": found["id"],
            "name": found["name"],
            "sidelined": would["would_move"],
            "oldest_sidelined_at": magazine["oldest_at"],
            "by_reason": would["by_reason"],
            "magazine": magazine["name"],
            "magazine_depth": magazine["depth"],
        }
    )


@sideline.command()
@click.argument("subscription")
@_chosen
@click.option("--dry-run", is_flag=True, help="Only say what would be brought back.")
@click.option("--rate", "rate_per_s", type=click.FloatRange(0, min_open=True), help="Deliveries a second.")
@click.option("--concurrency", type=click.IntRange(1), help="Batches under way at a time.")
@click.option("--max-shovels", type=click.IntRange(1), help="What came back so often already stays.")
@click.option("--follow", is_flag=True, help="Wait for the end, with a progress bar.")
@pass_session
def shovel(session: Session, /, *, subscription: str, dry_run: bool, follow: bool, **wanted: Any) -> None:
    """Queue what rests in SUBSCRIPTION's sideline again, its attempts counted anew; without a filter, all of it."""
    body = _body(**wanted) | ({"dry_run": True} if dry_run else {})
    with session.client() as client:
        found = find_subscription(client, subscription)
        answer = client.call("POST", f"/subscriptions/{found['id']}/sideline/shovel", json=body)
        if dry_run:
            _would(session.output(), answer)
            return
        ask(session, client, answer, follow=follow)


@sideline.command()
@click.argument("subscription")
@_chosen
@click.option("--dry-run", is_flag=True, help="Only say what would end.")
@click.option("--confirm", help="The subscription's name: the same as --yes, checked.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--follow", is_flag=True, help="Wait for the end, with a progress bar.")
@pass_session
def purge(
    session: Session,
    /,
    *,
    subscription: str,
    dry_run: bool,
    confirm: str | None,
    yes: bool,
    follow: bool,
    **wanted: Any,
) -> None:
    """End what rests in SUBSCRIPTION's sideline: nobody gets it any more; without a filter, all of it."""
    body = _body(**wanted)
    with session.client() as client:
        found = find_subscription(client, subscription)
        path = f"/subscriptions/{found['id']}/sideline/purge"
        would = client.call("POST", path, json=body | {"dry_run": True})
        if dry_run:
            _would(session.output(), would)
            return
        if confirm is not None and confirm != found["name"]:
            raise CliError(f"the subscription's name is {found['name']!r}, not {confirm!r}: nothing was changed")
        sure(
            f"End {would['would_move']} deliveries in the sideline of {found['name']!r}?",
            yes=yes or confirm is not None,
        )
        answer = client.call("POST", path, json=body, params={"confirm": found["name"]})
        ask(session, client, answer, follow=follow)


@sideline.command()
@click.argument("subscription")
@click.option("--every", "interval_s", type=click.IntRange(1), metavar="S", help="Shovel it every so many seconds.")
@click.option("--rate", "rate_per_s", type=click.FloatRange(0, min_open=True), help="Deliveries a second.")
@click.option("--concurrency", type=click.IntRange(1), help="Batches under way at a time.")
@click.option("--max-shovels", type=click.IntRange(1), help="What came back so often already stays.")
@click.option("--off", is_flag=True, help="Shovel it no more by itself.")
@pass_session
def schedule(session: Session, /, *, subscription: str, off: bool, **wanted: Any) -> None:
    """Shovel SUBSCRIPTION's sideline by itself every so often; without options, show when."""
    body = given(**wanted)
    if body and (off or "interval_s" not in body):
        raise click.UsageError("--every goes with the other options, and none with --off")
    with session.client() as client:
        path = f"/subscriptions/{find_subscription(client, subscription)['id']}/sideline/schedule"
        if off:
            client.call("DELETE", path)
            return
        session.output().resource(client.call("PUT", path, json=body) if body else client.call("GET", path))


def _would(output: Output, answer: dict[str, Any]) -> None:
    if output.as_json:
        output.document(answer)
        return
    output.line(f"{answer['would_move']} deliveries would be moved")
    output.table(["reason", "deliveries"], sorted(answer["by_reason"].items()), empty="nothing of the kind rests there")
    for count, what in (("too_often", "came back too often and would stay"), ("expired", "expired and would end")):
        if answer.get(count):
            output.line(f"{answer[count]} {what}")
    if answer["sample"]:
        output.line("The first of them:")
        rows = [[one.get(field) for field in _COLUMNS.values()] for one in answer["sample"]]
        output.table(list(_COLUMNS), rows)
