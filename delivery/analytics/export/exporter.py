"""Export completed log rows: plan a range, write its segments, seal it, repeat."""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from delivery.analytics.export import segments
from delivery.analytics.export.segments import Destination, InterruptedExportError
from delivery.maintenance.service import TaskSpec
from delivery.maintenance.task import ShouldContinue
from rooms.db.queries.log_export import ExportConnection, ExportRange, OldestTransaction
from rooms.metrics import Metrics

_log = logging.getLogger(__name__)

MAX_XIDS: Final = 50_000
"""Transactions in one plan. A crash repeats at most one plan."""
HOLDER_WARN_AFTER_S: Final = 300.0
"""Age from which the oldest open transaction is logged as delaying the export."""

OnProgress = Callable[[int], None]
"""Called with the number of rows written so far."""
OnSealed = Callable[[int, int], None]
"""Called with the rows of a sealed plan, and with how many numbers of its writers are in no row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """Total one export run.

    `gaps`: numbers that are in no row, by writer. `holder`: the oldest open transaction that delays
    newer rows.
    """

    rows: int
    files: int
    size: int
    plans: int
    gaps: dict[int, int]
    holder: OldestTransaction | None
    busy: bool = False
    """True if another export holds the lock; nothing was done."""


class Exporter:
    """Export to one destination. Its methods block."""

    def __init__(self, database_url: str, url: str) -> None:
        """Open the destination. Raise DestinationError if its URL has an unknown scheme."""
        self.destination = Destination(url)
        self.exports = ExportConnection(database_url, self.destination.name)

    def run(
        self,
        *,
        should_continue: ShouldContinue = lambda: True,
        on_progress: OnProgress = lambda _: None,
        on_sealed: OnSealed = lambda _, __: None,
        max_xids: int = MAX_XIDS,
    ) -> ExportReport:
        """Export the rows of all completed transactions.

        Raise InterruptedExportError once `should_continue` returns False; sealed plans stay. After
        StorageUnavailableError, StorageRefusedError or DestinationError the next run continues with
        the open plan.
        """
        rows = files = size = plans = 0
        gaps: Counter[int] = Counter()
        with self.exports as exports:
            if not exports.lock():
                return ExportReport(
                    rows=0, files=0, size=0, plans=0, gaps={}, holder=None, busy=True
                )
            horizon = exports.settled_xid()  # read once, so that a run ends at any write rate
            while should_continue():
                plan = exports.next_range(horizon, max_transactions=max_xids)
                if plan is None:
                    exports.record_complete(horizon)
                    break
                done = self._write_plan(plan, rows, should_continue, on_progress)
                found = exports.seal(plan, files=done.files, size=done.size, writers=done.writers)
                # At once: no later run finds them, and this one may break off.
                for writer, missing in found.items():
                    _log.warning("%d rows of writer %d are missing from the log", missing, writer)
                on_sealed(done.rows, sum(found.values()))
                gaps.update(found)
                rows, files, size, plans = (
                    rows + done.rows,
                    files + done.files,
                    size + done.size,
                    plans + 1,
                )
            holder = exports.oldest_transaction()
        if holder is not None and holder.age_s > HOLDER_WARN_AFTER_S:
            _log.warning(
                "an open transaction delays the export (%.0f s): process %d, %r, %s",
                holder.age_s, holder.pid, holder.name, holder.state,
            )  # fmt: skip
        return ExportReport(
            rows=rows, files=files, size=size, plans=plans, gaps=gaps, holder=holder
        )

    def _write_plan(
        self,
        plan: ExportRange,
        rows_before: int,
        should_continue: ShouldContinue,
        on_progress: OnProgress,
    ) -> segments.WrittenSegments:
        def watch(rows: int) -> bool:
            on_progress(rows_before + rows)
            return should_continue()

        with self.exports.read_csv(plan, segments.COLUMNS) as read:
            return segments.write_segments(
                self.destination,
                read,
                stem=plan.file_stem,
                token=secrets.token_hex(4),
                on_rows=watch,
                retry=plan.started,
            )


EXPORT_PARTITION: Final = "export/log"


class LogExportTask:
    """Export the log in a thread, as most of the work is blocking or outside Python."""

    name = "the export of the log"

    def __init__(self, exporter: Exporter, metrics: Metrics) -> None:
        self._exporter = exporter
        self._metrics = metrics

    async def run(self, should_continue: ShouldContinue) -> None:
        """Export until no completed row is left or the term ends; an open plan stays for later."""
        work = asyncio.get_running_loop().run_in_executor(
            None,
            lambda: self._exporter.run(should_continue=should_continue, on_sealed=self._count),
        )
        try:
            report = await asyncio.shield(work)
        except InterruptedExportError:
            return
        except asyncio.CancelledError:
            # Cancelling the statement ends the thread, which would block the exit.
            await asyncio.to_thread(self._exporter.exports.cancel)
            await asyncio.gather(work, return_exceptions=True)
            raise
        self._metrics.log_export_delay.set(0.0 if report.holder is None else report.holder.age_s)
        if report.rows:
            _log.info("exported %d log rows in %d segments", report.rows, report.files)

    def _count(self, rows: int, missing: int) -> None:
        self._metrics.log_exported.inc(rows)
        self._metrics.log_gaps.inc(missing)


def export_task_specs(
    database_url: str, url: str, *, every_s: float, metrics: Metrics
) -> Sequence[TaskSpec]:
    """Return the periodic export task. Raise ExportError if it cannot run with these settings."""
    exporter = Exporter(database_url, url)
    return [
        TaskSpec(
            partition=EXPORT_PARTITION,
            every_s=every_s,
            create=lambda _: LogExportTask(exporter, metrics),
        )
    ]
