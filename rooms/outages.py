"""Log outages of the dependencies of a process, with few lines.

    up ── failure ──► down ── every consequence has ended ──► up
    │                 one line, then one each minute          one line: duration and consequences
    └── failure within 30 s of the last outage's first line ──► flapping: counted, logged later

Each caller names a consequence, such as `requests were refused`. A dependency is logged once,
however many callers notice the outage. A refused request may never be sent again, so an answer of
the dependency ends that consequence, if the request would have been answered, too. Like loggers,
`OUTAGES` is shared by the whole process. All calls must come from the thread of the event loop.
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
FLAPPING_S: Final = 30.0
"""An outage that begins so soon after the last one has no line of its own."""
STALE_S: Final = 10.0
"""A consequence without failures for so long counts as ended once another caller succeeds."""
REQUESTS_REFUSED: Final = "requests were refused"
"""The consequence of an outage for requests, as the log states it."""
_MAX_CONSEQUENCES: Final = 3
_DRIVERS: Final = frozenset({"psycopg", "sqlalchemy"})


class Dependency(StrEnum):
    """Name a dependency as the log does."""

    POSTGRESQL = "PostgreSQL"
    BROKER = "the broker"
    ELECTION = "the election's store"
    MAGAZINES = "the magazines' store"
    CONNECTIONS = "room for connections to webhooks"


def dependency_of(error: BaseException) -> Dependency:
    """Return the dependency that caused an error.

    An error of PostgreSQL's driver is PostgreSQL's, whatever it was translated to. PostgreSQL may
    also be the broker and the store of the election or magazines.
    """
    cause: BaseException | None = error
    while cause is not None:
        is_postgres = isinstance(cause, StorageUnavailableError | StorageRefusedError)
        if is_postgres or type(cause).__module__.partition(".")[0] in _DRIVERS:
            return Dependency.POSTGRESQL
        cause = cause.__cause__
    match error:
        case BrokerUnavailableError():
            return Dependency.BROKER
        case ElectionUnavailableError():
            return Dependency.ELECTION
        case MagazineUnavailableError():
            return Dependency.MAGAZINES
        case _:
            return Dependency.POSTGRESQL


@dataclass(slots=True)
class _Outage:
    """Hold the current or last outage of a dependency."""

    since: float = 0.0
    logged_at: float = float("-inf")
    logged: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    last_failures: dict[str, float] = field(default_factory=dict)
    """Time of the last failure by consequence, while it lasts."""


class Outages:
    """Track and log the outages of one process."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._outages: dict[Dependency, _Outage] = {}
        self.any_failing = False
        """Something fails now. Hot paths check it before they record a success."""

    def record_failure(
        self,
        error: BaseException,
        consequence: str,
        *,
        count: int = 1,
        dependency: Dependency | None = None,
    ) -> None:
        """Record a failure with its consequence. `dependency`: only if the error does not imply it.

        A PermanentError is no outage, and is logged by itself.
        """
        if isinstance(error, PermanentError):
            _log.warning("%s: %s", consequence, error)
            return
        dependency = dependency_of(error) if dependency is None else dependency
        now = self._monotonic()
        outage = self._outages.setdefault(dependency, _Outage())
        if not outage.last_failures:
            outage.since = now
        outage.last_failures[consequence] = now
        outage.counts[consequence] += count
        self.any_failing = True
        reason = " ".join(str(error).split()) or type(error).__name__
        if not outage.logged and now >= outage.logged_at + FLAPPING_S:
            refuses = isinstance(error, StorageRefusedError)
            _log.warning(
                "%s %s: %s",
                _capitalised(dependency),
                "takes no work right now" if refuses else "is away",
                reason,
            )
            outage.logged, outage.logged_at = True, now
        elif outage.logged and now >= outage.logged_at + REMINDER_S:
            _log.warning(
                "%s has been away for %.0f s; %s: %s",
                _capitalised(dependency),
                now - outage.since,
                _format_counts(outage.counts),
                reason,
            )
            outage.logged_at = now

    def record_success(self, consequence: str, *, dependency: Dependency | None = None) -> None:
        """Record that a consequence has ended, for one dependency or for all."""
        if not self.any_failing:
            return
        now = self._monotonic()
        for one in self._outages if dependency is None else (dependency,):
            outage = self._outages.get(one)
            if (
                outage is None
                or not outage.last_failures
                or (dependency is None and consequence not in outage.counts)
            ):
                continue
            outage.last_failures.pop(consequence, None)
            outage.last_failures = {
                name: at for name, at in outage.last_failures.items() if now - at < STALE_S
            }
            self._log_end(one, outage)

    def record_answer(self, dependency: Dependency) -> None:
        """Record that a dependency answered: requests are not refused for it any more.

        Other consequences last, however long ago they failed: what failed is not what was answered.
        """
        outage = self._outages.get(dependency) if self.any_failing else None
        if outage is not None and outage.last_failures.pop(REQUESTS_REFUSED, None) is not None:
            self._log_end(dependency, outage)

    def _log_end(self, dependency: Dependency, outage: _Outage) -> None:
        if not outage.last_failures and outage.logged:
            _log.warning(
                "%s is back after %.0f s; %s meanwhile",
                _capitalised(dependency),
                self._monotonic() - outage.since,
                _format_counts(outage.counts),
            )
            outage.logged = False
            outage.counts.clear()
        self.any_failing = any(one.last_failures for one in self._outages.values())

    def reset(self) -> None:
        """Forget all outages without logging."""
        self._outages.clear()
        self.any_failing = False


def _capitalised(dependency: Dependency) -> str:
    return dependency[0].upper() + dependency[1:]


def _format_counts(counts: Counter[str]) -> str:
    named = [
        f"{count:,} {consequence}" for consequence, count in counts.most_common(_MAX_CONSEQUENCES)
    ]
    if more := counts.total() - sum(count for _, count in counts.most_common(_MAX_CONSEQUENCES)):
        named.append(f"{more:,} more failures")
    return ", ".join(named)


OUTAGES: Final = Outages()
