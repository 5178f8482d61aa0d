"""Name the columns of partial journeys by how those of one delivery merge."""

from typing import Final

SUMS: Final = (
    "events", "enqueued", "attempts", "successes", "retries", "retry_steps", "leases", "ends",
    "finals", "backoff_ms", "latency_us",
)  # fmt: skip
MINIMA: Final = ("enqueued_us", "first_us", "first_attempt_us", "finished_us")
MAXIMA: Final = (
    "room_id", "message_hi", "message_lo", "sub_key", "type_key", "host_key", "event_version",
    "last_us", "last_key", "due_us", "generation",
)  # fmt: skip
