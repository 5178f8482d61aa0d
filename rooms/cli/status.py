"""Implement `rooms status`: component health, backlog, and unhealthy subscriptions."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import click

from rooms.cli.context import CliSession, Command, pass_session
from rooms.cli.errors import ProblemError
from rooms.cli.options import find_room, find_subscription
from rooms.domain.failure_groups import group_failures, summarize
from rooms.domain.state_machine import SubscriptionType
from rooms.domain.subscription_health import SubscriptionHealth
from rooms.safe_text import terminal_safe

if TYPE_CHECKING:
    from rooms.cli.client import ApiClient
    from rooms.cli.output import Output

_COLUMNS: Final = ("subscription", "condition", "since", "delivered", "waits")
_MAX_NAMES: Final = 3
_RESUMABLE_REASONS: Final = frozenset({"disabled", "circuit_open", "paused"})
_RETRYABLE: Final = frozenset({SubscriptionHealth.FAILING, SubscriptionHealth.DEGRADED})
_HTTP_UNAVAILABLE: Final = 503
_ADVICE: Final[Mapping[str, str]] = {
    "database": "PostgreSQL does not accept writes, so nothing can be published: start it, or "
    "check its log and its disk",
    "worker": "no push worker runs, so webhooks wait: start `rooms worker`",
    "upkeep": "no maintenance runs, so leases, expiry and jobs wait: start `rooms upkeep`",
    "writes": "PostgreSQL answers but does not accept writes: check whether its disk is full",
    "leader": "there is no leader: start `rooms upkeep`, or the store of ELECTION_URL",
    "relay": "no relay runs, so nothing reaches the broker: start `rooms relay`",
    "broker": "the broker (BROKER_URL) does not answer, so deliveries wait in PostgreSQL: "
    "start it, or check its log",
    "magazines": "the store of MAGAZINE_URL does not answer, so sidelined deliveries wait in "
    "PostgreSQL: start it, or check its log",
}
"""Advice for each part that is down."""
_NOT_KNOWN: Final = "not known"
_UNITS: Final = ((86_400, "d"), (3600, "h"), (60, "min"))


@click.command(cls=Command)
@click.option(
    "--limit",
    type=click.IntRange(1, 200),
    default=50,
    show_default=True,
    help="Subscriptions to show.",
)
@click.option("--room", metavar="ROOM", help="Only subscriptions of this room: its id or name.")
@click.option(
    "--subscription",
    "subscriptions",
    metavar="SUBSCRIPTION",
    multiple=True,
    help="Only this subscription: its id, or ROOM/NAME.  [repeatable]",
)
@click.option("--each", is_flag=True, help="Show also those that fail alike one by one.")
@pass_session
def status(
    session: CliSession,
    /,
    *,
    limit: int,
    room: str | None,
    subscriptions: tuple[str, ...],
    each: bool,
) -> None:
    """Show component health, backlog and unhealthy subscriptions, the worst first.

    For each subscription: its condition, since when, the cause, and which others fail with it.
    Three or more of one endpoint that fail alike are one row. The exit code is 0 either way.
    """
    if room is not None and subscriptions:
        raise click.UsageError("use either --room or --subscription")
    output = session.output()
    with session.client() as client:
        narrowed = _narrowed(client, room, subscriptions)
        try:
            found = client.call("GET", "/status", params={"limit": limit, **narrowed})
        except ProblemError as exc:
            if exc.status == _HTTP_UNAVAILABLE and (health := _read_health(client)) is not None:
                output.note(_format_parts({"health": health, "leader": None}))
                _show_advice(output, health)
            raise
    if output.as_json:
        output.document(found)
        return
    output.line(_format_parts(found))
    _show_advice(output, found["health"])
    _show_backlog(output, found["backlog"])
    _show_subscriptions(output, found, each=each, narrowed=bool(narrowed))


def _show_subscriptions(
    output: "Output", found: Mapping[str, Any], *, each: bool, narrowed: bool
) -> None:
    shown = found["subscriptions"]
    if shown:
        output.line("")
        groups = [[one] for one in shown] if each else group_failures(shown)
        for line in _format_groups(groups, datetime.fromisoformat(found["at"])):
            output.line(line)
        if len(groups) < len(shown):
            output.note("those of one endpoint that fail alike are one row: use --each to see each")
    else:
        output.note("healthy" if narrowed else "every subscription is healthy")
    if found["subscriptions_total"] > len(shown):
        output.note(f"{len(shown)} of {found['subscriptions_total']}; use --limit to show more")
    for remedy in _format_remedies(shown):
        output.note(remedy)


def _format_remedies(shown: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the command that helps against each kind of trouble, with names if they are few."""
    named = [(f"{one['room']}/{one['name']}", one) for one in shown]
    if resumable := [name for name, one in named if one["condition"] in _RESUMABLE_REASONS]:
        command = _format_command("subscription resume", resumable, most=_MAX_NAMES)
        yield f"disabled, circuit open or paused: use {command}"
    if retrying := [
        name for name, one in named if one["retrying"] and one["condition"] in _RETRYABLE
    ]:
        command = _format_command("subscription retry", retrying, most=_MAX_NAMES)
        yield f"retrying: once the endpoint works, {command} does not wait for the next attempt"
    behind = [(name, one) for name, one in named if one["condition"] == SubscriptionHealth.LAGGING]
    if pulled := [name for name, one in behind if one["type"] == SubscriptionType.PULL]:
        command = _format_command("subscription consumers", pulled)
        yield f"behind: no consumer pulls, or they are too slow: {command} lists them"
    if pushed := [name for name, one in behind if one["type"] == SubscriptionType.PUSH]:
        command = _format_command("subscription lane", pushed)
        yield f"behind: the endpoint is slow, or a limit is reached: see {command}"
    if sidelined := [name for name, one in named if one["sidelined"]]:
        command = _format_command("sideline shovel", sidelined, most=_MAX_NAMES)
        yield f"sidelined: once the endpoint works, use {command}"


