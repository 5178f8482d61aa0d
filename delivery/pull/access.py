"""Watch that consumers which stay may still receive: streams, and polls that wait.

A request's key is checked when it comes. Later its key may be revoked or narrowed, its organisation
suspended, or its subscription ended, also by another process. Two statements for a thousand
consumers of a process find that, once an interval.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Self

from delivery.pull.target import PullTarget
from rooms.db.principals import KeyStanding
from rooms.db.queries.throttle import find_stopped
from rooms.db.writer import LogWriter
from rooms.domain.ids import RoomId, SubscriptionId
from rooms.domain.principal import Principal
from rooms.errors import TransientError
from rooms.outages import OUTAGES

_log = logging.getLogger(__name__)

CHECK_INTERVAL_S: Final = 1.0
MAX_CHECK_INTERVAL_S: Final = 2.0
"""The longest interval between two checks, however long one takes: consumers end within 5 s."""
_CHECK_SHARE: Final = 50
_PAUSE_SHARE: Final = 4
"""After a check there is a pause of so many times its length,"""
_MAX_PAUSE_S: Final = 1.0
"""or of this, if that is shorter."""
_PAGE: Final = 1000
"""About so many targets are looked up by one statement."""
_CHECK_OUTAGE: Final = "checks of stream keys and subscriptions failed"
_SLACK_S: Final = 1.0
"""The time by which a suspension may seem to be older than the consumer that it ends."""

CheckKeys = Callable[[Collection[Principal]], Awaitable[Mapping[Principal, KeyStanding]]]


class Loss(StrEnum):
    """Name why a consumer may not receive any more."""

    REVOKED = "revoked"
    """Its key is revoked, narrowed or over."""
    DELETED = "deleted"
    """Its subscription is deleted, or ended in another way."""
    SUSPENDED = "suspended"
    """Its organisation or its subscription is suspended."""


@dataclass(eq=False, slots=True)
class WatchedConsumer:
    """Hold a consumer: whose it is, what it receives, and what to call."""

    principal: Principal
    targets: Sequence[PullTarget]
    on_loss: Callable[[Loss], None]
    since_s: float


async def _check_no_keys(principals: Collection[Principal]) -> Mapping[Principal, KeyStanding]:
    return dict.fromkeys(principals, KeyStanding.VALID)


class AccessMonitor:
    """Check all consumers of a process, while the context lasts.

    All are checked once an interval. Those of rooms that have changed, and new ones, are checked
    before, so that the changes of one organisation cost no check of the consumers of others.
    """

    def __init__(self, writer: LogWriter, check_keys: CheckKeys | None = None) -> None:
        """Use `writer` only for reading; without `check_keys` keys stay valid.

        The writer is for this only: a check must not wait for what consumers ask for.
        """
        self._writer = writer
        self._check_keys = check_keys or _check_no_keys
        self._loop = asyncio.get_running_loop()
        self._consumers: dict[WatchedConsumer, None] = {}
        self._by_room: dict[RoomId, dict[WatchedConsumer, None]] = {}
        self._has_consumers = asyncio.Event()
        self._asked: dict[WatchedConsumer, None] = {}
        self._is_asked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._check_forever())
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def watch(
        self,
        principal: Principal,
        targets: Sequence[PullTarget],
        on_loss: Callable[[Loss], None],
    ) -> WatchedConsumer:
        """Watch a consumer until `forget`; `on_loss` is called in each check until then."""
        consumer = WatchedConsumer(principal, targets, on_loss, self._loop.time())
        self._consumers[consumer] = None
        for target in targets:
            self._by_room.setdefault(target.room, {})[consumer] = None
        self._has_consumers.set()
        return consumer

    def forget(self, consumer: WatchedConsumer) -> None:
        """Stop watching a consumer."""
        del self._consumers[consumer]
        self._asked.pop(consumer, None)
        for room in {target.room for target in consumer.targets}:
            others = self._by_room[room]
            del others[consumer]
            if not others:
                del self._by_room[room]
        if not self._consumers:
            self._has_consumers.clear()

    def check_soon(self, consumer: WatchedConsumer) -> None:
        """Check a consumer without waiting for the interval: it is new."""
        self._asked[consumer] = None
        self._is_asked.set()

    def on_change(self, rooms: Collection[RoomId]) -> None:
        """Check the consumers of rooms that have changed (empty: of any) without waiting."""
        if rooms:
            for room in rooms:
                self._asked |= self._by_room.get(room, {})
        else:
            self._asked |= self._consumers
        if self._asked:
            self._is_asked.set()

    async def _check_forever(self) -> None:
        next_s = self._loop.time() + CHECK_INTERVAL_S
        while True:
            await self._has_consumers.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(next_s):
                    await self._is_asked.wait()
            begun_s = self._loop.time()
            checks_all = begun_s >= next_s
            consumers = list(self._consumers if checks_all else self._asked)
            self._is_asked.clear()
            self._asked.clear()
            try:
                await self._check(consumers)
            except TransientError as exc:
                OUTAGES.record_failure(exc, _CHECK_OUTAGE)
            except Exception as exc:  # noqa: BLE001 - the next check may succeed
                _log.warning("a check of streams failed, retrying: %s", exc)
            else:
                OUTAGES.record_success(_CHECK_OUTAGE)
            now_s = self._loop.time()
            took_s = now_s - begun_s
            if checks_all:
                share_s = _CHECK_SHARE * took_s
                next_s = now_s + min(MAX_CHECK_INTERVAL_S, max(CHECK_INTERVAL_S, share_s))
            # Rooms that change all the time are not checked all the time.
            await asyncio.sleep(min(_MAX_PAUSE_S, _PAUSE_SHARE * took_s))

    async def _check(self, consumers: Sequence[WatchedConsumer]) -> None:
        """Check these consumers, a page at a time: others use the loop in between."""
        if not consumers:
            return
        principals = {consumer.principal for consumer in consumers}
        keys = await self._check_keys(principals)
        for page in _pages(consumers):
            targets = list({(key.room, key.subscription) for one in page for key in one.targets})
            gone, suspended = await find_stopped(self._writer, targets)
            now_s = self._loop.time()
            for consumer in page:
                if consumer not in self._consumers:
                    continue
                loss = _key_loss(keys[consumer.principal]) or _target_loss(
                    (key.subscription for key in consumer.targets),
                    gone,
                    suspended,
                    age_s=now_s - consumer.since_s,
                )
                if loss is not None:
                    consumer.on_loss(loss)


def _pages(consumers: Sequence[WatchedConsumer]) -> Iterator[Sequence[WatchedConsumer]]:
    """Return consumers with about `_PAGE` targets at a time."""
    page: list[WatchedConsumer] = []
    count = 0
    for consumer in consumers:
        page.append(consumer)
        count += len(consumer.targets)
        if count >= _PAGE:
            yield page
            page, count = [], 0
    if page:
        yield page


def _key_loss(standing: KeyStanding) -> Loss | None:
    match standing:
        case KeyStanding.VALID:
            return None
        case KeyStanding.SUSPENDED:
            return Loss.SUSPENDED
        case KeyStanding.OVER:
            return Loss.REVOKED


def _target_loss(
    subscriptions: Iterable[SubscriptionId],
    gone: Collection[SubscriptionId],
    suspended: Mapping[SubscriptionId, float],
    *,
    age_s: float,
) -> Loss | None:
    """Return the loss of a consumer of that age.

    One that began while its subscription was suspended already waits for the end of that, as it
    would for a paused one: it would only come again.
    """
    found = None
    for subscription in subscriptions:
        if subscription in gone:
            return Loss.DELETED
        if suspended.get(subscription, float("inf")) <= age_s + _SLACK_S:
            found = Loss.SUSPENDED
    return found
