"""A process of Rooms that kills itself at one point: run as `python -m tests.faults.crashing serve|worker|relay|upkeep POINT`.

It wraps the real thing and overrides one function, which dies by SIGKILL just before or just after its work. Nothing
in the product knows of it.
"""

import functools
import importlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from rooms.domain.states import State
from rooms.settings import read_settings

UNHEARD: Final = "nobody hears of it"
Wanted = Callable[[tuple[Any, ...], Any], bool]


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("nobody survives SIGKILL")


def _always(_arguments: tuple[Any, ...], _result: Any) -> bool:
    return True


def _something(_arguments: tuple[Any, ...], result: Any) -> bool:
    """It did some work."""
    return bool(getattr(result, "copies", result))


def _handing_out(_arguments: tuple[Any, ...], taken: Any) -> bool:
    return any(one.rows for one in taken)


def _carrying(arguments: tuple[Any, ...], _result: Any) -> bool:
    """There is a copy to send. Arguments: self, copies."""
    return bool(arguments[1])


def _deciding(*states: State) -> Wanted:
    """One of the outcomes leads to one of these states. Arguments: self, outcomes."""

    def wanted(arguments: tuple[Any, ...], _result: Any) -> bool:
        return any(outcome.to in states for outcome in arguments[1])

    return wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Where to die: at `target` (`module:function` or `module:Class.method`), after its work or before it, the first time
    that `wanted` says so of its arguments and, after it, its result.
    """

    target: str
    after: bool
    wanted: Wanted = _always

    def arm(self) -> None:
        """Put the dying function in the real one's place."""
        module, _, path = self.target.partition(":")
        *owners, name = path.split(".")
        owner = functools.reduce(getattr, owners, importlib.import_module(module))
        real: Callable[..., Awaitable[Any]] = getattr(owner, name)

        @functools.wraps(real)
        async def dying(*arguments: Any, **named: Any) -> Any:
            if not self.after and self.wanted(arguments, None):
                die()
            result = await real(*arguments, **named)
            if self.after and self.wanted(arguments, result):
                die()
            return result

        setattr(owner, name, dying)


class Either:
    """Whichever comes first."""

    def __init__(self, *points: Point) -> None:
        self._points = points

    def arm(self) -> None:
        """Put every dying function in its place."""
        for point in self._points:
            point.arm()


class Unheard:
    """A wake-up that is never sent, and told instead. It is the test that kills the process, once it has the 202."""

    def arm(self) -> None:
        from rooms.storage.signals import Channel, Signals

        real = Signals.ring

        @functools.wraps(real)
        def ring(signals: Signals, channel: Channel, *arguments: Any, **named: Any) -> None:
            if channel not in {Channel.PUSH, Channel.RELAY}:
                real(signals, channel, *arguments, **named)
                return
            sys.stderr.write(f"{UNHEARD}\n")
            sys.stderr.flush()

        setattr(Signals, real.__name__, ring)


def _both(target: str, wanted: Wanted = _always) -> dict[str, Point]:
    return {
        "before": Point(target=target, after=False, wanted=wanted),
        "after": Point(target=target, after=True, wanted=wanted),
    }


def _named(name: str, target: str, wanted: Wanted = _always) -> dict[str, Point]:
    return {f"{when} {name}": point for when, point in _both(target, wanted).items()}


