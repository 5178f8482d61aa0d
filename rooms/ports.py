"""The ports: what the house needs of the world outside, each docstring being the contract of its adapters.

Adapters never retry, swallow or time out in silence. A port promises what the weakest backend gives; every adapter
passes the one contract suite of its port in `tests/contract`. The port of magazines is `rooms/magazines.py`.
"""

from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import Any, Protocol, Self

from rooms.domain.attempt import Answer
from rooms.domain.cluster import ClusterView
from rooms.domain.copy import Copy
from rooms.domain.ids import DeliveryId, OrganisationId, RoomId, SubscriptionId
from rooms.domain.native_address import NativeAddress
from rooms.domain.target import Target


class Clock(Protocol):
    """Time, as an argument."""

    def now(self) -> datetime:
        """Now, aware, UTC."""
        ...

    def now_ms(self) -> int:
        """Now in epoch milliseconds."""
        ...

    def monotonic(self) -> float:
        """Seconds that never go back."""
        ...


class Sender(Protocol):
    """Calls one webhook once."""

    async def send(
        self, target: Target, headers: bytes, body: bytes, *, organisation: OrganisationId, timeout_s: float
    ) -> Answer:
        """POST `body` exactly as given. `headers`: whole lines, each ended by CRLF, without Host, Content-Length and
        Connection. Requests of one `organisation` share connections and bounds, and nothing with another one's.

        Whatever the endpoint does is in the answer and never raised; the whole call, name look-up and connect included,
        ends within `timeout_s`. Cancelling closes the connection. Redirects are not followed.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A copy that a broker will never take as it is, and why, in the broker's words."""

    copy: Copy
    reason: str
    queue_missing: bool
    """Its queue is not there: deleted with its subscription, or not made yet (`Broker.ensure`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A message of a consumed queue that is no copy: of another format, broken, or somebody else's."""

    reason: str
    delivery_id: DeliveryId | None
    """Whose copy it seems to be, where that can be told; the same with `generation` and `attempt`."""
    generation: int | None
    attempt: int | None
    headers: Mapping[str, str]
    body: bytes


class Gate(Protocol):
    """Lets clients of the broker's own in: one user a native subscription, who may read its queue and nothing else.

    Errors are `Broker`'s. Twice is harmless everywhere.
    """

    @property
    def addresses(self) -> Sequence[NativeAddress]:
        """Where Rooms itself reaches the broker, for each protocol that readers may speak there."""
        ...

    def dead_letters(self, *, credit: int) -> "Consumer":
        """Take copies that readers of native queues rejected, of other installations on this broker as well."""
        ...

    async def dead_letter_depth(self) -> int:
        """Return how many dead letters wait; what was rejected just now may count late."""
        ...

    async def depths(self) -> Mapping[SubscriptionId, int]:
        """Return the messages in each PULL queue of this installation."""
        ...

    def user(self, subscription: SubscriptionId) -> str:
        """The name of the user."""
        ...

    def hashed(self, password: str) -> str:
        """What the broker is to keep of a password; each time another text."""
        ...

    async def open(self, subscription: SubscriptionId, hashed: str) -> None:
        """Make the queue and its user, or give the user this password from now on. Durable when it returns."""
        ...

    async def close(self, subscription: SubscriptionId) -> None:
        """Take the user away and end its connections; the queue stays."""
        ...

    async def opened(self, hashed: Mapping[SubscriptionId, str]) -> Mapping[SubscriptionId, bool]:
        """The subscriptions that have a user; true: with that password, and its queue."""
        ...


