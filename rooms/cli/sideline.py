"""Implement `rooms sideline`: deliveries that failed for good (the dead-letter queue)."""

from collections.abc import Callable, Iterable
from typing import Any

import click

from rooms.cli.context import CliSession, Group, pass_session
from rooms.cli.errors import CliError
from rooms.cli.job import begin_jobs, show_accepted_job
from rooms.cli.options import (
    Paging,
    confirm_or_abort,
    find_subscription,
    find_subscriptions,
    list_of_subscription,
    paging_options,
    parse_id,
    set_fields,
    subscriptions_argument,
)
from rooms.cli.output import Output
from rooms.domain.state_machine import Reason

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
_OVERVIEW_COLUMNS = {
    "subscription": "subscription_id",
    "room": "room",
    "name": "name",
    "sidelined": "sidelined",
    "oldest": "oldest_at",
    "status": "last_status",
    "error": "last_error",
}
_DRY_RUN_COLUMNS = {
    "subscription": "subscription",
    "would be queued": "would_move",
    "shoveled too often": "too_often",
    "expired": "expired",
    "reasons": "by_reason",
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


def _filter_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the filters of a sideline, each named as its field of the request."""
    for option in (
        click.option("--error", help="Only deliveries whose last error contains this text."),
        click.option("--event-type", help="Only this event type."),
        click.option(
            "--reason",
            type=click.Choice(_REASONS),
            help="Only deliveries sidelined for this reason.",
        ),
        click.option("--until", help="Only deliveries sidelined before this time (RFC 3339)."),
        click.option("--since", help="Only deliveries sidelined at this time or later (RFC 3339)."),
    ):
        command = option(command)
    return command


def _selection_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the filters of a sideline, and options for single deliveries."""
    for option in (
        click.option(
            "--delivery-id",
            "delivery_ids",
            multiple=True,
            help="Only this delivery; repeatable.",
        ),
        click.option(
            "--correlation-id",
            "correlation_ids",
            multiple=True,
            help="Only this correlation id; repeatable.",
        ),
        click.option(
            "--ordering-key",
            "ordering_keys",
            multiple=True,
            help="Only messages with this ordering key; repeatable.",
        ),
        click.option(
            "--business-key",
            "business_keys",
            multiple=True,
            help="Only messages with this business key; repeatable.",
        ),
    ):
        command = option(command)
    return _filter_options(command)


def _request_body(delivery_ids: tuple[str, ...], **wanted: Any) -> dict[str, Any]:
    return set_fields(**wanted, delivery_ids=tuple(parse_id(one) for one in delivery_ids))


@click.group(cls=Group)
def sideline() -> None:
    """List, retry or delete failed deliveries. SUBSCRIPTION is an id, or ROOM/NAME."""


@sideline.command("list")
@click.argument("subscription")
@_filter_options
@click.option("--correlation-id", help="Only this correlation id.")
@click.option("--ordering-key", help="Only messages with this ordering key.")
@click.option("--business-key", help="Only messages with this business key.")
@paging_options
@pass_session
def list_sidelined(session: CliSession, /, *, subscription: str, **wanted: Any) -> None:
    """List the sidelined deliveries of SUBSCRIPTION with their reasons, the oldest first."""
    list_of_subscription(
        session, subscription, "sideline", _COLUMNS, empty="the sideline is empty", **wanted
    )


@sideline.command("overview")
@paging_options
@pass_session
def list_all(session: CliSession, /, *, paging: Paging) -> None:
    """List the subscriptions whose sideline is not empty, with the newest error of each."""
    with session.client() as client:
        page = client.page("/sidelines", **paging)
    session.output().listing(page, _OVERVIEW_COLUMNS, empty="nothing is sidelined")


@sideline.command()
@click.argument("subscription")
@pass_session
def show(session: CliSession, /, *, subscription: str) -> None:
    """Show the number of sidelined deliveries of SUBSCRIPTION by reason, and their magazine."""
    with session.client() as client:
        found = find_subscription(client, subscription)
        # A purge counts every delivery; a shovel leaves some out.
        preview = client.call(
            "POST", f"/subscriptions/{found['id']}/sideline/purge", json={"dry_run": True}
        )
        magazine = client.call("GET", f"/magazines/subscription-{found['id']}_SIDELINE")
    session.output().resource(
        {
            "subscription_id": found["id"],
            "name": found["name"],
            "sidelined": preview["would_move"],
            "oldest_sidelined_at": magazine["oldest_at"],
            "by_reason": preview["by_reason"],
            "magazine": magazine["name"],
            "magazine_depth": magazine["depth"],
        }
    )


@sideline.command()
@subscriptions_argument
@_selection_options
@click.option("--dry-run", is_flag=True, help="Only show what would be queued.")
@click.option(
    "--rate",
    "rate_per_s",
    type=click.FloatRange(0, min_open=True),
    help="Deliveries per second, of each subscription.",
)
@click.option("--concurrency", type=click.IntRange(1), help="Concurrent batches.")
@click.option(
    "--max-shovels", type=click.IntRange(1), help="Leave deliveries that were shoveled this often."
)
@click.option("--follow", is_flag=True, help="Wait for the end, with a progress bar.")
@pass_session
def shovel(
    session: CliSession,
    /,
    *,
    subscriptions: tuple[str, ...],
    dry_run: bool,
    follow: bool,
    **wanted: Any,
) -> None:
    """Queue the sidelined deliveries of each SUBSCRIPTION again, with new attempts.

    Without a filter, all of them. If one SUBSCRIPTION does not exist, nothing is queued.
    """
    body = _request_body(**wanted) | ({"dry_run": True} if dry_run else {})
    with session.client() as client:
        found = find_subscriptions(client, subscriptions)
        if not dry_run:
            begin_jobs(session, client, found, "sideline/shovel", body, follow=follow)
            return
        answers = [
            (name, client.call("POST", f"/subscriptions/{identity}/sideline/shovel", json=body))
            for name, identity in found.items()
        ]
    if len(answers) > 1:
        _show_dry_runs(session.output(), answers)
    else:
        _show_dry_run(session.output(), answers[0][1], "queued")


@sideline.command()
@click.argument("subscription")
@_selection_options
@click.option("--dry-run", is_flag=True, help="Only show what would be deleted.")
@click.option("--confirm", help="Name of the subscription. Like --yes, but checked.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--follow", is_flag=True, help="Wait for the end, with a progress bar.")
@pass_session
def purge(
    session: CliSession,
    /,
    *,
    subscription: str,
    dry_run: bool,
    confirm: str | None,
    yes: bool,
    follow: bool,
    **wanted: Any,
) -> None:
    """Delete sidelined deliveries of SUBSCRIPTION for good.

    Without a filter, all of them.
    """
    body = _request_body(**wanted)
    with session.client() as client:
        found = find_subscription(client, subscription)
        path = f"/subscriptions/{found['id']}/sideline/purge"
        preview = client.call("POST", path, json=body | {"dry_run": True})
        if dry_run:
            _show_dry_run(session.output(), preview, "deleted")
            return
        if confirm is not None and confirm != found["name"]:
            raise CliError(
                f"the subscription's name is {found['name']!r}, not {confirm!r}: "
                "nothing was changed"
            )
        confirm_or_abort(
            f"Delete {preview['would_move']} deliveries in the sideline of {found['name']!r}?",
            yes=yes or confirm is not None,
        )
        # What is sidelined while the question is open was not counted in it.
        body["until"] = preview["until"]
        answer = client.call("POST", path, json=body, params={"confirm": found["name"]})
        show_accepted_job(session, client, answer, follow=follow)


@sideline.command()
@click.argument("subscription")
@click.option(
    "--every",
    "interval_s",
    type=click.IntRange(1),
    metavar="S",
    help="Seconds between two passes of the shovel.",
)
@click.option(
    "--rate", "rate_per_s", type=click.FloatRange(0, min_open=True), help="Deliveries per second."
)
@click.option("--concurrency", type=click.IntRange(1), help="Concurrent batches.")
@click.option(
    "--max-shovels", type=click.IntRange(1), help="Leave deliveries that were shoveled this often."
)
@click.option("--off", is_flag=True, help="Remove the schedule.")
@pass_session
def schedule(session: CliSession, /, *, subscription: str, off: bool, **wanted: Any) -> None:
    """Shovel the sideline of SUBSCRIPTION periodically; without options, show the schedule."""
    body = set_fields(**wanted)
    if body and (off or "interval_s" not in body):
        raise click.UsageError("the other options need --every, and --off takes none")
    with session.client() as client:
        path = f"/subscriptions/{find_subscription(client, subscription)['id']}/sideline/schedule"
        if off:
            client.call("DELETE", path)
            return
        session.output().resource(
            client.call("PUT", path, json=body) if body else client.call("GET", path)
        )


def _show_dry_runs(output: Output, answers: Iterable[tuple[str, dict[str, Any]]]) -> None:
    items = [{"subscription": name, **answer} for name, answer in answers]
    output.listing({"items": items}, _DRY_RUN_COLUMNS, empty="nothing is sidelined")


def _show_dry_run(output: Output, answer: dict[str, Any], outcome: str) -> None:
    if output.as_json:
        output.document(answer)
        return
    output.line(f"{answer['would_move']} deliveries would be {outcome}")
    output.table(
        ["reason", "deliveries"],
        sorted(answer["by_reason"].items()),
        empty="no sidelined delivery matches",
    )
    for count, what in (
        ("too_often", "were shoveled too often and would stay"),
        ("expired", "have expired and would end"),
    ):
        if answer.get(count):
            output.line(f"{answer[count]} {what}")
    if answer["sample"]:
        output.line("Oldest:")
        rows = [[one.get(field) for field in _COLUMNS.values()] for one in answer["sample"]]
        output.table(list(_COLUMNS), rows)
