"""Define what is counted and measured by hour and day."""

from typing import Final

from rooms.domain.state_machine import LogKind

KEYS: Final = ("room_id", "subscription_id", "event_type", "target_host")
COUNTED: Final = {
    "published": (LogKind.PUBLISHED,),
    "enqueued": (LogKind.ENQUEUED,),
    "attempts": (LogKind.ATTEMPTED,),
    "retries": (LogKind.RETRY_SCHEDULED,),
    "delivered": (LogKind.DELIVERED,),
    "leased": (LogKind.LEASED,),
    "acked": (LogKind.PULL_ACKED,),
    "came_back": (LogKind.NACKED, LogKind.LEASE_ENDED),
    "held": (LogKind.HELD,),
    "sidelined": (LogKind.SIDELINED,),
    "shoveled": (LogKind.SHOVELED,),
    "expired": (LogKind.EXPIRED,),
    "cancelled": (LogKind.CANCELLED,),
    "dropped": (LogKind.DROPPED,),
    "purged": (LogKind.PURGED,),
}
SERVICE: Final = (LogKind.ATTEMPTED, LogKind.LEASED, LogKind.HANDED_OVER)
COUNTS: Final = (*COUNTED, "failures", "unanswered")
SHARES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
MEASURES: Final = ("latency", "end_to_end")
