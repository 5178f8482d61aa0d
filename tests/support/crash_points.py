"""Run a process that kills itself: `python -m tests.support.crash_points COMMAND POINT`.

COMMAND is serve, worker, relay or upkeep. It overrides one function of the real process, which dies
by SIGKILL just before or just after its work. Nothing in the product knows of it.
"""

import functools
import importlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from rooms.cli.module_loading import module_loading
from rooms.domain.state_machine import State
from rooms.settings import read_settings

UNHEARD: Final = "no process is notified"
Wanted = Callable[[tuple[Any, ...], Any], bool]


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("no process survives SIGKILL")


def _always(_arguments: tuple[Any, ...], _result: Any) -> bool:
    return True


def _something(_arguments: tuple[Any, ...], result: Any) -> bool:
    """Return whether it did some work."""
    return bool(getattr(result, "tasks", result))


def _handing_out(_arguments: tuple[Any, ...], taken: Any) -> bool:
    return any(one.rows for one in taken)


def _carrying(arguments: tuple[Any, ...], _result: Any) -> bool:
    """Return whether there is a copy to send. Arguments: self, copies."""
    return bool(arguments[1])


def _deciding(*states: State) -> Wanted:
    """Return whether an outcome leads to one of these states. Arguments: self, outcomes."""

    def wanted(arguments: tuple[Any, ...], _result: Any) -> bool:
        return any(outcome.state in states for outcome in arguments[1])

    return wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Name where to die: at `target` (`module:function` or `module:Class.method`), before or after.

    It dies the first time that `wanted` accepts its arguments and, afterwards, its result.
    """

    target: str
    after: bool
    wanted: Wanted = _always

    def arm(self) -> None:
        """Replace the real function by the dying one."""
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
    """Return a point that is reached first by either way."""

    def __init__(self, *points: Point) -> None:
        self._points = points

    def arm(self) -> None:
        """Install every dying function."""
        for point in self._points:
            point.arm()


class Unheard:
    """Print a wake-up instead of sending it; the test kills the process once it has the 202."""

    def arm(self) -> None:
        from rooms.db.notify import Channel, Notifier

        real = Notifier.notify

        @functools.wraps(real)
        def ring(signals: Notifier, channel: Channel, *arguments: Any, **named: Any) -> None:
            if channel not in {Channel.PUSH, Channel.RELAY}:
                real(signals, channel, *arguments, **named)
                return
            sys.stderr.write(f"{UNHEARD}\n")
            sys.stderr.flush()

        setattr(Notifier, real.__name__, ring)


def _both(target: str, wanted: Wanted = _always) -> dict[str, Point]:
    return {
        "before": Point(target=target, after=False, wanted=wanted),
        "after": Point(target=target, after=True, wanted=wanted),
    }


def _named(name: str, target: str, wanted: Wanted = _always) -> dict[str, Point]:
    return {f"{when} {name}": point for when, point in _both(target, wanted).items()}


def _several(position: int) -> Wanted:
    """Return whether the argument at this position holds several."""
    return lambda arguments, _: len(arguments[position]) > 1


_CREATION: Final = "rooms.api.subscription_creation"
_DECIDE: Final = "rooms.db.queue.outcomes:OutcomeQueries.decide"
POINTS: Final[Mapping[str, Point | Either | Unheard]] = {
    **_named("publish", "rooms.publishing.service:write_group"),
    "before wake-up": Unheard(),
    **_named("creating", "rooms.db.catalog.subscriptions:create_subscriptions", wanted=_several(2)),
    **_named("creations' history", f"{_CREATION}:record_all", wanted=_several(1)),
    **_named(
        "creations' journal",
        f"{_CREATION}:append",
        wanted=lambda arguments, _: len(arguments[1:]) > 1,
    ),
    "after creations": Point(
        target=f"{_CREATION}:_create_together", after=True, wanted=_several(2)
    ),
    "after claim": Either(
        Point(target="rooms.db.queue.claims:Outbox.claim", after=True, wanted=_something),
        Point(
            target="rooms.db.queue.broker_claims:BrokerClaims.claim", after=True, wanted=_something
        ),
    ),
    "before send": Point(target="delivery.push.http.client:HttpSender.send", after=False),
    "after send": Point(target="delivery.push.http.client:HttpSender.send", after=True),
    "after relay's claim": Point(
        target="rooms.db.queue.relay:RelayOutbox.claim", after=True, wanted=_something
    ),
    **_named("carrying", "delivery.brokers.artemis.broker:ArtemisBroker.send", _carrying),
    **_named("mark", "rooms.db.queue.relay:RelayOutbox.mark_sent"),
    **_named("delivered", _DECIDE, _deciding(State.DELIVERED)),
    "before settle": Either(
        Point(target="delivery.brokers.postgres:PostgresConsumer.settle", after=False),
        Point(target="delivery.push.broker_intake:BrokerIntakeConsumer.settle", after=False),
    ),
    "after settle": Either(
        Point(target="delivery.brokers.postgres:PostgresConsumer.settle", after=True),
        Point(target="delivery.push.broker_intake:BrokerIntakeConsumer.settle", after=True),
    ),
    **_named("retry", _DECIDE, _deciding(State.QUEUED)),
    **_named("sideline", _DECIDE, _deciding(State.SIDELINED)),
    **_named("hold", _DECIDE, _deciding(State.HELD)),
    **_named("release", "rooms.db.queue.holds:Holds.release"),
    **_named("disable", "rooms.db.queue.throttle:SharedLaneState.disable"),
    "after opening the circuit": Point(
        target="rooms.db.queue.throttle:SharedLaneState.open_circuit", after=True
    ),
    "after probe": Point(target="rooms.db.queue.holds:Holds.probe", after=True, wanted=_something),
    "before closing the circuit": Point(
        target="rooms.db.queue.throttle:SharedLaneState.close_circuit", after=False
    ),
    **_named("redeliver", "rooms.db.queries.deliveries:redeliver"),
    **_named("withdrawal", "rooms.db.queue.withdraw:cancel_message"),
    **_named("move", "rooms.db.queue.withdraw:reschedule_message"),
    "before pull": Point(target="delivery.pull.postgres_source:acquire", after=False),
    "after pull": Point(
        target="delivery.pull.postgres_source:acquire", after=True, wanted=_handing_out
    ),
    **_named("ack", "delivery.pull.leases:ack"),
    **_named("nack", "rooms.db.leases.release:LeaseQueries.nack"),
    **_named("extend", "rooms.db.leases.release:LeaseQueries.extend"),
    "before lease end": Point(target="rooms.db.leases.release:LeaseQueries.expire", after=False),
    "after lease end": Point(
        target="rooms.db.leases.release:LeaseQueries.expire",
        after=True,
        wanted=lambda _, result: result[0] > 0,
    ),
    "before expiry": Point(target="rooms.db.queue.expire:ExpiryQueries.expire", after=False),
    "after expiry": Point(
        target="rooms.db.queue.expire:ExpiryQueries.expire",
        after=True,
        wanted=lambda _, look: look.expired > 0,
    ),
    "amid cancelling": Point(
        target="rooms.db.jobs.delete:DeleteQueries.cancel",
        after=True,
        wanted=lambda _, page: page.cancelled > 0,
    ),
    "amid deleting": Point(
        target="rooms.db.jobs.delete:DeleteQueries.delete",
        after=True,
        wanted=lambda _, result: result[0] > 0,
    ),
    "after loading entries": Point(
        target="rooms.db.sideline.entries:SidelineEntries.record_loaded", after=False
    ),
    "after loading rows": Point(
        target="rooms.db.sideline.entries:SidelineEntries.record_loaded", after=True
    ),
    "after taking entries": Point(
        target="rooms.db.sideline.shovel:ShovelQueries.shovel", after=False
    ),
    "after shoveling rows": Point(
        target="rooms.db.sideline.shovel:ShovelQueries.shovel", after=True
    ),
    "after forgetting entries": Point(
        target="delivery.sideline.shovel:SidelineShovel._delete_entries", after=True
    ),
    "after sweeping": Point(
        target="rooms.db.sideline.entries:SidelineEntries.find_slots", after=True, wanted=_something
    ),
    "after reloading": Point(
        target="rooms.db.sideline.entries:SidelineEntries.record_moved", after=False
    ),
    "after moving rows": Point(
        target="rooms.db.sideline.entries:SidelineEntries.record_moved", after=True
    ),
    **_named("restoring", "rooms.db.jobs.restore:RestoreQueries.restore_page"),
    **_named("retrying", "rooms.db.jobs.waiting_retries:WaitingRetryQueries.retry_page"),
    "after clearing": Point(target="rooms.db.jobs.restore:ClearQueries.clear_page", after=True),
    "after replaying": Point(target="rooms.db.jobs.replay:ReplayQueries.insert", after=True),
    "before finishing": Point(target="rooms.db.jobs.jobs:JobQueue.finish_job", after=False),
}

_RUNNERS: Final = {
    "serve": ("rooms.app.api", "run_api"),
    "worker": ("rooms.app.worker", "run_worker"),
    "upkeep": ("rooms.app.maintenance", "run_maintenance"),
    "relay": ("rooms.app.relay", "run_relay"),
}


def main() -> None:
    command, point = sys.argv[1:]
    settings = read_settings(os.environ)
    assert settings.database_url is not None
    module, name = _RUNNERS[command]
    with module_loading():
        POINTS[point].arm()
        # Only its own module: those of the API take a second, and a test starts several processes.
        run = getattr(importlib.import_module(module), name)
    run(settings, settings.database_url)


if __name__ == "__main__":
    main()
