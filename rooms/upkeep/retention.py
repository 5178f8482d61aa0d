"""Retention: messages that ended long ago go, a day at a time; what is unfinished, sidelined or ended lately stays.

`rooms/storage/retention.py` says how a day is replaced by what stays of it. Here is when: a day that is over by the days
that messages are kept, if at least half of it would go; remains of a month, and of a year, become one. Where the log is
exported, nothing goes that has not left.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

import psycopg

from rooms.errors import StorageRefusedError, StorageUnavailableError
from rooms.metrics import Metrics
from rooms.ports import Clock
from rooms.storage.engine import Connection, connection_for
from rooms.storage.leftovers import bury, clear
from rooms.storage.patience import BUSY, PATIENCE_MS, prepare, value
from rooms.storage.remains import empty_rest, forget_jobs_and_exports
from rooms.storage.retention import Replacement, exported_below, has_strays, weigh
from rooms.storage.spans import Span, parts_of, spans_of
from rooms.upkeep.duty import GoOn
from rooms.upkeep.jobs import rest
from rooms.upkeep.service import Chore

_log = logging.getLogger(__name__)

PARTITION: Final = "upkeep/retention"
EVERY_S: Final = 3600.0
WEIGHED_S: Final = 86_400.0
"""A part that is worth keeping whole is not counted again before."""
PAUSES_S: Final[Sequence[float]] = (0.5, 1, 2, 4, 8, 16, 32)
"""Between two tries to get the locks that a swap needs."""
SETTLES_S: Final = 30.0
_LOOK_S: Final = 0.1
_WAITS: Final = ("export", "busy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How long what has ended is kept. `destination`: where the log has to have left for; None: it is not exported."""

    days: int
    destination: str | None = None
    patience_ms: int = PATIENCE_MS
    pauses_s: Sequence[float] = PAUSES_S
    settles_s: float = SETTLES_S


