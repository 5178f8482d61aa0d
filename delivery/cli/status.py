"""`rooms status`: at a glance how everything is, and which subscriptions do not do well."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import click

from rooms.cli.errors import ProblemError
from rooms.cli.session import Command, Session, pass_session
from rooms.terminal import terminal_safe

if TYPE_CHECKING:
    from rooms.cli.client import Client
    from rooms.cli.output import Output

_HEADINGS: Final = ("subscription", "condition", "since", "delivered", "waits")
_MOST_NAMES: Final = 3
_RESUMED: Final = frozenset({"disabled", "circuit_open", "paused"})
_UNAVAILABLE: Final = 503
_ADVICE: Final[Mapping[str, str]] = {
    "database": "PostgreSQL does not take writes, so nothing can be published: start it, or look at its log and its disk",
    "worker": "no push worker runs, so webhooks wait: start `rooms worker`",
    "upkeep": "no upkeep runs, so leases, expiry and jobs wait: start `rooms upkeep`",
    "writes": "PostgreSQL answers and takes no writes: look whether its disk is full",
    "leader": "no process leads: start `rooms upkeep`, or the store of ELECTION_URL where it is away",
    "relay": "no relay runs, so nothing reaches the broker: start `rooms relay`",
    "broker": "the store of BROKER_URL does not answer, and copies wait in PostgreSQL: start it, or look at its log",
    "magazines": "the store of MAGAZINE_URL does not answer, and what is sidelined waits in PostgreSQL: start it, or look at its log",
}
"""What to do about each part that is down."""
_UNITS: Final = ((86_400, "d"), (3600, "h"), (60, "min"))


@click.command(cls=Command)
@click.option("--limit", type=click.IntRange(1, 200), default=50, show_default=True, help="Subscriptions to show.")
@pass_session
def status(session: Session, /, *, limit: int) -> None:
    """Which parts are up, what waits, and the subscriptions that do not do well: since when, why, and together with which
    others; the worst first. Exit code 0 either way.
    """
    output = session.output()
    with session.client() as client:
        try:
            found = client.call("GET", "/status", params={"limit": limit})
        except ProblemError as exc:
            if exc.status == _UNAVAILABLE and (health := _health(client)) is not None:
                output.note(_parts({"health": health, "leader": None}))
                _advise(output, health)
            raise
    if output.as_json:
        output.document(found)
        return
    output.line(_parts(found))
    _advise(output, found["health"])
    output.line(_backlog(found["backlog"]))
    shown = found["subscriptions"]
    if shown:
        output.line("")
        for line in _lines(shown, datetime.fromisoformat(found["at"])):
            output.line(line)
    else:
        output.note("every subscription does well")
    if found["subscriptions_total"] > len(shown):
        output.note(f"{len(shown)} of {found['subscriptions_total']}; --limit shows more")
    if any(one["condition"] in _RESUMED for one in shown):
        output.note("disabled, circuit open or paused: `rooms subscription resume ROOM/NAME` goes on at once")
    if any(one["sidelined"] for one in shown):
        output.note("sidelined: once the endpoint is well, `rooms sideline shovel ROOM/NAME` brings it back")


def _health(client: "Client") -> Mapping[str, Any] | None:
    """What `/health/ready` says, which needs no store; None where it says nothing."""
    try:
        found = client.send("GET", f"{client.url}/health/ready").json()
    except ProblemError as exc:
        found = exc.problem
    return found if isinstance(found, dict) and isinstance(found.get("parts"), dict) else None


def _advise(output: "Output", health: Mapping[str, Any]) -> None:
    for part, state in health["parts"].items():
        if state != "up" and part in _ADVICE:
            output.note(f"{part}: {_ADVICE[part]}; `rooms doctor` examines every store")


def _parts(found: Mapping[str, Any]) -> str:
    health = found["health"]
    told = [f"{part} {state}" for part, state in health["parts"].items() if part != "leader"]
    if found["leader"]:
        led = f"{found['leader']} leads"
    elif health["parts"].get("leader") == "up":
        led = "there is a leader"
    else:
        led = f"no leader for {health['leader_absent_seconds']:.0f} s"
    return f"{health['status']}: {', '.join(told)}; {led}"


def _backlog(backlog: Mapping[str, Any]) -> str:
    told = []
    for kind in ("push", "pull"):
        queue = backlog[kind]
        oldest = f", the oldest for {_span(queue['oldest_seconds'])}" if queue["due"] else ""
        later = f", {queue['later']} later" if queue["later"] else ""
        told.append(f"{kind.upper()} {queue['due']} due{oldest}{later}")
    told.append(f"{backlog['leased']} leased")
    if backlog["abandoned"]:
        told.append(f"{backlog['abandoned']} that workers died with, again and again (`rooms doctor` names them)")
    told += [f"{sum(backlog[name].values())} {name}{_reasons(backlog[name])}" for name in ("held", "sidelined")]
    return "; ".join(told)


def _lines(shown: Sequence[Mapping[str, Any]], at: datetime) -> Iterator[str]:
    """Two lines for each, because a table as wide as all of it would be folded by most terminals."""
    names = {one["subscription_id"]: terminal_safe(f"{one['room']}/{one['name']}") for one in shown}
    rows = [
        (
            names[one["subscription_id"]],
            one["condition"].replace("_", " "),
            _ago(one["since"], at),
            _ago(one["last_delivered_at"], at),
            _waits(one),
        )
        for one in shown
    ]
    widths = [max(map(len, column)) for column in zip(_HEADINGS, *rows, strict=True)]
    for row, one in zip((_HEADINGS, *rows), (None, *shown), strict=True):
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        if one is not None and (why := _why(one, names)):
            yield f"    {why}"


def _waits(one: Mapping[str, Any]) -> str:
    counts = {name: one[name] for name in ("due", "retrying")} | {"held": sum(one["held"].values())}
    return (
        ", ".join(f"{count} {what}" for what, count in {**counts, "sidelined": one["sidelined"]}.items() if count)
        or "-"
    )


def _why(one: Mapping[str, Any], names: Mapping[str, str]) -> str:
    others = [names[identity] for identity in one["together_with"]]
    more = f" and {len(others) - _MOST_NAMES} more" if len(others) > _MOST_NAMES else ""
    together = f"together with {', '.join(others[:_MOST_NAMES])}{more}" if others else None
    return "; ".join(filter(None, (one["host"], one["last_error"], together)))


def _reasons(counts: Mapping[str, int]) -> str:
    told = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items()) if count)
    return f" ({told})" if told else ""


def _ago(time: str | None, at: datetime) -> str:
    return "-" if time is None else f"{_span((at - datetime.fromisoformat(time)).total_seconds())} ago"


def _span(seconds: float) -> str:
    for length, unit in _UNITS:
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
