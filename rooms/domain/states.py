"""The states of a delivery, what may happen to it, and the words of its log."""

from enum import StrEnum


class State(StrEnum):
    """Where a delivery stands. `UNFINISHED` ones still owe their subscriber a copy."""

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
    """The broker has it, for a client of its own to read: what becomes of it there nobody tells us."""


UNFINISHED = frozenset({State.SCHEDULED, State.QUEUED, State.HELD, State.LEASED})


class Event(StrEnum):
    """What happens to a delivery; `transitions` says what follows."""

    PUBLISH = "publish"
    PUBLISH_LATER = "publish_later"
    HORIZON_REACHED = "horizon_reached"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    FAILED_LATER = "failed_later"
    GAVE_UP = "gave_up"
    IGNORED = "ignored"
    HOLD = "hold"
    RELEASE = "release"
    PULLED = "pulled"
    ACKED = "acked"
    HAND_OVER = "hand_over"
    REJECTED = "rejected"
    """Its reader at the broker refused it for good."""
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
    """Why a delivery is sidelined, held or ended as it did."""

    ATTEMPTS_EXHAUSTED = "attempts_exhausted"
    TERMINAL_STATUS = "terminal_status"
    NACKED = "nacked"
    STUCK = "stuck"
    UNREADABLE = "unreadable"
    ORPHAN = "orphan"
    PAUSED = "paused"
    SATURATED = "saturated"
    DISABLED = "disabled"
    CIRCUIT_OPEN = "circuit_open"
    ORDER = "order"
    IGNORABLE_STATUS = "ignorable_status"
    TOO_LATE = "too_late"
    SUBSCRIPTION_DELETED = "subscription_deleted"
    WITHDRAWN = "withdrawn"
    CLEARED = "cleared"


class LogKind(StrEnum):
    """The kinds of rows in `delivery_log`."""

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
    """Whether we call the subscriber (PUSH) or it calls us (PULL)."""

    PUSH = "PUSH"
    PULL = "PULL"


class SubscriptionStatus(StrEnum):
    """`paused` by a person, `disabled` by a 410 or the long failure of the endpoint, `deleted` until its rows are gone."""

    ACTIVE = "active"
    PAUSED = "paused"
    DISABLED = "disabled"
    DELETED = "deleted"


class Scope(StrEnum):
    """What an API key may do. `admin` may do everything within its organisation, keys included; `platform` may do what
    belongs to the installation: its processes, its due buckets, its recovery.
    """

    MANAGE = "manage"
    PUBLISH = "publish"
    SUBSCRIBE = "subscribe"
    OPERATE = "operate"
    ADMIN = "admin"
    PLATFORM = "platform"