class Broker(Protocol):
    """Carries copies of deliveries from publish to attempt: one queue for all PUSH, one a subscription for PULL.

    Order: by priority (9 first), then by due time, as far as no copy came back. Duplicates: a copy may come more than
    once (its consumer died, its send was repeated); the delivery row decides which one counts. A copy is not handed
    out before its `due` nor, as far as the broker can tell, after its expiry.

    Everywhere a subscription names its PULL queue, and None the PUSH queue. Thread-safety: all methods belong to the
    event loop that opened the adapter. BrokerUnavailableError: the broker is away; what was asked for is in doubt.
    """

    @property
    def claims(self) -> bool:
        """True where a copy handed out is already claimed in PostgreSQL (the outbox is the queue itself)."""
        ...

    @property
    def gate(self) -> Gate | None:
        """Where clients of its own are let in; None: there is nothing here that others could read."""
        ...

    async def ensure(self, subscriptions: Sequence[SubscriptionId]) -> None:
        """Make the queues of these PULL subscriptions where they are not there yet. Durable when it returns."""
        ...

    async def delete(self, subscription: SubscriptionId) -> bool:
        """Delete a PULL subscription's queue with all its copies. False, and nothing happens, while anybody consumes it.

        Deleting what is not there is True.
        """
        ...

    async def queues(self) -> Sequence[SubscriptionId]:
        """The PULL subscriptions of this installation that have a queue (none where queues need not be made)."""
        ...

    async def send(self, copies: Sequence[Copy], *, not_before: Sequence[datetime]) -> Sequence[Refused]:
        """Queue copies of deliveries, each for its own time; durable when it returns, but for those it returns, which
        were refused for ever. Twice the same `dedup_id` is one copy. BrokerUnavailableError leaves in doubt which were
        taken: send them again.
        """
        ...

    async def depth(self, subscription: SubscriptionId | None) -> int:
        """Copies that wait (due or not, handed out or not). One that was sent or settled just now may count late."""
        ...

    async def disk_usage(self) -> float | None:
        """Return the used share of the broker's disk, 0 to 1; None where it does not say."""
        ...

    async def purge(self, room: RoomId, subscription: SubscriptionId) -> int:
        """Forget the copies of a subscription that nobody took; returns how many. Its delivery rows are the caller's."""
        ...

    async def remembers(self) -> bool:
        """Whether what was sent is still there, as far as a durable mark beside it can tell. False: it was emptied (or
        is new), and PostgreSQL's unfinished deliveries have to be sent again.
        """
        ...

    async def mark(self) -> None:
        """Put the durable mark there: from now on `remembers`."""
        ...

    def consume(self, *, credit: int, subscription: SubscriptionId | None = None) -> "Consumer":
        """Take copies of a queue, at most `credit` unsettled ones at a time (an async context manager).

        What is unsettled when the consumer closes, or its process dies, comes back to others within 2 s; when the
        process only hangs, at the claim's deadline, or when the broker gives it up. A queue that is not there:
        BrokerUnavailableError. A broker that `claims` knows the PUSH queue alone (ValueError): PULL leases from it.
        """
        ...


class Consumer(Protocol):
    """One taker of a queue."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @property
    def worker(self) -> int:
        """The number that marks this consumer's claims in records and logs (0 where the broker does not claim)."""
        ...

    @property
    def selective(self) -> bool:
        """Whether `exclude` keeps copies in the queue; where not, they come all the same."""
        ...

    def batches(self) -> AsyncIterator[Sequence[Copy]]:
        """Batches as they come due, for ever. BrokerUnavailableError when the broker goes away: enter anew.

        A batch may be empty: then something `unreadable` came.
        """
        ...

    def unreadable(self) -> Sequence[Unreadable]:
        """Messages that came since the last call and are no copies; each is told once. They count as unsettled until
        they are discarded, and come back like copies.
        """
        ...

    async def discard(self, messages: Sequence[Unreadable]) -> None:
        """What `unreadable` told is recorded elsewhere: it need not come again. Twice is harmless."""
        ...

    def exclude(self, subscriptions: frozenset[SubscriptionId]) -> None:
        """Leave copies of these subscriptions where they are for now (their lanes are busy)."""
        ...

    async def settle(self, copies: Sequence[Copy]) -> None:
        """The transaction that decided these copies is committed: they need not come again. Twice is harmless."""
        ...

    async def release(self, copies: Sequence[Copy]) -> None:
        """Give copies back untouched, at once: others, or this consumer itself, get them again."""
        ...


class Membership(Protocol):
    """One process's part in an election (an async context manager; leaving gives everything back at once)."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @property
    def member(self) -> str:
        """The name under which others see this process."""
        ...

    def epoch(self, partition: str) -> int | None:
        """The epoch in which this process may act for a partition right now; None: it may not. Ask before every action.

        Never are two processes told the same partition for one epoch, and a later holder's epoch is higher. It is known
        locally, without asking anybody: a deadline that lies before the moment when others may take over.
        """
        ...

    def name(self, partitions: Sequence[str]) -> None:
        """From now on these are the partitions: every member names the same sooner or later, and those that the leader
        names are shared out at its next look.
        """
        ...

    def changed(self) -> Coroutine[Any, Any, object]:
        """Until what this process may do changes, from this call on (not from when it is awaited): ask `epoch` right
        before. Any number may wait. A deadline that passes for want of news from the store is no change that is told.
        """
        ...


class Election(Protocol):
    """Shares partitions out over those who join, through one leader: round-robin at first, then with as few moves as
    possible, counts within one. Losing the connection ends every assignment of this process at once.

    ElectionUnavailableError: the store of the election is away.
    """

    def join(self, partitions: Sequence[str]) -> Membership:
        """Take part; every member names the same partitions, and those of the leader are shared out."""
        ...

    async def view(self) -> ClusterView:
        """Members, leader, epoch and assignments as the store has them."""
        ...
