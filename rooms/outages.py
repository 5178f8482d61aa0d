"""Outages of the parts that a process depends on, as its log reports them.

    up ── failed ──► away ── every consequence has ended ──► up
    │                 (one line, one more each minute)        (one line: how long, and what it meant)
    └── failed within 30 s of the last outage's first line ──► unsteady: counted, and logged with the next line

A part is named once, whatever notices that it is away, and each caller says what follows: `requests were refused`. Like
loggers, `OUTAGES` is one for the whole process. All calls belong to the event loop's thread.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from rooms.errors import (
    BrokerUnavailableError,
    ElectionUnavailableError,
    MagazineUnavailableError,
    PermanentError,
    StorageRefusedError,
    StorageUnavailableError,
)

_log = logging.getLogger(__name__)

REMINDER_S: Final = 60.0
UNSTEADY_S: Final = 30.0
"""An outage that begins so soon after the beginning of the last one gets no line of its own: both may be seconds short."""
STALE_S: Final = 10.0
"""What has not failed for so long is not tried any more: it keeps no part away where another caller succeeds."""
_NAMED: Final = 3
_DRIVERS: Final = frozenset({"psycopg", "sqlalchemy"})


class Part(StrEnum):
    """What a process depends on, as the log names it."""

    POSTGRESQL = "PostgreSQL"
    BROKER = "the broker"
    ELECTION = "the election's store"
    MAGAZINES = "the magazines' store"


def part_of(error: BaseException) -> Part:
    """Return the part that an error is of. What PostgreSQL's driver raised is PostgreSQL's, whatever it became since: it
    may be the broker, the election's store and the magazines' store as well.
    """
    cause: BaseException | None = error
    while cause is not None:
        ours = isinstance(cause, StorageUnavailableError | StorageRefusedError)
        if ours or type(cause).__module__.partition(".")[0] in _DRIVERS:
            return Part.POSTGRESQL
        cause = cause.__cause__
    match error:
        case BrokerUnavailableError():
            return Part.BROKER
        case ElectionUnavailableError():
            return Part.ELECTION
        case MagazineUnavailableError():
            return Part.MAGAZINES
        case _:
            return Part.POSTGRESQL


@dataclass(slots=True)
class _Outage:
    """One part that is away, or was: `failing` has the time of the last failure by consequence."""

    since: float = 0.0
    line_at: float = float("-inf")
    told: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    failing: dict[str, float] = field(default_factory=dict)


class Outages:
    """The outages of one process."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._known: dict[Part, _Outage] = {}
        self.any = False
        """Whether anything fails right now; hot paths ask this before they report a success."""

    def failed(self, error: BaseException, consequence: str, *, count: int = 1, part: Part | None = None) -> None:
        """Report that something failed and what followed, so many times. `part`: where the error does not say.

        A PermanentError is no outage, and is logged as it is.
        """
        if isinstance(error, PermanentError):
            _log.warning("%s: %s", consequence, error)
            return
        part = part_of(error) if part is None else part
        now = self._monotonic()
        outage = self._known.setdefault(part, _Outage())
        if not outage.failing:
            outage.since = now
        outage.failing[consequence] = now
        outage.counts[consequence] += count
        self.any = True
        why = " ".join(str(error).split()) or type(error).__name__
        if not outage.told and now >= outage.line_at + UNSTEADY_S:
            refuses = isinstance(error, StorageRefusedError)
            _log.warning("%s %s: %s", _first(part), "takes no work right now" if refuses else "is away", why)
            outage.told, outage.line_at = True, now
        elif outage.told and now >= outage.line_at + REMINDER_S:
            _log.warning(
                "%s has been away for %.0f s; %s: %s", _first(part), now - outage.since, _told(outage.counts), why
            )
            outage.line_at = now

    def succeeded(self, consequence: str, *, part: Part | None = None) -> None:
        """Report that what followed has ended. `part`: only where that was the reason."""
        if not self.any:
            return
        now = self._monotonic()
        for one in self._known if part is None else (part,):
            outage = self._known.get(one)
            if outage is None or not outage.failing or (part is None and consequence not in outage.counts):
                continue
            outage.failing.pop(consequence, None)
            outage.failing = {name: at for name, at in outage.failing.items() if now - at < STALE_S}
            if not outage.failing and outage.told:
                _log.warning(
                    "%s is back after %.0f s; %s meanwhile", _first(one), now - outage.since, _told(outage.counts)
                )
                outage.told = False
                outage.counts.clear()
        self.any = any(outage.failing for outage in self._known.values())

    def forget(self) -> None:
        """Begin anew, without a line."""
        self._known.clear()
        self.any = False


def _first(part: Part) -> str:
    return part[0].upper() + part[1:]


def _told(counts: Counter[str]) -> str:
    named = [f"{count:,} {what}" for what, count in counts.most_common(_NAMED)]
    if more := counts.total() - sum(count for _, count in counts.most_common(_NAMED)):
        named.append(f"{more:,} more failures")
    return ", ".join(named)


OUTAGES: Final = Outages()