def _format_command(words: str, names: Sequence[str], *, most: int = 1) -> str:
    """Return a command with its arguments, as a shell reads them, or their kind if they are many.

    `most`: the arguments that the command takes, or that are still easy to read.
    """
    known = shlex.join(names) if len(names) <= most else "ROOM/NAME" + "..." * (most > 1)
    return f"`rooms {words} {known}`"


def _narrowed(
    client: "ApiClient", room: str | None, subscriptions: Sequence[str]
) -> dict[str, Any]:
    """Return the parameters that narrow the status to a room or to these subscriptions."""
    if room is not None:
        return {"room_id": find_room(client, room)["id"]}
    if subscriptions:
        ids = [find_subscription(client, one)["id"] for one in subscriptions]
        return {"subscription_id": ",".join(ids)}
    return {}


def _read_health(client: "ApiClient") -> Mapping[str, Any] | None:
    """Return the answer of `/health/ready`, which needs no store, or None if there is none."""
    try:
        found = client.send("GET", f"{client.url}/health/ready").json()
    except ProblemError as exc:
        found = exc.problem
    return found if isinstance(found, dict) and isinstance(found.get("parts"), dict) else None


def _show_advice(output: "Output", health: Mapping[str, Any]) -> None:
    for part, state in health["parts"].items():
        if state != "up" and part in _ADVICE:
            output.note(f"{part}: {_ADVICE[part]}; `rooms doctor` checks every store")


def _format_parts(found: Mapping[str, Any]) -> str:
    health = found["health"]
    parts = [f"{part} {state}" for part, state in health["parts"].items() if part != "leader"]
    if found["leader"]:
        leader = f"{found['leader']} leads"
    elif health["parts"].get("leader") == "up":
        leader = "there is a leader"
    else:
        leader = f"no leader for {health['leader_absent_seconds']:.0f} s"
    return f"{health['status']}: {', '.join(parts)}; {leader}"


