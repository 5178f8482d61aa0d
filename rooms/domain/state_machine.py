"""Define the states, events, reasons and log entries of deliveries, and their transitions.

One table holds all transitions: (state, event) → state, and the change of generation and attempt.
Storage writes them as compare-and-set statements; no other code decides a state. A pair that is not
in the table is not allowed: the task, claim or request is stale, and changes nothing.
"""

from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class State(StrEnum):
    """Name the state of a delivery. `UNFINISHED` ones must still reach their subscriber."""

    SCHEDULED = "scheduled"
    QUEUED = "queued"
    HELD = "held"
    LEASED = "leased"
    SIDELINED = "sidelined"
    DELIVERED = "delivered"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    DROPPED = "dropped"
    PURGED = "purged"
    HANDED_OVER = "handed_over"
    """The broker has it for a client of its own; its outcome there is unknown."""


UNFINISHED = frozenset({State.SCHEDULED, State.QUEUED, State.HELD, State.LEASED})


class Event(StrEnum):
    """Name what happens to a delivery. `TRANSITIONS` has the result."""

    PUBLISH = "publish"
    PUBLISH_LATER = "publish_later"
    LOOKAHEAD_REACHED = "lookahead_reached"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    FAILED_LATER = "failed_later"
    GAVE_UP = "gave_up"
    IGNORED = "ignored"
    HOLD = "hold"
    RELEASE = "release"
    """It is held no longer, or no consumer was given the message of its lease."""
    PULLED = "pulled"
    ACKED = "acked"
    HAND_OVER = "hand_over"
    REJECTED = "rejected"
    """Its reader at the broker rejected it permanently."""
    NACKED = "nacked"
    NACKED_LATER = "nacked_later"
    LEASE_ENDED = "lease_ended"
    RECEIVES_SPENT = "receives_spent"
    SHOVEL = "shovel"
    EXPIRE = "expire"
    CANCEL = "cancel"
    PURGE = "purge"
    RESTORE = "restore"
    REFRESH = "refresh"
    REFRESH_LATER = "refresh_later"
    LATE_SUCCESS = "late_success"


class Reason(StrEnum):
    """Name why a delivery was sidelined, held or ended."""

    ATTEMPTS_EXHAUSTED = "attempts_exhausted"
    TERMINAL_STATUS = "terminal_status"
    NACKED = "nacked"
    STUCK = "stuck"
    UNREADABLE = "unreadable"
    ORPHAN = "orphan"
    PAUSED = "paused"
    SUSPENDED = "suspended"
    SATURATED = "saturated"
    DISABLED = "disabled"
    CIRCUIT_OPEN = "circuit_open"
    ORDER = "order"
    IGNORABLE_STATUS = "ignorable_status"
    TOO_LATE = "too_late"
    SUBSCRIPTION_DELETED = "subscription_deleted"
    SUBSCRIPTION_TERMINATED = "subscription_terminated"
    WITHDRAWN = "withdrawn"
    NOT_GRANTED = "not_granted"
    CLEARED = "cleared"


class LogKind(StrEnum):
    """Name the kinds of entries in `delivery_log`."""

    PUBLISHED = "published"
    ENQUEUED = "enqueued"
    ATTEMPTED = "attempted"
    RETRY_SCHEDULED = "retry_scheduled"
    HELD = "held"
    RELEASED = "released"
    LEASED = "leased"
    LEASE_ENDED = "lease_ended"
    PULL_ACKED = "pull_acked"
    NACKED = "nacked"
    SIDELINED = "sidelined"
    SWEPT = "swept"
    SHOVELED = "shoveled"
    DELIVERED = "delivered"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    DROPPED = "dropped"
    PURGED = "purged"
    HANDED_OVER = "handed_over"
    RESTORED = "restored"
    COMING_DUE = "coming_due"
    REPLAYED = "replayed"


class SubscriptionType(StrEnum):
    """Say whether Rooms calls the subscriber (PUSH), or the subscriber calls Rooms (PULL)."""

    PUSH = "PUSH"
    PULL = "PULL"


class SubscriptionStatus(StrEnum):
    """Name the status of a subscription.

    `pending`: it waits for the approval of its room's owner, and gets nothing. The subscriber
    paused it, or a 410 or long failure of the endpoint disabled it, or the owner suspended it: then
    deliveries are held. Rejected and terminated ones stay on record, for 30 days if they were never
    approved; `deleted` lasts until its rows are gone.
    """

    PENDING = "pending"
    ACTIVE = "active"
    PAUSED = "paused"
    DISABLED = "disabled"
    SUSPENDED = "suspended"
    REJECTED = "rejected"
    TERMINATED = "terminated"
    DELETED = "deleted"


