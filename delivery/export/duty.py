"""The export as a duty of the upkeep."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from delivery.export.errors import InterruptedExportError
from delivery.export.exporter import Exporter
from rooms.metrics import Metrics
from rooms.upkeep.duty import GoOn
from rooms.upkeep.service import Chore

PARTITION: Final = "export/log"

_log = logging.getLogger(__name__)


class ExportOfLog:
    """Exports what is over, in a thread: reading and writing are blocking, and most of it happens outside Python."""

    name = "the export of the log"

    def __init__(self, exporter: Exporter, metrics: Metrics) -> None:
        self._exporter = exporter
        self._metrics = metrics

    async def run(self, go_on: GoOn) -> None:
        """Export until nothing is left that is over, or the turn ends; what was planned is taken up by the next one."""
        work = asyncio.get_running_loop().run_in_executor(None, lambda: self._exporter.run(go_on=go_on))
        try:
            report = await asyncio.shield(work)
        except InterruptedExportError:
            return
        except asyncio.CancelledError:
            # The thread would hold the process up; its statement ends here, and with it the thread.
            await asyncio.to_thread(self._exporter.exports.cancel)
            await asyncio.gather(work, return_exceptions=True)
            raise
        self._metrics.log_exported.inc(report.rows)
        self._metrics.log_gaps.inc(sum(report.gaps.values()))
        self._metrics.log_held_back.set(0.0 if report.holder is None else report.holder.age_s)
        if report.rows:
            _log.info("exported %d rows of the log in %d segments", report.rows, report.files)


def export_chores(database_url: str, url: str, *, every_s: float, metrics: Metrics) -> Sequence[Chore]:
    """The duty, every so many seconds. ExportError where it cannot be done with what is installed and set."""
    exporter = Exporter(database_url, url)
    return [Chore(partition=PARTITION, every_s=every_s, begin=lambda _: ExportOfLog(exporter, metrics))]
