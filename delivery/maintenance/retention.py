"""Delete messages that ended long ago, a day at a time, and preview that.

Unfinished, sidelined and recently ended deliveries are kept. `rooms/db/retention/replace.py`
replaces a day by the rows that must stay. This module chooses the days: those past the retention
period of which at least half would be deleted. The remaining rows of a month, and of a year, are
merged. Where the log is exported, only exported rows are deleted.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final

import psycopg

from delivery.maintenance.jobs import sleep_unless_stopped
from delivery.maintenance.service import TaskSpec
from delivery.maintenance.task import FunctionTask, ShouldContinue
from delivery.maintenance.task_context import TaskContext
from delivery.maintenance.usage import is_counted_until
from rooms.db.connection import CONNECTION_LOST, Connection, open_connection, open_reader
from rooms.db.retention.bounded_locks import (
    LOCK_CONFLICTS,
    LOCK_TIMEOUT_MS,
    fetch_value,
    prepare_session,
)
from rooms.db.retention.cleanup import (
    clean_default_partitions,
    delete_idle_sequences,
    delete_old_jobs_and_exports,
)
from rooms.db.retention.partitions import ReplacementRange, list_partition_sets, ranges_to_replace
from rooms.db.retention.replace import (
    PartitionReplacement,
    count_kept,
    default_has_rows,
    drop_replaced,
    drop_unfinished,
    exported_xid,
    restored_end,
)
from rooms.errors import StorageRefusedError, StorageUnavailableError
from rooms.metrics import Metrics
from rooms.ports import Clock

_log = logging.getLogger(__name__)

PARTITION: Final = "upkeep/retention"
INTERVAL_S: Final = 3600.0
RECOUNT_S: Final = 86_400.0
"""Time before a set of partitions that stays whole is counted again."""
PAUSES_S: Final[Sequence[float]] = (0.5, 1, 2, 4, 8, 16, 32)
"""Pauses between attempts to lock the tables for a swap."""
SETTLE_TIMEOUT_S: Final = 30.0
_POLL_S: Final = 0.1
_WAIT_REASONS: Final = ("export", "busy")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionRules:
    """Hold the rules of retention. `destination`: of the log's export; None: it is not exported."""

    days: int
    destination: str | None = None
    lock_timeout_ms: int = LOCK_TIMEOUT_MS
    pauses_s: Sequence[float] = PAUSES_S
    settle_timeout_s: float = SETTLE_TIMEOUT_S


