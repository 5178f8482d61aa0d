"""What workers have to tell the records of subscriptions, kept until it is told: endpoints that are gone, and such as
nobody can call.
"""

from collections.abc import Awaitable, Callable

from delivery.endpoint import Endpoint
from rooms.domain.attempt import Answer
from rooms.domain.ids import SubscriptionId
from rooms.storage.endpoints import EndpointRecord


class Notices:
    """`disable` and `remark` are called with each notice until they return.

    A remark stands beside an active subscription whose settings make no endpoint, and says what to do; None: no longer.
    """

    def __init__(
        self,
        *,
        disable: Callable[[Endpoint, Answer], Awaitable[None]],
        remark: Callable[[EndpointRecord, str | None], Awaitable[None]],
    ) -> None:
        self._disable = disable
        self._remark = remark
        self._gone: dict[SubscriptionId, tuple[Endpoint, Answer]] = {}
        self._remarks: dict[SubscriptionId, tuple[EndpointRecord, str | None]] = {}

    def gone(self, endpoint: Endpoint, answer: Answer) -> None:
        """The endpoint answered that it is gone: it is to be disabled."""
        self._gone[endpoint.record.subscription_id] = endpoint, answer

    def remark(self, record: EndpointRecord, text: str | None) -> None:
        """The subscription cannot be served, for this reason, or (None) can again."""
        self._remarks[record.subscription_id] = record, text

    async def send(self) -> None:
        """Tell what is to be told. Errors of `disable` and `remark` rise; what was not told stays."""
        for identity, gone in list(self._gone.items()):
            await self._disable(*gone)
            if self._gone[identity] is gone:
                del self._gone[identity]
        for identity, remark in list(self._remarks.items()):
            await self._remark(*remark)
            if self._remarks[identity] is remark:
                del self._remarks[identity]