ENDED_STATUSES: Final = frozenset(
    {SubscriptionStatus.REJECTED, SubscriptionStatus.TERMINATED, SubscriptionStatus.DELETED}
)
"""The status of subscriptions that get nothing any more."""
SERVED_STATUSES: Final = frozenset(
    {SubscriptionStatus.ACTIVE, SubscriptionStatus.PAUSED, SubscriptionStatus.DISABLED}
)
"""The status of subscriptions that may have messages: approved, not suspended, and not ended."""


class Scope(StrEnum):
    """Name what an API key may do.

    `admin` includes everything within its organisation, such as keys; `audit` reads its journal.
    `platform` covers the installation: its organisations, processes, shards and recovery. `view`
    reads what `manage` and `operate` read, without payloads, and changes nothing.
    """

    MANAGE = "manage"
    PUBLISH = "publish"
    SUBSCRIBE = "subscribe"
    OPERATE = "operate"
    AUDIT = "audit"
    VIEW = "view"
    ADMIN = "admin"
    PLATFORM = "platform"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """Hold the result of an event. A new generation makes every older task stale."""

    to: State
    generation: int = 0
    attempt: int | None = 0
    """Added to the attempt; None resets it to 0."""


def _build_table() -> dict[tuple[State | None, Event], Transition]:
    queued, held, leased, sidelined = State.QUEUED, State.HELD, State.LEASED, State.SIDELINED
    table: dict[tuple[State | None, Event], Transition] = {
        (None, Event.PUBLISH): Transition(to=queued),
        (None, Event.PUBLISH_LATER): Transition(to=State.SCHEDULED),
        (State.SCHEDULED, Event.LOOKAHEAD_REACHED): Transition(to=queued),
        (queued, Event.SUCCEEDED): Transition(to=State.DELIVERED),
        (queued, Event.FAILED): Transition(to=queued, attempt=1),
        (queued, Event.FAILED_LATER): Transition(to=State.SCHEDULED, attempt=1),
        (queued, Event.GAVE_UP): Transition(to=sidelined),
        (queued, Event.IGNORED): Transition(to=State.DROPPED),
        (queued, Event.HOLD): Transition(to=held),
        (held, Event.RELEASE): Transition(to=queued, generation=1),
        (queued, Event.PULLED): Transition(to=leased),
        (leased, Event.RELEASE): Transition(to=queued, generation=1),
        (leased, Event.ACKED): Transition(to=State.DELIVERED),
        (leased, Event.NACKED): Transition(to=queued, generation=1, attempt=1),
        (leased, Event.NACKED_LATER): Transition(to=State.SCHEDULED, generation=1, attempt=1),
        (leased, Event.LEASE_ENDED): Transition(to=queued, generation=1, attempt=1),
        (leased, Event.RECEIVES_SPENT): Transition(to=sidelined, generation=1, attempt=1),
        (queued, Event.HAND_OVER): Transition(to=State.HANDED_OVER),
        (State.HANDED_OVER, Event.REJECTED): Transition(to=sidelined),
        (sidelined, Event.SHOVEL): Transition(to=queued, generation=1, attempt=None),
        (sidelined, Event.PURGE): Transition(to=State.PURGED),
    }
    for state in UNFINISHED:
        table[state, Event.EXPIRE] = Transition(to=State.EXPIRED)
        table[state, Event.CANCEL] = Transition(to=State.CANCELLED)
    # The deletion of its subscription cancels a sidelined delivery too.
    table[sidelined, Event.CANCEL] = Transition(to=State.CANCELLED)
    table[sidelined, Event.EXPIRE] = Transition(to=State.EXPIRED)
    for state in (State.EXPIRED, State.CANCELLED, State.DROPPED):
        table[state, Event.RESTORE] = Transition(to=queued, generation=1, attempt=None)
    for state in (State.SCHEDULED, queued):
        table[state, Event.REFRESH] = Transition(to=queued, generation=1)
        table[state, Event.REFRESH_LATER] = Transition(to=State.SCHEDULED, generation=1)
    table[held, Event.REFRESH] = Transition(to=held, generation=1)
    for state in (State.SCHEDULED, queued, held, sidelined):
        table[state, Event.LATE_SUCCESS] = Transition(to=State.DELIVERED)
    return table


TRANSITIONS: Final = MappingProxyType(_build_table())


def transition(state: State | None, event: Event) -> Transition | None:
    """Return the result of `event` in `state` (None: not created yet); None: it is not allowed."""
    return TRANSITIONS.get((state, event))


def states_allowing(event: Event) -> frozenset[State]:
    """Return the states in which `event` is allowed."""
    return frozenset(
        state for state, happened in TRANSITIONS if happened is event and state is not None
    )


RESTORABLE: Final = UNFINISHED | states_allowing(Event.RESTORE)
"""The states whose deliveries a restore sends again."""
