"""The errors of `rooms`:

RoomsError
├── TransientError                 the same request may succeed later
│   ├── StorageUnavailableError    PostgreSQL is away; what was under way is in doubt
│   ├── StorageRefusedError        PostgreSQL takes no more right now; nothing was written
│   ├── BrokerUnavailableError     the broker is away; what has no receipt is in doubt
│   ├── ElectionUnavailableError   who does what cannot be agreed on right now
│   ├── MagazineUnavailableError   the store of magazines is away or full; what was under way is in doubt
│   └── RateLimitedError           the key asked more often than it may
└── PermanentError                 the request itself must change
    ├── SettingsError              the environment is wrong; lists every problem
    ├── MalformedError             the body is no JSON at all
    ├── InvalidError               a field is wrong; names it and the fix
    ├── NotFoundError              no such thing, or another organisation's
    ├── MagazineMissingError       a magazine is not (or no longer) there
    ├── ConflictError              the thing is not in a state for this
    │   ├── LateError              every lease that the request names is over
    │   └── StaleEpochError        somebody with a later epoch does this now
    ├── UnauthenticatedError       no key, or one that is not known (any more)
    ├── ForbiddenError             the key lacks the scope
    └── TooLargeError              beyond a limit
"""

from collections.abc import Sequence
from dataclasses import dataclass


class RoomsError(Exception):
    """Something Rooms expected to go wrong went wrong."""


class TransientError(RoomsError):
    """The same request may succeed later."""


class StorageUnavailableError(TransientError):
    """PostgreSQL cannot be reached, or went away in mid-statement."""


class StorageRefusedError(TransientError):
    """PostgreSQL takes no more right now (full disk, missing partition, shutting down); nothing was written."""


class BrokerUnavailableError(TransientError):
    """The broker cannot be reached, or went away before it answered."""


class ElectionUnavailableError(TransientError):
    """The store that the members of an installation agree through cannot be reached."""


class MagazineUnavailableError(TransientError):
    """The store of the magazines cannot be reached, takes no more, or went away before it answered."""


class RateLimitedError(TransientError):
    """The key asked more often than it may; `retry_after_s` says when to come again."""

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class PermanentError(RoomsError):
    """The request itself must change."""


class SettingsError(PermanentError):
    """The settings are wrong."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


class MalformedError(PermanentError):
    """The body is no JSON at all."""


@dataclass(frozen=True, slots=True)
class FieldProblem:
    """What is wrong with one field of a request: where (`messages[3].payload.amount`) and what to do about it."""

    field: str
    message: str


class InvalidError(PermanentError):
    """Fields of the request are wrong."""

    def __init__(self, *problems: FieldProblem) -> None:
        super().__init__("; ".join(f"{problem.field}: {problem.message}" for problem in problems))
        self.problems = problems


class NotFoundError(PermanentError):
    """There is no such thing in this organisation."""


class MagazineMissingError(PermanentError):
    """There is no such magazine: never made, dropped, or its store was emptied."""


class ConflictError(PermanentError):
    """The thing is not in a state for this."""


class LateError(ConflictError):
    """Every lease that the request names is over; `results` pairs each ack id with its status."""

    def __init__(self, message: str, results: Sequence[tuple[str, str]]) -> None:
        super().__init__(message)
        self.results = tuple(results)


class StaleEpochError(ConflictError):
    """Somebody acts here under a later epoch: this process's term is over."""


class UnauthenticatedError(PermanentError):
    """No API key, or one that is not known (any more)."""


class ForbiddenError(PermanentError):
    """The key may not do this."""


class TooLargeError(PermanentError):
    """Beyond a limit."""
