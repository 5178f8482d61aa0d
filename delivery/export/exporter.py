"""The exporter: plan, write, seal, until everything that is over has left."""

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from delivery.export import segments
from delivery.export.segments import Destination
from rooms.storage.exports import Exports, Holder, Plan

_log = logging.getLogger(__name__)

MOST_XIDS: Final = 50_000
"""Transactions of one plan: what a crash has done again."""
PATIENCE_S: Final = 300.0
"""How long a transaction may stay open before it is told that it holds the export back."""

Progress = Callable[[int], None]
"""Told how many rows have been written so far."""
GoOn = Callable[[], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one run has written. `gaps`: numbers of these writers that are in no row. `holder`: who holds the rest back."""

    rows: int
    files: int
    size: int
    plans: int
    gaps: dict[int, int]
    holder: Holder | None
    busy: bool = False
    """True: somebody else is exporting; nothing was done."""


class Exporter:
    """Exports to one destination. Blocking."""

    def __init__(self, database_url: str, url: str) -> None:
        """DestinationError."""
        self.destination = Destination(url)
        self.exports = Exports(database_url, self.destination.name)

    def run(self, *, go_on: GoOn = lambda: True, progress: Progress = lambda _: None, most: int = MOST_XIDS) -> Report:
        """Export what is over by now. InterruptedExportError as soon as `go_on` says no; what was sealed stays.

        StorageUnavailableError, StorageRefusedError, DestinationError: the next run takes up what was planned.
        """
        rows = files = size = plans = 0
        gaps: dict[int, int] = {}
        with self.exports as exports:
            if not exports.lock():
                return Report(rows=0, files=0, size=0, plans=0, gaps={}, holder=None, busy=True)
            exports.summarize()
            horizon = exports.horizon()  # once, so that a run ends however fast others write
            while go_on() and (plan := exports.next_plan(horizon, most=most)) is not None:
                done = self._write(plan, rows, go_on, progress)
                gaps.update(exports.seal(plan, files=done.files, size=done.size, writers=done.writers))
                rows, files, size, plans = rows + done.rows, files + done.files, size + done.size, plans + 1
            holder = exports.holder()
        for writer, missing in gaps.items():
            _log.warning("%d rows of writer %d are not in the log", missing, writer)
        if holder is not None and holder.age_s > PATIENCE_S:
            _log.warning(
                "the export waits for a transaction that has been open for %.0f s: process %d, %r, %s",
                holder.age_s, holder.pid, holder.name, holder.state,
            )  # fmt: skip
        return Report(rows=rows, files=files, size=size, plans=plans, gaps=gaps, holder=holder)

    def _write(self, plan: Plan, before: int, go_on: GoOn, progress: Progress) -> segments.Written:
        def watch(rows: int) -> bool:
            progress(before + rows)
            return go_on()

        with self.exports.rows_of(plan, segments.COLUMNS) as read:
            return segments.write(
                self.destination, read, stem=plan.stem, token=secrets.token_hex(4), watch=watch, again=plan.begun
            )
