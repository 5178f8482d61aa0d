"""What a job on a sideline is asked to do, as its arguments say it."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from rooms.domain.ids import DeliveryId, RoomId, SubscriptionId, room_of
from rooms.domain.states import Reason
from rooms.storage.sideline_pages import SidelineFilter

MAX_CONCURRENCY: Final = 16
MAX_RATE_PER_S: Final = 100_000
MAX_SHOVELS: Final = 3
"""How often a delivery may come back from its sideline before only a person brings it back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Which deliveries of a subscription's sideline, and how fast."""

    subscription: SubscriptionId
    wanted: SidelineFilter
    rate_per_s: float | None = None
    """None: as fast as it goes."""
    concurrency: int = 4
    """Batches under way at a time."""
    max_shovels: int = MAX_SHOVELS
    """Those shoveled so often stay."""

    @property
    def room(self) -> RoomId:
        """The subscription's room."""
        return room_of(self.subscription)

    def arguments(self) -> dict[str, Any]:
        """The arguments of a job, as JSON."""
        wanted = self.wanted
        said = {
            "room_id": self.room,
            "subscription_id": self.subscription,
            "since": wanted.since and wanted.since.isoformat(),
            "until": wanted.until and wanted.until.isoformat(),
            "reason": wanted.reason,
            "event_type": wanted.event_type,
            "error": wanted.error,
            "correlation_ids": list(wanted.correlation_ids) or None,
            "delivery_ids": list(wanted.deliveries) or None,
            "rate_per_s": self.rate_per_s,
            "concurrency": self.concurrency,
            "max_shovels": self.max_shovels,
        }
        return {name: value for name, value in said.items() if value is not None}

    @classmethod
    def read(cls, arguments: Mapping[str, Any]) -> "Order":
        """The order in a job's arguments. ValueError, KeyError: they make no sense."""
        reason = arguments.get("reason")
        return cls(
            subscription=SubscriptionId(arguments["subscription_id"]),
            wanted=SidelineFilter(
                since=_time(arguments.get("since")),
                until=_time(arguments.get("until")),
                reason=None if reason is None else Reason(reason),
                event_type=arguments.get("event_type"),
                error=arguments.get("error"),
                correlation_ids=tuple(arguments.get("correlation_ids") or ()),
                deliveries=tuple(DeliveryId(one) for one in arguments.get("delivery_ids") or ()),
            ),
            rate_per_s=arguments.get("rate_per_s"),
            concurrency=int(arguments.get("concurrency", 4)),
            max_shovels=int(arguments.get("max_shovels", MAX_SHOVELS)),
        )


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)
