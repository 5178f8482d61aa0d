"""Define the ports to clock, webhooks, brokers, elections and magazines.

Each docstring is the contract of the adapters; `tests/contract` checks it. Adapters never retry,
swallow errors or time out silently. A port promises what the weakest backend provides.
"""

from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Protocol, Self

from rooms.domain.attempt import AttemptResult
from rooms.domain.cluster import ClusterView
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import DeliveryId, OrganisationId, RoomId, SubscriptionId
from rooms.domain.magazine import (
    DEFAULT_SHARDS,
    MAX_BATCH,
    Entry,
    HandlerQueueRecord,
    MagazineName,
    MagazineState,
    Slot,
    StoredEntry,
    SweepBatch,
)
from rooms.domain.native_address import NativeAddress
from rooms.domain.push_url import PushUrl

PUSH_CREDIT: Final = 20_000
"""Most unsettled tasks of a worker: enough for hundreds of endpoints that hang in all their slots.
For a queue that cannot exclude subscriptions it is ten seconds' work of a lane with 2,000 a second.
"""
WINDOW_BYTES_PER_TASK: Final = 2048
"""A broker hands out so many bytes for each task of a large credit, whatever their sizes."""


class Clock(Protocol):
    """Provide the time as an argument."""

    def now(self) -> datetime:
        """Return the time, aware, in UTC."""
        ...

    def now_ms(self) -> int:
        """Return the time in epoch milliseconds."""
        ...

    def monotonic(self) -> float:
        """Return seconds that never decrease."""
        ...


class Sender(Protocol):
    """Send one webhook request."""

    async def send(
        self,
        target: PushUrl,
        headers: bytes,
        body: bytes,
        *,
        organisation: OrganisationId,
        timeout_s: float,
    ) -> AttemptResult:
        """Send `body` by POST, exactly as given, and return the result.

        `headers` are whole lines, each ended by CRLF, without Host, Content-Length and Connection.
        Requests of one `organisation` share connections and limits, and none with another's.

        Failures of the endpoint are in the result and never raised; an error means that no attempt
        was made. The whole call, with name look-up and connect, ends within `timeout_s`. Cancelling
        closes the connection. It does not follow redirects.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedTask:
    """Hold a task that a broker will never accept, with the broker's reason."""

    task: DeliveryTask
    reason: str
    queue_missing: bool
    """Its queue does not exist: deleted with its subscription, or not created yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MalformedMessage:
    """Hold a message of a consumed queue that is no task: unknown format, broken, or foreign."""

    reason: str
    delivery_id: DeliveryId | None
    """Delivery that it seems to belong to, if known. The same holds for the next two fields."""
    generation: int | None
    attempt: int | None
    headers: Mapping[str, str]
    body: bytes


class BrokerUsers(Protocol):
    """Manage the users of native subscriptions at the broker. Each may only read its queue.

    Errors are those of `Broker`. Repeating a call is harmless.
    """

    @property
    def addresses(self) -> Sequence[NativeAddress]:
        """Return the addresses at which Rooms reaches the broker, for each protocol of readers."""
        ...

    def consume_dead_letters(self, *, credit: int) -> "Consumer":
        """Consume messages that readers of native queues rejected, of all installations."""
        ...

    async def dead_letter_depth(self) -> int:
        """Return the number of dead letters. Recent ones may not be counted yet."""
        ...

    async def keeps_rejected(self) -> bool:
        """Return whether a rejection becomes a dead letter whichever protocol the reader uses."""
        ...

    async def pull_queue_depths(self) -> Mapping[SubscriptionId, int]:
        """Return the messages in each PULL queue of this installation."""
        ...

    def user_name(self, subscription: SubscriptionId) -> str:
        """Return the name of the user."""
        ...

    def hash_password(self, password: str) -> str:
        """Return a salted hash of a password for the broker."""
        ...

    async def create(self, subscription: SubscriptionId, password_hash: str) -> None:
        """Create the queue and its user, or set the user's password. Durable on return."""
        ...

    async def remove(self, subscription: SubscriptionId) -> None:
        """Remove the user and close its connections. The queue stays."""
        ...

    async def has_user(self, subscription: SubscriptionId) -> bool:
        """Return whether the subscription has a user, with one request."""
        ...

    async def list_users(
        self, password_hashes: Mapping[SubscriptionId, str]
    ) -> Mapping[SubscriptionId, bool]:
        """Return the subscriptions with a user; true: with this password and a queue."""
        ...


