"""What workers have to tell the records of subscriptions, kept until it is told: endpoints that are gone, fail or are well
again, and such as nobody can call.
"""

from collections.abc import Awaitable, Callable
from typing import Final

from delivery.health import Notice, Word
from rooms.domain.ids import SubscriptionId
from rooms.storage.endpoints import EndpointRecord

_SUBJECTS: Final = {
    Word.GONE: "status",
    Word.FAILED_LONG: "status",
    Word.TRIPPED: "circuit",
    Word.RECOVERED: "circuit",
    Word.FAILING: "failing",
    Word.WELL: "failing",
}


class Notices:
    """`tell` and `remark` are called with each notice until they return.

    A remark stands beside an active subscription whose settings make no endpoint, and says what to do; None: no longer.
    """

    def __init__(
        self,
        *,
        tell: Callable[[Notice], Awaitable[None]],
        remark: Callable[[EndpointRecord, str | None], Awaitable[None]],
    ) -> None:
        self._tell = tell
        self._remark = remark
        self._notices: dict[tuple[SubscriptionId, str], Notice] = {}
        self._remarks: dict[SubscriptionId, tuple[EndpointRecord, str | None]] = {}

    def add(self, notice: Notice) -> None:
        """Have it told; what was to be told before about the same is out of date."""
        self._notices[notice.endpoint.record.subscription_id, _SUBJECTS[notice.word]] = notice

    def remark(self, record: EndpointRecord, text: str | None) -> None:
        """The subscription cannot be served, for this reason, or (None) can again."""
        self._remarks[record.subscription_id] = record, text

    async def send(self) -> None:
        """Tell what is to be told. Errors of `tell` and `remark` rise; what was not told stays."""
        for about, notice in list(self._notices.items()):
            await self._tell(notice)
            if self._notices[about] is notice:
                del self._notices[about]
        for identity, remark in list(self._remarks.items()):
            await self._remark(*remark)
            if self._remarks[identity] is remark:
                del self._remarks[identity]