def _show_backlog(output: "Output", backlog: Mapping[str, Any]) -> None:
    output.line(_format_backlog(backlog))
    queues, others = (backlog["push"], backlog["pull"]), set(backlog) - {"push", "pull"}
    counts = [count for queue in queues for count in queue.values()]
    if None in [*counts, *(backlog[name] for name in others)]:
        output.note(
            f"{_NOT_KNOWN}: a count was refused or took too long;"
            " `rooms_counts_refused` at /metrics names it, and the API's log the cause"
        )


def _format_backlog(backlog: Mapping[str, Any]) -> str:
    parts = []
    for kind in ("push", "pull"):
        queue, oldest_s = backlog[kind], backlog[kind]["oldest_seconds"]
        waits = oldest_s if queue["due"] is None else queue["due"] and oldest_s is not None
        oldest = f", the oldest for {_format_duration(oldest_s)}" if waits else ""
        later = f", {queue['later']} later" if queue["later"] else ""
        parts.append(f"{kind.upper()} {_format_count(queue['due'], 'due')}{oldest}{later}")
    parts.append(_format_count(backlog["leased"], "leased"))
    if backlog["abandoned"]:
        parts.append(
            f"{backlog['abandoned']} crashed their worker repeatedly (`rooms doctor` names them)"
        )
    for name in ("held", "sidelined"):
        counts = backlog[name]
        total = None if counts is None else sum(counts.values())
        parts.append(f"{_format_count(total, name)}{_format_reasons(counts or {})}")
    return "; ".join(parts)


def _format_count(count: int | None, what: str) -> str:
    return f"{what} {_NOT_KNOWN}" if count is None else f"{count} {what}"


def _format_groups(groups: Sequence[Sequence[Mapping[str, Any]]], at: datetime) -> Iterator[str]:
    """Yield two lines for each group: one table row would be wider than most terminals."""
    names = {
        one["subscription_id"]: terminal_safe(f"{one['room']}/{one['name']}")
        for group in groups
        for one in group
    }
    rows = [
        (
            names[one["subscription_id"]] if len(group) == 1 else f"{len(group)} subscriptions",
            ", ".join(dict.fromkeys(member["condition"].replace("_", " ") for member in group)),
            _format_age(one["since"], at),
            _format_age(one["last_delivered_at"], at),
            _format_waiting(one),
        )
        for group, one in ((group, summarize(group)) for group in groups)
    ]
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
    for row, group in zip((_COLUMNS, *rows), (None, *groups), strict=True):
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        if group is not None and (reason := _format_reason(group, names)):
            yield f"    {reason}"


def _format_waiting(subscription: Mapping[str, Any]) -> str:
    counts = {name: subscription[name] for name in ("due", "retrying")} | {
        "held": sum(subscription["held"].values())
    }
    return (
        ", ".join(
            f"{count} {what}"
            for what, count in {**counts, "sidelined": subscription["sidelined"]}.items()
            if count
        )
        or "-"
    )


def _format_reason(group: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> str:
    first = group[0]
    if len(group) > 1:
        others = _format_names([names[one["subscription_id"]] for one in group])
    elif first["together_with"]:
        others = (
            f"together with {_format_names([names[other] for other in first['together_with']])}"
        )
    else:
        others = None
    endpoint = first.get("authority") or first["host"]
    return "; ".join(filter(None, (endpoint, first["last_error"], others)))


def _format_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"{', '.join(names[:_MAX_NAMES])}{more}"


def _format_reasons(counts: Mapping[str, int]) -> str:
    parts = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items()) if count)
    return f" ({parts})" if parts else ""


def _format_age(time: str | None, at: datetime) -> str:
    return (
        "-"
        if time is None
        else f"{_format_duration((at - datetime.fromisoformat(time)).total_seconds())} ago"
    )


def _format_duration(seconds: float) -> str:
    for length, unit in _UNITS:
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
