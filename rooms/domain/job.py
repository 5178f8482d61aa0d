"""The kinds of jobs there are, and how far one is."""

from enum import StrEnum


class JobKind(StrEnum):
    """What a job does, and its arguments: `{"room_id", "name"}`, `{"room_id", "subscription_id", "name"}`; for a shovel,
    purge or sweep `{"room_id", "subscription_id"}` and what of the sideline is meant, and at which pace; of a handler
    queue `{"queue"}`, and `{"magazine"}` which of its two is meant; of a restore and a replay what `rooms.upkeep.restoring`
    and `rooms.upkeep.replaying` read.
    """

    DELETE_ROOM = "delete_room"
    DELETE_SUBSCRIPTION = "delete_subscription"
    SHOVEL_SIDELINE = "shovel_sideline"
    PURGE_SIDELINE = "purge_sideline"
    SWEEP_SIDELINE = "sweep_sideline"
    DELETE_QUEUE = "delete_queue"
    SWEEP_QUEUE = "sweep_queue"
    RESTORE = "restore"
    CLEAR_ROOM = "clear_room"
    REPLAY = "replay"
    RECOVER = "recover"


CANCELLABLE = frozenset(
    {
        JobKind.SHOVEL_SIDELINE,
        JobKind.PURGE_SIDELINE,
        JobKind.RESTORE,
        JobKind.CLEAR_ROOM,
        JobKind.REPLAY,
        JobKind.RECOVER,
    }
)
"""Kinds that may be stopped in the middle. What is deleted is gone from the moment it was asked for, and a sweep is short."""

OF_INSTALLATION = frozenset({JobKind.RECOVER})
"""Kinds that concern every organisation: read and cancelled with the scope `platform` only."""


class JobState(StrEnum):
    """How far a job is."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