class Retention:
    """Goes through all that is over once a run."""

    name = "retention"

    def __init__(self, url: str, rules: Rules, clock: Clock, metrics: Metrics) -> None:
        self._url = url
        self._rules = rules
        self._clock = clock
        self._metrics = metrics
        self._weighed: dict[str, tuple[float, int]] = {}
        """Parts that stay as they are: until when, and how many of their deliveries would."""

    async def run(self, go_on: GoOn) -> None:
        """Replace what is to be replaced. StorageUnavailableError; what cannot be had now is left for the next run."""
        if not go_on():
            return
        try:
            async with connection_for(self._url, name="rooms retention") as connection:
                if not await prepare(connection, patience_ms=self._rules.patience_ms):
                    return
                await self._go_through(connection, go_on)
        except BUSY as exc:
            raise StorageRefusedError(str(exc)) from exc
        except psycopg.OperationalError as exc:
            raise StorageUnavailableError(str(exc)) from exc

    async def _go_through(self, connection: Connection, go_on: GoOn) -> None:
        # What is compared with it PostgreSQL has written: a clock that is far ahead would take what has just ended.
        now = min(self._clock.now(), await value(connection, "SELECT now()"))
        before = now - timedelta(days=self._rules.days)
        await clear(connection)
        await bury(connection, go_on)
        exported = None
        if self._rules.destination is not None:
            exported = await exported_below(connection, self._rules.destination)
        waits = dict.fromkeys(_WAITS, 0)
        tried: set[str] = set()
        while go_on():
            parts = await parts_of(connection)
            spans = spans_of(parts, int(before.timestamp() * 1000))
            span = next((span for span in spans if _key(span) not in tried), None)
            if span is None:
                break
            tried.add(_key(span))
            if not await self._worth(connection, span, before, go_on):
                continue
            replacement = Replacement(connection, span, before=before, exported=exported)
            why = await self._replace(connection, span, replacement, go_on)
            if why:
                waits[why] += 1
        if not go_on():
            return
        try:
            await empty_rest(connection, before, exported, go_on)
        except StorageRefusedError as exc:
            waits["busy"] += 1
            _log.info("retention of what stands in no day waits: %s", exc)
        await forget_jobs_and_exports(connection, before)
        await self._tell(connection, waits)

    async def _worth(self, connection: Connection, span: Span, before: datetime, go_on: GoOn) -> bool:
        """Whether it is worth while: several become one, or at least half of one goes."""
        if len(span.parts) > 1:
            return not await has_strays(connection, span)
        (part,) = span.parts
        until, _ = self._weighed.get(_key(span), (0.0, 0))
        if self._clock.monotonic() < until or not go_on():
            return False
        kept, total = await weigh(connection, part, before)
        if worth_while(kept, total):
            self._weighed.pop(_key(span), None)
            return True
        self._weighed[_key(span)] = self._clock.monotonic() + WEIGHED_S, kept
        return False

    async def _replace(self, connection: Connection, span: Span, replacement: Replacement, go_on: GoOn) -> str | None:
        """Why the span is still there, if it is. What fails with one does not keep others."""
        try:
            if not await replacement.has_left():
                return "export"
            await replacement.begin()
            if not await replacement.copy(go_on):
                return None
            if not await replacement.has_left():
                await clear(connection)
                return "export"
            stays = await self._swap(replacement, go_on)
        except (StorageRefusedError, *BUSY) as exc:
            _log.info("retention of %s waits: %s", span.label, exc)
            await _cleared(connection)
            return "busy"
        except psycopg.OperationalError:
            raise
        except psycopg.Error as exc:
            _log.warning("retention of %s failed, and is tried again later", span.label, exc_info=exc)
            await _cleared(connection)
            return "busy"
        if stays is not None:
            _log.info("%s: what has ended is gone, %s", span.label, "the rest is kept" if stays else "nothing is left")
            await bury(connection, go_on)
        return None

    async def _swap(self, replacement: Replacement, go_on: GoOn) -> bool | None:
        until = self._clock.monotonic() + self._rules.settles_s
        while not await replacement.settled():
            if self._clock.monotonic() > until:
                raise StorageRefusedError("a transaction has been open since before")
            if not await rest(_LOOK_S, go_on):
                return None
        for pause_s in self._rules.pauses_s:
            if not go_on():
                return None
            try:
                return await replacement.swap()
            except StorageRefusedError as exc:
                _log.debug("no locks for a swap yet: %s", exc)
            if not await rest(pause_s, go_on):
                return None
        return await replacement.swap()

    async def _tell(self, connection: Connection, waits: Mapping[str, int]) -> None:
        parts = await parts_of(connection)
        whole = [part.low_ms for part in parts if not part.kept]
        remains = {_key_of(part.label, kept=True) for part in parts if part.kept}
        self._metrics.retention_oldest.set(min(whole, default=0) / 1000)
        self._metrics.retention_remains.set(len(remains))
        self._metrics.retention_kept.set(sum(kept for key, (_, kept) in self._weighed.items() if key in remains))
        for why, count in waits.items():
            self._metrics.retention_waits.labels(why).set(count)
        self._metrics.retention_success.set(self._clock.now().timestamp())


def worth_while(kept: int, total: int) -> bool:
    """Whether enough of a part goes, where so many of its deliveries would be kept."""
    return 2 * kept <= total


def _key(span: Span) -> str:
    return _key_of(span.label, kept=all(part.kept for part in span.parts) and len(span.parts) == 1)


def _key_of(label: str, *, kept: bool) -> str:
    return f"{label} kept" if kept else label


async def _cleared(connection: Connection) -> None:
    try:
        await clear(connection)
    except StorageRefusedError as exc:
        _log.info("what retention began stays for a while: %s", exc)


def retention_chores(url: str, rules: Rules, clock: Clock, metrics: Metrics) -> Sequence[Chore]:
    """The duty, once an hour."""
    retention = Retention(url, rules, clock, metrics)
    return [Chore(partition=PARTITION, every_s=EVERY_S, begin=lambda _: retention)]