class Broker(Protocol):
    """Carry tasks from publish to attempt: one queue for PUSH, and one for each PULL subscription.

    Order: by priority (9 first), then by due time, as long as no task was returned. Duplicates: a
    task may be delivered more than once, when its consumer dies or its send is repeated. The
    delivery row decides which one counts. A task is not handed out before it is due, nor, as far as
    the broker knows, after its expiry.

    A subscription names its PULL queue, and None the PUSH queue. Thread-safety: all methods belong
    to the event loop that opened the adapter. BrokerUnavailableError: the outcome is in doubt.
    """

    @property
    def is_outbox(self) -> bool:
        """Return whether the queue is the outbox, so that the broker is a `TaskSource`, too."""
        ...

    @property
    def users(self) -> BrokerUsers | None:
        """Return the users of native subscriptions; None: the broker has no native queues."""
        ...

    async def create_queues(self, subscriptions: Sequence[SubscriptionId]) -> None:
        """Create missing queues of PULL subscriptions. Durable on return."""
        ...

    async def delete_queue(self, subscription: SubscriptionId) -> bool:
        """Delete a PULL subscription's queue with all its tasks.

        False: a consumer is open, and nothing was deleted. True also if the queue did not exist.
        """
        ...

    async def list_queues(self) -> Sequence[SubscriptionId]:
        """Return the PULL subscriptions with a queue; none if queues need not be created."""
        ...

    async def send(
        self, tasks: Sequence[DeliveryTask], *, not_before: Sequence[datetime]
    ) -> Sequence[RejectedTask]:
        """Send tasks, each for its own due time; return those that were rejected for good.

        They stay as long as the sentinel; those of native queues are durable. On an error send all
        again: some may have been queued, and then come twice.
        """
        ...

    async def depth(self, subscription: SubscriptionId | None) -> int:
        """Return the number of tasks, due or not, handed out or not. It may lag behind."""
        ...

    async def disk_usage(self) -> float | None:
        """Return the used fraction of the broker's disk, 0 to 1; None: unknown."""
        ...

    async def purge(self, room: RoomId, subscription: SubscriptionId) -> int:
        """Delete and count a subscription's tasks that no consumer has; the rows stay."""
        ...

    async def has_sentinel(self) -> bool:
        """Return whether the sentinel is there, which is lost together with tasks."""
        ...

    async def prepare_sentinel(self) -> str:
        """Store what can become the sentinel, and is lost like it; return its name."""
        ...

    async def put_sentinel(self, prepared: str) -> bool:
        """Make the prepared one the sentinel. False: it was lost, and so were tasks after it."""
        ...

    def consume(self, *, credit: int, subscription: SubscriptionId | None = None) -> "Consumer":
        """Consume a queue, with at most `credit` unsettled tasks (an async context manager).

        When the consumer closes, or its process dies, unsettled tasks return to the queue within
        2 s. When the process hangs, they return at the claim's deadline, or when the broker closes
        the connection. BrokerUnavailableError: also if the queue does not exist. An outbox has only
        the PUSH queue (ValueError).
        """
        ...


