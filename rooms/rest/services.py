"""What the routes work with; the composition root fills it, tests fill it with their own."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine

from rooms.domain.attempt import Answer
from rooms.domain.ids import IdMaker
from rooms.domain.room import Subscription
from rooms.domain.target import Target
from rooms.magazines import Magazines
from rooms.metrics import Metrics
from rooms.ports import Clock, Gate
from rooms.rest.carriage import Carriage
from rooms.rest.leadership import Leadership
from rooms.rest.rates import Rates
from rooms.rest.readiness import Readiness
from rooms.rest.store_health import StoreHealth
from rooms.settings import Settings
from rooms.storage.backlogs import Backlogs
from rooms.storage.gauges import Gauges
from rooms.storage.keys import Keys
from rooms.storage.sealing import Seal
from rooms.storage.signals import Signals
from rooms.storage.writer import Writer


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Everything a route may need. Reach it as `request.app.state.services`, or as a handler's argument `services`."""

    settings: Settings
    clock: Clock
    ids: IdMaker
    random: Callable[[int], bytes]
    """`random(n)`: n unpredictable bytes."""
    engine: AsyncEngine
    """For everyday queries, through `rooms.storage.transactions.transaction`."""
    writer: Writer
    """For the rare transitions that people ask for (redeliver)."""
    signals: Signals
    seal: Seal
    keys: Keys
    rates: Rates
    metrics: Metrics
    gauges: Gauges
    backlogs: Backlogs
    readiness: Readiness
    leadership: Leadership
    new_secret: Callable[[], str]
    """A new signing secret, `whsec_…`; it is sealed as this text."""
    check_target: Callable[[Target], None]
    """ValueError, or another exception of the guard with a message for people, where a webhook may not go there."""
    ping: Callable[[Subscription], Awaitable[Answer]]
    """Calls a PUSH subscription's webhook once with a test message."""
    magazines: Magazines
    carriage: Carriage | None = None
    """Where another broker than PostgreSQL carries the copies."""
    magazine_health: StoreHealth | None = None
    """Where another store than PostgreSQL has the magazines."""
    gate: Gate | None = None
    """Where native subscriptions get their users, where another broker carries the copies."""
    publisher: Any = None
    """`rooms.publishing`'s service; its routes know its type."""
    puller: Any = None
    """`rooms.pulling`'s service; its routes know its type."""