_DECIDE: Final = "rooms.storage.outcomes:Outcomes.decide"
POINTS: Final[Mapping[str, Point | Either | Unheard]] = {
    **_named("publish", "rooms.publishing.service:write_group"),
    "before wake-up": Unheard(),
    "after claim": Either(
        Point(target="rooms.storage.outbox:Outbox.claim", after=True, wanted=_something),
        Point(target="rooms.storage.claims:Claims.take", after=True, wanted=_something),
    ),
    "before send": Point(target="delivery.sender:HttpSender.send", after=False),
    "after send": Point(target="delivery.sender:HttpSender.send", after=True),
    "after relay's claim": Point(target="rooms.storage.relay:Outgoing.claim", after=True, wanted=_something),
    **_named("carrying", "rooms.brokers.stomp:StompBroker.send", _carrying),
    **_named("mark", "rooms.storage.relay:Outgoing.mark"),
    **_named("delivered", _DECIDE, _deciding(State.DELIVERED)),
    "before settle": Either(
        Point(target="rooms.brokers.postgres:PostgresConsumer.settle", after=False),
        Point(target="delivery.intake:IntakeConsumer.settle", after=False),
    ),
    "after settle": Either(
        Point(target="rooms.brokers.postgres:PostgresConsumer.settle", after=True),
        Point(target="delivery.intake:IntakeConsumer.settle", after=True),
    ),
    **_named("retry", _DECIDE, _deciding(State.QUEUED)),
    **_named("sideline", _DECIDE, _deciding(State.SIDELINED)),
    **_named("hold", _DECIDE, _deciding(State.HELD)),
    **_named("release", "rooms.storage.holds:Holds.release"),
    **_named("disable", "rooms.storage.lanes:SharedLanes.disable"),
    "after opening the circuit": Point(target="rooms.storage.lanes:SharedLanes.open_circuit", after=True),
    "after probe": Point(target="rooms.storage.holds:Holds.probe", after=True, wanted=_something),
    "before closing the circuit": Point(target="rooms.storage.lanes:SharedLanes.close_circuit", after=False),
    **_named("redeliver", "rooms.storage.deliveries:redeliver"),
    **_named("withdrawal", "rooms.storage.withdrawals:withdraw"),
    **_named("move", "rooms.storage.withdrawals:move"),
    "before pull": Point(target="rooms.pulling.outbox_source:take", after=False),
    "after pull": Point(target="rooms.pulling.outbox_source:take", after=True, wanted=_handing_out),
    **_named("ack", "rooms.pulling.outcomes:ack"),
    **_named("nack", "rooms.storage.lease_ends:LeaseEnds.nack"),
    **_named("extend", "rooms.storage.lease_ends:LeaseEnds.extend"),
    "before lease end": Point(target="rooms.storage.lease_ends:LeaseEnds.end", after=False),
    "after lease end": Point(
        target="rooms.storage.lease_ends:LeaseEnds.end", after=True, wanted=lambda _, result: result[0] > 0
    ),
    "before expiry": Point(target="rooms.storage.expiry:Expiry.expire", after=False),
    "after expiry": Point(
        target="rooms.storage.expiry:Expiry.expire", after=True, wanted=lambda _, look: look.expired > 0
    ),
    "amid cancelling": Point(
        target="rooms.storage.removal:Removal.cancel", after=True, wanted=lambda _, page: page.cancelled > 0
    ),
    "amid deleting": Point(
        target="rooms.storage.removal:Removal.delete", after=True, wanted=lambda _, result: result[0] > 0
    ),
    "after loading entries": Point(target="rooms.storage.sidelines:Sidelines.loaded", after=False),
    "after loading rows": Point(target="rooms.storage.sidelines:Sidelines.loaded", after=True),
    "after taking entries": Point(target="rooms.storage.shovels:Shovels.shovel", after=False),
    "after shoveling rows": Point(target="rooms.storage.shovels:Shovels.shovel", after=True),
    "after forgetting entries": Point(target="delivery.sideline.shovel:Shovel._forget", after=True),
    "after sweeping": Point(target="rooms.storage.sidelines:Sidelines.slots", after=True, wanted=_something),
    "after reloading": Point(target="rooms.storage.sidelines:Sidelines.moved", after=False),
    "after moving rows": Point(target="rooms.storage.sidelines:Sidelines.moved", after=True),
    **_named("restoring", "rooms.storage.restores:Restores.step"),
    "after clearing": Point(target="rooms.storage.clears:Clears.step", after=True),
    "after replaying": Point(target="rooms.storage.replays:Replays.give", after=True),
    "before finishing": Point(target="rooms.storage.worklist:Worklist.finish", after=False),
}


def main() -> None:
    command, point = sys.argv[1:]
    POINTS[point].arm()
    from rooms.composition.api import run_api
    from rooms.composition.relay import run_relay
    from rooms.composition.upkeep import run_upkeep
    from rooms.composition.worker import run_worker

    settings = read_settings(os.environ)
    assert settings.database_url is not None
    run = {"serve": run_api, "worker": run_worker, "upkeep": run_upkeep, "relay": run_relay}[command]
    run(settings, settings.database_url)


if __name__ == "__main__":
    main()