class Consumer(Protocol):
    """Consume one queue."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...

    @property
    def worker_id(self) -> int:
        """Return the id of this consumer's claims in rows and logs; 0: the broker is no outbox."""
        ...

    @property
    def supports_exclude(self) -> bool:
        """Return whether `exclude` keeps tasks in the queue. If not, they are delivered."""
        ...

    def batches(self) -> AsyncIterator[Sequence[DeliveryTask]]:
        """Yield batches as they come due, for ever. BrokerUnavailableError: enter again.

        An empty batch means that malformed messages came.
        """
        ...

    def take_malformed(self) -> Sequence[MalformedMessage]:
        """Return malformed messages since the last call, each once.

        They are unsettled until they are discarded, and return to the queue like tasks.
        """
        ...

    async def discard(self, messages: Sequence[MalformedMessage]) -> None:
        """Remove malformed messages that are recorded elsewhere. Repeating it is harmless."""
        ...

    def exclude(self, subscriptions: frozenset[SubscriptionId]) -> None:
        """Leave tasks of these subscriptions in the queue for now, as their lanes are full."""
        ...

    async def settle(self, tasks: Sequence[DeliveryTask]) -> None:
        """Remove tasks whose outcome is committed. Repeating it is harmless."""
        ...

    async def release(self, tasks: Sequence[DeliveryTask]) -> None:
        """Return unchanged tasks to the queue at once, for any consumer."""
        ...


