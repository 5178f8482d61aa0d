"""Writes what workers have to tell into the records, and has everybody else read them anew."""

from collections.abc import Callable

from delivery.endpoint import Endpoint
from delivery.health import Notice, Word
from rooms.domain.ids import DeliveryId, IdMaker, MessageId
from rooms.ports import Clock
from rooms.storage.endpoints import EndpointRecord
from rooms.storage.lanes import SharedLanes
from rooms.storage.signals import Channel, Signals


class Records:
    """`observe` is told of each word that changed something."""

    def __init__(
        self, lanes: SharedLanes, signals: Signals, *, ids: IdMaker, clock: Clock, observe: Callable[[Word], None]
    ) -> None:
        self._lanes = lanes
        self._signals = signals
        self._ids = ids
        self._clock = clock
        self._observe = observe

    async def tell(self, notice: Notice) -> None:
        """Write it down, where the records do not say so already. StorageUnavailableError, StorageRefusedError: tell it again."""
        record = notice.endpoint.record
        if await self._write(notice):
            self._observe(notice.word)
            if notice.word in {Word.GONE, Word.FAILED_LONG}:
                self._signals.ring_queued()  # the message that tells of it
        # Also when another worker was first: its signal may be lost.
        self._signals.ring(Channel.CONFIG, str(record.room_id))

    async def remark(self, record: EndpointRecord, reason: str | None) -> None:
        """Say beside the status why the subscription cannot be served (None: it can)."""
        await self._lanes.remark(record.room_id, record.subscription_id, version=record.version, reason=reason)

    async def _write(self, notice: Notice) -> bool:
        record = notice.endpoint.record
        identity = record.subscription_id
        match notice.word:
            case Word.GONE:
                return await self._disable(notice.endpoint, notice.detail, None)
            case Word.FAILED_LONG:
                return await self._disable(notice.endpoint, notice.detail, record.lane.disable_after_ms)
            case Word.TRIPPED:
                return await self._lanes.open_circuit(identity, open_ms=record.lane.circuit_open_ms)
            case Word.RECOVERED:
                return await self._lanes.close_circuit(identity)
            case Word.FAILING:
                return await self._lanes.failing(identity, for_s=notice.for_s)
            case Word.WELL:
                return await self._lanes.well(identity)

    async def _disable(self, endpoint: Endpoint, reason: str, failing_ms: int | None) -> bool:
        room, now_ms = endpoint.record.room_id, self._clock.now_ms()
        return await self._lanes.disable(
            endpoint.record.subscription_id,
            reason=reason,
            failing_ms=failing_ms,
            message=MessageId(self._ids.make(room, now_ms)),
            delivery=DeliveryId(self._ids.make(room, now_ms)),
        )
