"""Watch that consumers which stay may still receive: streams, and polls that wait.

A request's key is checked when it comes. Later its key may be revoked or narrowed, its organisation
suspended, or its subscription ended, also by another process. Two statements for all consumers of
a process find that, once an interval; none is made for a single stream or poll.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Self

from delivery.pull.target import PullTarget
from rooms.db.principals import KeyStanding
from rooms.db.queries.throttle import find_stopped
from rooms.db.writer import LogWriter
from rooms.domain.ids import SubscriptionId
from rooms.domain.principal import Principal
from rooms.errors import TransientError
from rooms.outages import OUTAGES

_log = logging.getLogger(__name__)

CHECK_INTERVAL_S: Final = 1.0
MAX_CHECK_INTERVAL_S: Final = 2.0
"""The longest interval between two checks, however long one takes: consumers end within 5 s."""
_CHECK_SHARE: Final = 50
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
    """Check all consumers of a process, while the context lasts."""

    def __init__(self, writer: LogWriter, check_keys: CheckKeys | None = None) -> None:
        """Use `writer` only for reading; without `check_keys` keys stay valid.

        The writer is for this only: a check must not wait for what consumers ask for.
        """
        self._writer = writer
        self._check_keys = check_keys or _check_no_keys
        self._loop = asyncio.get_running_loop()
        self._consumers: dict[WatchedConsumer, None] = {}
        self._has_consumers = asyncio.Event()
        self._check_now = asyncio.Event()
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
        self._has_consumers.set()
        return consumer

    def forget(self, consumer: WatchedConsumer) -> None:
        """Stop watching a consumer."""
        del self._consumers[consumer]
        if not self._consumers:
            self._has_consumers.clear()

    def check_now(self) -> None:
        """Check without waiting for the interval: something has changed."""
        self._check_now.set()

    async def _check_forever(self) -> None:
        pause_s = CHECK_INTERVAL_S
        while True:
            await self._has_consumers.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._check_now.wait()
            self._check_now.clear()
            begun = self._loop.time()
            try:
                await self._check(list(self._consumers))
            except TransientError as exc:
                OUTAGES.record_failure(exc, _CHECK_OUTAGE)
            except Exception as exc:  # noqa: BLE001 - the next check may succeed
                _log.warning("a check of streams failed, retrying: %s", exc)
            else:
                OUTAGES.record_success(_CHECK_OUTAGE)
            share_s = _CHECK_SHARE * (self._loop.time() - begun)
            pause_s = min(MAX_CHECK_INTERVAL_S, max(CHECK_INTERVAL_S, share_s))

    async def _check(self, consumers: Sequence[WatchedConsumer]) -> None:
        targets = {
            (key.room, key.subscription) for consumer in consumers for key in consumer.targets
        }
        if not targets:
            return
        keys = await self._check_keys({consumer.principal for consumer in consumers})
        gone, suspended = await find_stopped(self._writer, list(targets))
        now_s = self._loop.time()
        for consumer in consumers:
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