class Membership(Protocol):
    """Take part in an election (an async context manager; leaving releases everything at once)."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...

    def epoch(self, partition: str) -> int | None:
        """Return the epoch in which this process may act for a partition now; None: it may not.

        Check it before every action. No two processes have a partition in the same epoch, and a
        later holder has a higher one. The answer is local: it holds until a deadline before the
        moment at which another process may take over.
        """
        ...

    def set_partitions(self, partitions: Sequence[str]) -> None:
        """Replace the partitions. The leader assigns its own at its next refresh.

        Every member must name the same ones, sooner or later.
        """
        ...

    def wait_changed(self) -> Coroutine[Any, Any, object]:
        """Wait for a change of this process's assignments, from this call on.

        Check `epoch` right before. Any number of callers may wait. A deadline that passes because
        the store does not answer is not reported as a change.
        """
        ...


class Election(Protocol):
    """Assign partitions to members through one leader.

    Assignment is round-robin at first, then with as few moves as possible, and counts differ by at
    most one. Losing the connection ends every assignment of this process at once.

    ElectionUnavailableError: the store of the election is unavailable.
    """

    def join(self, partitions: Sequence[str]) -> Membership:
        """Take part. Every member names the same partitions; the leader assigns its own."""
        ...

    async def view(self) -> ClusterView:
        """Return members, leader, epoch and assignments from the store."""
        ...


class Magazine(Protocol):
    """Store entries in shards, until they are fired and deleted. A sideline is a magazine.

    Order: as loaded within a shard, and none across shards. The entries of one call are in one
    shard, in their order. A slot is never used again, and always names the same entry.

    No entry is lost in a hole. A load writes its slot create-only, and so does a fire that finds an
    empty one a tombstone. A load that finds another's takes the next slot.

    An entry is stuck if it was handed out and not deleted within the sweep duration. Below the fire
    pointer, an entry that was never handed out counts from its load time. The sweep pointer never
    passes a live entry.

    A magazine that expires entries drops them at their `expires_at`. Times are those of the store,
    or of this process if the store has none; `older_than_s` is measured by them.

    A call has at most 1,000 entries (ValueError). Any number of calls may run concurrently, in the
    event loop that opened the adapter. MagazineUnavailableError: the outcome is in doubt.
    MagazineMissingError: the magazine was never created, was dropped, or its store was emptied.
    """

    @property
    def name(self) -> MagazineName: ...

    @property
    def shards(self) -> int: ...

    async def load(self, entries: Sequence[Entry]) -> Sequence[Slot]:
        """Store entries and return the slot of each. Durable on return.

        In doubt, load again: an entry may then be stored twice, under one id. TooLargeError: an
        entry is too large for the store; others may have been stored.
        """
        ...

    async def fire(
        self, limit: int = 1, *, below: Mapping[int, int] | None = None
    ) -> Sequence[StoredEntry]:
        """Hand out up to `limit` waiting entries, each to one caller, with `fire_ts` set.

        Large bodies may make it fewer, but one. Those lost on their way to the caller are stuck.
        `below`: by shard the slot before which its entries are handed out; none of other shards.
        """
        ...

    async def take(
        self, slots: Sequence[Slot], *, older_than_s: float | None = None
    ) -> Sequence[StoredEntry]:
        """Hand out what waits, as `fire` does; with `older_than_s` also what was longer ago."""
        ...

    async def find(self, slots: Sequence[Slot]) -> Sequence[StoredEntry]:
        """Return the entries of these slots, handed out or not, without changing them."""
        ...

    async def peek(self, limit: int, *, after: Slot | None = None) -> Sequence[StoredEntry]:
        """Return the next entries by slot, handed out or not, without changing them.

        Fewer than `limit` means the end. Entries loaded meanwhile may be missing.
        """
        ...

    async def peek_slots(self, limit: int, *, after: Slot | None = None) -> Sequence[Slot]:
        """Return the slots of what `peek` would return, and read no bodies."""
        ...

    async def delete(self, slots: Sequence[Slot], *, swept: bool = False) -> Sequence[Slot]:
        """Delete entries, also those handed out, and return the slots that this call deleted.

        Repeating it is harmless. `swept`: count them as swept.
        """
        ...

    async def reload(self, taken: Sequence[StoredEntry]) -> Sequence[Slot | None]:
        """Move entries, as given, to the end, where they wait again. Return their new slots.

        None: the entry was gone. In doubt, an entry may be in both slots.
        """
        ...

    async def sweep(
        self, shard: int, *, epoch: int, older_than_s: float, limit: int = MAX_BATCH
    ) -> SweepBatch:
        """Move the sweep pointer over finished slots, and hand out the stuck entries after it.

        It stops at the first entry that is not stuck, or earlier at large ones. Deleting those and
        sweeping again moves the pointer on, by absolute writes, and never back. StaleEpochError: a
        sweep had a later epoch, and nothing was handed out.
        """
        ...

    async def state(self) -> MagazineState:
        """Return pointers and counters of every shard."""
        ...

    async def count(self) -> int:
        """Count live entries slot by slot, in batches."""
        ...

    async def oldest_loaded_at(self) -> datetime | None:
        """Return when the oldest entry was loaded, of those behind at most 1,000 expired ones."""
        ...


class Magazines(Protocol):
    """Manage the magazines of an installation, and the records of its handler queues."""

    async def check(self) -> None:
        """Read from the store once. MagazineUnavailableError: it did not answer."""
        ...

    async def create(
        self,
        name: MagazineName,
        *,
        shards: int = DEFAULT_SHARDS,
        expires: bool = False,
        first_pointer: int = 0,
    ) -> Magazine:
        """Create a magazine of 1 to 512 shards (ValueError), with or without expiry.

        An existing one is kept and repaired. ConflictError: it has another number of shards.
        `first_pointer` of a new one must be beyond every slot that is still known somewhere.
        """
        ...

    async def open(self, name: MagazineName) -> Magazine:
        """Open an existing magazine. MagazineMissingError: there is none."""
        ...

    async def drop(self, name: MagazineName) -> bool:
        """Delete a magazine with all entries, and return whether it existed."""
        ...

    async def save_queue_record(self, queue: HandlerQueueRecord) -> None:
        """Write a handler queue's record. Its magazines are created separately.

        Record and pointers of an inactive one expire after twice its queue expiry, if any.
        """
        ...

    async def list_queue_records(self, *, active: bool = True) -> Sequence[HandlerQueueRecord]:
        """Return the active handler queues, or the inactive ones, ordered by name."""
        ...

    async def delete_queue_record(self, name: str) -> bool:
        """Delete a handler queue's record, and return whether it existed. Its magazines stay."""
        ...
