"""Name the kinds and states of jobs."""

from enum import StrEnum


class JobKind(StrEnum):
    """Name what a job does.

    The arguments of a job depend on its kind.

    - Delete a room, or delete or terminate a subscription: `room_id`, `subscription_id`, `name`.
    - Delete an organisation: `organisation_id`, `name`. It counts rooms, subscriptions to rooms of
      others and handler queues, which jobs of their own delete; these also have its id, `parent`.
    - Cancel what a lost grant does not cover any more: `room_id`, `subscription_id`, `name`.
    - Shovel, purge or sweep a sideline: `room_id`, `subscription_id`, a selection and a rate.
    - Handler queues: `queue`, and `magazine` for one of its two.
    - Check the stores: `repair`. Preview retention: `days`, null for those of the settings. Their
      result holds what they found.
    - Analyse the log: `full`. Its result has the last lines of the command.
    - Restore, clear, skip and replay: see `delivery.maintenance.restore` and
      `delivery.maintenance.replay`.
    - Retry what waits for its next attempt: see `delivery.maintenance.waiting_retries`.
    """

    DELETE_ROOM = "delete_room"
    DELETE_SUBSCRIPTION = "delete_subscription"
    TERMINATE_SUBSCRIPTION = "terminate_subscription"
    CANCEL_UNGRANTED = "cancel_ungranted"
    DELETE_ORGANISATION = "delete_organisation"
    SHOVEL_SIDELINE = "shovel_sideline"
    PURGE_SIDELINE = "purge_sideline"
    SWEEP_SIDELINE = "sweep_sideline"
    DELETE_QUEUE = "delete_queue"
    SWEEP_QUEUE = "sweep_queue"
    RESTORE = "restore"
    CLEAR_ROOM = "clear_room"
    CLEAR_SUBSCRIPTION = "clear_subscription"
    SKIP_TO_NOW = "skip_to_now"
    RETRY_WAITING = "retry_waiting"
    REPLAY = "replay"
    RECOVER = "recover"
    CHECK_STORES = "check_stores"
    PREVIEW_RETENTION = "preview_retention"
    ANALYSE_LOG = "analyze_log"


CANCELLABLE = frozenset(
    {
        JobKind.SHOVEL_SIDELINE,
        JobKind.PURGE_SIDELINE,
        JobKind.RESTORE,
        JobKind.CLEAR_ROOM,
        JobKind.CLEAR_SUBSCRIPTION,
        JobKind.SKIP_TO_NOW,
        JobKind.RETRY_WAITING,
        JobKind.REPLAY,
        JobKind.RECOVER,
        JobKind.CHECK_STORES,
        JobKind.PREVIEW_RETENTION,
        JobKind.ANALYSE_LOG,
    }
)
"""Kinds that can be cancelled while they run. Deletions take effect at once; sweeps are short."""

REPEATABLE = frozenset(
    {
        JobKind.SHOVEL_SIDELINE,
        JobKind.PURGE_SIDELINE,
        JobKind.SWEEP_SIDELINE,
        JobKind.SWEEP_QUEUE,
        JobKind.RESTORE,
        JobKind.CLEAR_ROOM,
        JobKind.CLEAR_SUBSCRIPTION,
        JobKind.SKIP_TO_NOW,
        JobKind.RETRY_WAITING,
        JobKind.REPLAY,
    }
)
"""Kinds that can be requested again and again, so that the open ones are bounded."""

ENDS_A_BACKLOG = frozenset(
    {
        JobKind.DELETE_SUBSCRIPTION,
        JobKind.TERMINATE_SUBSCRIPTION,
        JobKind.CLEAR_SUBSCRIPTION,
        JobKind.SKIP_TO_NOW,
    }
)
"""Kinds that cancel what waits for a subscription, known to its subscriber or not."""

INSTALLATION_WIDE = frozenset(
    {
        JobKind.RECOVER,
        JobKind.DELETE_ORGANISATION,
        JobKind.CHECK_STORES,
        JobKind.PREVIEW_RETENTION,
        JobKind.ANALYSE_LOG,
    }
)
"""Kinds that concern every organisation. Only the scope `platform` reads and cancels them."""


class JobState(StrEnum):
    """Name the state of a job."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