class RetentionTask:
    """Replace every range past the retention period, once a run."""

    name = "retention"

    def __init__(self, url: str, rules: RetentionRules, clock: Clock, metrics: Metrics) -> None:
        self._url = url
        self._rules = rules
        self._clock = clock
        self._metrics = metrics
        self._kept_whole: dict[str, tuple[float, int]] = {}
        """Partition sets that stay whole: until when, and how many of their deliveries are kept."""

    async def run(self, should_continue: ShouldContinue) -> None:
        """Replace what is due; ranges that cannot be locked are left to the next run.

        StorageUnavailableError, StorageRefusedError.
        """
        if not should_continue():
            return
        try:
            async with open_connection(self._url, name="rooms retention") as connection:
                if not await prepare_session(
                    connection, lock_timeout_ms=self._rules.lock_timeout_ms
                ):
                    return
                await self._replace_all(connection, should_continue)
        except LOCK_CONFLICTS as exc:
            raise StorageRefusedError(str(exc)) from exc
        except CONNECTION_LOST as exc:
            raise StorageUnavailableError(str(exc)) from exc

    async def _replace_all(self, connection: Connection, should_continue: ShouldContinue) -> None:
        # Compared with times that PostgreSQL wrote: a fast clock would delete what has just ended.
        now = min(self._clock.now(), await fetch_value(connection, "SELECT now()"))
        before = now - timedelta(days=self._rules.days)
        await drop_unfinished(connection)
        await drop_replaced(connection, should_continue)
        exported, restored = await _exported(connection, self._rules.destination)
        waits = dict.fromkeys(_WAIT_REASONS, 0)
        tried: set[str] = set()
        while should_continue():
            parts = await list_partition_sets(connection)
            spans = ranges_to_replace(parts, int(before.timestamp() * 1000))
            span = next((span for span in spans if _range_key(span) not in tried), None)
            if span is None:
                break
            tried.add(_range_key(span))
            if not await self._is_worth_replacing(connection, span, before, should_continue):
                continue
            replacement = PartitionReplacement(
                connection, span, before=before, exported=exported, restored_end=restored
            )
            why = await self._replace(connection, span, replacement, should_continue)
            if why:
                waits[why] += 1
        if not should_continue():
            return
        try:
            await clean_default_partitions(
                connection, before, exported, should_continue, restored_end=restored
            )
        except StorageRefusedError as exc:
            waits["busy"] += 1
            _log.info("retention of the default partitions waits: %s", exc)
        await delete_old_jobs_and_exports(connection, before)
        await delete_idle_sequences(connection, before, should_continue)
        await self._update_metrics(connection, waits)

    async def _is_worth_replacing(
        self,
        connection: Connection,
        replaced: ReplacementRange,
        before: datetime,
        should_continue: ShouldContinue,
    ) -> bool:
        """Return whether several sets become one, or at least half of one would be deleted."""
        if len(replaced.partition_sets) > 1:
            return not await default_has_rows(connection, replaced)
        (part,) = replaced.partition_sets
        until, _ = self._kept_whole.get(_range_key(replaced), (0.0, 0))
        if self._clock.monotonic() < until or not should_continue():
            return False
        kept, total = await count_kept(connection, part, before)
        if is_worth_replacing(kept, total):
            self._kept_whole.pop(_range_key(replaced), None)
            return True
        self._kept_whole[_range_key(replaced)] = self._clock.monotonic() + RECOUNT_S, kept
        return False

    async def _replace(
        self,
        connection: Connection,
        replaced: ReplacementRange,
        replacement: PartitionReplacement,
        should_continue: ShouldContinue,
    ) -> str | None:
        """Replace a range; return the reason if it waits. One that fails does not stop others."""
        try:
            if not await replacement.is_exported():
                return "export"
            await replacement.prepare()
            if not await replacement.copy(should_continue):
                return None
            if not await replacement.is_exported():
                await drop_unfinished(connection)
                return "export"
            has_rest = await self._swap(replacement, should_continue)
        except (StorageRefusedError, *LOCK_CONFLICTS) as exc:
            _log.info("retention of %s waits: %s", replaced.label, exc)
            await _drop_unfinished(connection)
            return "busy"
        except CONNECTION_LOST:
            raise
        except psycopg.Error as exc:
            _log.warning("retention of %s failed, retrying later", replaced.label, exc_info=exc)
            await _drop_unfinished(connection)
            return "busy"
        if has_rest is not None:
            _log.info(
                "retention of %s: deleted ended deliveries, %s",
                replaced.label,
                "kept the rest" if has_rest else "none are left",
            )
            await drop_replaced(connection, should_continue)
        return None

    async def _swap(
        self, replacement: PartitionReplacement, should_continue: ShouldContinue
    ) -> bool | None:
        until = self._clock.monotonic() + self._rules.settle_timeout_s
        while not await replacement.has_no_older_snapshot():
            if self._clock.monotonic() > until:
                raise StorageRefusedError("a transaction has been open since before")
            if not await sleep_unless_stopped(_POLL_S, should_continue):
                return None
        for pause_s in self._rules.pauses_s:
            if not should_continue():
                return None
            try:
                return await replacement.swap()
            except StorageRefusedError as exc:
                _log.debug("no locks for a swap yet: %s", exc)
            if not await sleep_unless_stopped(pause_s, should_continue):
                return None
        return await replacement.swap()

    async def _update_metrics(self, connection: Connection, waiting: Mapping[str, int]) -> None:
        parts = await list_partition_sets(connection)
        whole = [part.low_ms for part in parts if not part.kept]
        remains = {_label_key(part.label, kept=True) for part in parts if part.kept}
        self._metrics.retention_oldest.set(min(whole, default=0) / 1000)
        self._metrics.retention_partial.set(len(remains))
        self._metrics.retention_kept.set(
            sum(kept for key, (_, kept) in self._kept_whole.items() if key in remains)
        )
        for why, count in waiting.items():
            self._metrics.retention_waits.labels(why).set(count)
        self._metrics.retention_success.set(self._clock.now().timestamp())


