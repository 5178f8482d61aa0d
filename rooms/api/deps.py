"""Define the services that routes depend on; `rooms.app.api` and tests construct them."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from sqlalchemy.ext.asyncio import AsyncEngine

from rooms.api.client_identity import CallerAuthenticator, TrustedProxies
from rooms.api.readiness import BrokerHealth, LeaderHealth, Readiness, StoreHealth
from rooms.api.writer_turns import WriterTurns
from rooms.db.authentication import ApiKeyAuthenticator
from rooms.db.connection import ConnectionShares
from rooms.db.notify import Notifier
from rooms.db.queries.stats import CachedStats
from rooms.db.queries.subscription_counts import OrganisationStats
from rooms.db.receipt_keys import PublishedKeys
from rooms.db.secrets import Cipher
from rooms.db.writer import LogWriter
from rooms.domain.attempt import AttemptResult
from rooms.domain.ids import IdGenerator, KeyId, OrganisationId, RoomId
from rooms.domain.push_url import PushUrl
from rooms.domain.room import Room, Subscription
from rooms.errors import RateLimitedError
from rooms.fair_slots import FairSlots
from rooms.metrics import Metrics
from rooms.ports import BrokerUsers, Clock, Magazines
from rooms.settings import Settings
from rooms.token_buckets import TokenBuckets

if TYPE_CHECKING:
    from delivery.pull.service import PullService
    from rooms.publishing.publisher import Publisher

MAGAZINE_CALLS: Final = 16
"""Calls of all organisations together that the store of the magazines has at a time."""
ORGANISATION_MAGAZINE_CALLS: Final = 8
_MAX_WAITING_CALLS: Final = 1_000
JOURNALS_VERIFIED: Final = 4
"""Journals that a process verifies at a time, of an organisation one."""
MAX_WAITING_JOURNALS: Final = 10
"""Most further requests of an organisation that wait for that."""


class KeyRateLimiter:
    """Allow each key `per_s` requests a second, and as many at once after a second of quiet.

    0: unlimited.
    """

    def __init__(self, per_s: int, monotonic: Callable[[], float]) -> None:
        self._per_s = per_s
        self._buckets: TokenBuckets[KeyId] = TokenBuckets(per_s, monotonic)

    def acquire(self, key: KeyId) -> None:
        """Count one request. RateLimitedError: the key has no request left."""
        if self._per_s and not self._buckets.take(key):
            raise RateLimitedError(f"this key may make {self._per_s} requests a second")


class GuestChangeLimiter:
    """Allow an organisation `per_s` changes a second in each room of others; 0: unlimited.

    Publishers load a room's routing again after each change, which takes time with its number of
    subscriptions: one subscriber must not keep them at it. Routing does not read what waits for
    approval, but each change of that is rows in the room of another one, too.
    """

    def __init__(self, per_s: int, monotonic: Callable[[], float]) -> None:
        self._per_s = per_s
        self._buckets: TokenBuckets[tuple[OrganisationId, RoomId]] = TokenBuckets(per_s, monotonic)

    def acquire(self, organisation: OrganisationId, room: Room) -> None:
        """Count a change in `room`. RateLimitedError: the organisation has none left there."""
        if organisation != room.organisation_id and not self._buckets.take((organisation, room.id)):
            raise RateLimitedError(
                f"your organisation may change its subscriptions in a room of others {self._per_s} "
                "times a second"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiServices:
    """Hold everything a route may need: the argument `services` of a handler.

    ASGI code finds it as `request.app.state.services`.
    """

    settings: Settings
    clock: Clock
    ids: IdGenerator
    random: Callable[[int], bytes]
    """`random(n)` returns n unpredictable bytes."""
    engine: AsyncEngine
    """For ordinary queries, through `rooms.db.connection.transaction`."""
    writer: LogWriter
    """For the rare transitions that are requested, such as redeliver: only by `writer_turns`."""
    notifier: Notifier
    cipher: Cipher
    keys: ApiKeyAuthenticator
    receipt_keys: PublishedKeys
    """The public keys of receipts."""
    rate_limiter: KeyRateLimiter
    guest_changes: GuestChangeLimiter
    metrics: Metrics
    gauges: CachedStats
    backlogs: OrganisationStats
    readiness: Readiness
    leader_health: LeaderHealth
    new_secret: Callable[[], str]
    """Returns a new signing secret, `whsec_…`, which is encrypted as this text."""
    check_push_url: Callable[[PushUrl], None]
    """Raises ValueError or another readable error where webhooks may not go to the URL."""
    ping: Callable[[Subscription], Awaitable[AttemptResult]]
    """Calls a PUSH subscription's webhook once with a test message."""
    magazines: Magazines
    publisher: "Publisher"
    pull_service: "PullService"
    broker_health: BrokerHealth | None = None
    """Set where the broker is not PostgreSQL."""
    magazine_health: StoreHealth | None = None
    """Set where the store of the magazines is not PostgreSQL."""
    broker_users: BrokerUsers | None = None
    """Creates the users of native subscriptions, where the broker is not PostgreSQL."""
    callers: CallerAuthenticator = field(init=False)
    """Finds the principals of requests, by `keys` and by the proxies in `settings`."""

    shares: ConnectionShares = field(init=False)
    """Bounds how many connections of `engine` one organisation uses."""

    writer_turns: WriterTurns = field(init=False)
    """Lets organisations take turns at `writer`, which is one connection."""

    magazine_turns: FairSlots = field(init=False)
    """Lets organisations take turns at the store of the magazines, which has few connections."""

    journal_turns: FairSlots = field(init=False)
    """Lets organisations take turns at verifying whole journals, which may take minutes each."""

    def new_job_id(self) -> str:
        """Return the id of a new job."""
        return self.ids.generate_global(self.clock.now_ms())

    def __post_init__(self) -> None:
        settings = self.settings
        proxies = TrustedProxies(
            settings.trusted_proxies, settings.trusted_headers, settings.certificate_identity
        )
        object.__setattr__(self, "callers", CallerAuthenticator(self.keys, proxies))
        shares = ConnectionShares(
            settings.organisation_queries, on_refusal=self.metrics.queries_refused.inc
        )
        object.__setattr__(self, "shares", shares)
        object.__setattr__(self, "writer_turns", WriterTurns(self.writer))
        turns = FairSlots(
            MAGAZINE_CALLS,
            max_per_tenant=ORGANISATION_MAGAZINE_CALLS,
            max_waiting=_MAX_WAITING_CALLS,
            refusal="too many requests of your organisation wait for handler queues and magazines: "
            "send fewer at a time",
        )
        object.__setattr__(self, "magazine_turns", turns)
        turns = FairSlots(
            JOURNALS_VERIFIED,
            max_per_tenant=1,
            max_waiting=MAX_WAITING_JOURNALS,
            refusal="a journal is being verified for your organisation: wait until that has ended",
        )
        object.__setattr__(self, "journal_turns", turns)