async def _exported(connection: Connection, destination: str | None) -> tuple[int | None, int]:
    """Return the ends of what is exported, and of the restored rows among it."""
    if destination is None:
        return None, 0
    return await exported_xid(connection, destination), await restored_end(connection, destination)


def is_worth_replacing(kept: int, total: int) -> bool:
    """Return whether at least half of the deliveries would be deleted."""
    return 2 * kept <= total


def _range_key(replaced: ReplacementRange) -> str:
    return _label_key(
        replaced.label,
        kept=all(part.kept for part in replaced.partition_sets)
        and len(replaced.partition_sets) == 1,
    )


def _label_key(label: str, *, kept: bool) -> str:
    return f"{label} kept" if kept else label


async def _drop_unfinished(connection: Connection) -> None:
    try:
        await drop_unfinished(connection)
    except StorageRefusedError as exc:
        _log.info("an unfinished replacement stays until the next run: %s", exc)


def retention_specs(
    url: str, rules: RetentionRules, clock: Clock, metrics: Metrics
) -> Sequence[TaskSpec]:
    """Return the hourly retention task."""
    retention = RetentionTask(url, rules, clock, metrics)

    def create(context: TaskContext) -> FunctionTask:
        async def run(should_continue: ShouldContinue) -> None:
            # The log of what is deleted must be in the counts of usage.
            before = clock.now() - timedelta(days=rules.days)
            if await is_counted_until(context.engine, before, should_continue):
                await retention.run(should_continue)

        return FunctionTask(retention.name, run)

    return [TaskSpec(partition=PARTITION, every_s=INTERVAL_S, create=create)]


class Disposition(StrEnum):
    """Name the result of retention for a range."""

    DROP = "goes"
    """All of it is deleted."""
    SHRINK = "shrinks"
    """Only rows that must stay are kept."""
    KEEP = "stays"
    """Too little of it would be deleted."""
    WAIT = "waits"
    """Its log is not exported yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPreview:
    """Preview a past day, or the kept rest of several (`kept`): deliveries, and those to stay."""

    label: str
    kept: bool
    deliveries: int
    stay: int
    fate: Disposition
    """The name is part of the command's JSON."""


async def preview(url: str, *, days: int, destination: str | None) -> Sequence[RetentionPreview]:
    """Return what retention of `days` days would do, the oldest range first.

    `destination`: of the log's export. Counts every delivery, and takes no locks.
    StorageUnavailableError.
    """
    async with open_reader(url, name="rooms retention preview") as connection:
        before = await fetch_value(connection, "SELECT now()") - timedelta(days=days)
        exported, restored = await _exported(connection, destination)
        spans = ranges_to_replace(
            await list_partition_sets(connection), int(before.timestamp() * 1000)
        )
        return [
            await _preview_range(connection, span, before, exported, restored)
            for span in list(spans)
            if len(span.partition_sets) == 1
        ]


async def _preview_range(
    connection: Connection,
    replaced: ReplacementRange,
    before: datetime,
    exported: int | None,
    restored: int,
) -> RetentionPreview:
    (part,) = replaced.partition_sets
    stay, deliveries = await count_kept(connection, part, before)
    if not is_worth_replacing(stay, deliveries):
        fate = Disposition.KEEP
    elif not await PartitionReplacement(
        connection, replaced, before=before, exported=exported, restored_end=restored
    ).is_exported():
        fate = Disposition.WAIT
    else:
        fate = Disposition.SHRINK if stay else Disposition.DROP
    return RetentionPreview(
        label=part.label, kept=part.kept, deliveries=deliveries, stay=stay, fate=fate
    )
