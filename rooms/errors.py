"""Define the errors of Rooms.

RoomsError
├── TransientError                 the same request may succeed later
│   ├── StorageUnavailableError    PostgreSQL is unavailable; the statement is in doubt
│   ├── StorageRefusedError        PostgreSQL accepts no writes; nothing was written
│   │   └── QueryTimeoutError      a query was stopped at its limit in time
│   ├── BrokerUnavailableError     the broker is unavailable; sends without receipt are in doubt
│   ├── ElectionUnavailableError   the store of the election is unavailable
│   ├── MagazineUnavailableError   the store of magazines is unavailable or full; in doubt
│   └── RateLimitedError           the caller exceeds a rate limit
│       └── QuotaExceededError     a quota is used up
└── PermanentError                 the request itself must change
    ├── SettingsError              settings are invalid; lists every problem
    ├── MalformedError             the body is not JSON
    │   └── EncodedBodyError       the body has a Content-Encoding
    ├── InvalidError               fields are invalid; names each and the fix
    ├── NotFoundError              the object does not exist in this organisation
    ├── MagazineMissingError       the magazine does not exist
    ├── ConflictError              the state of the object does not allow this
    │   ├── LeaseExpiredError      every lease of the request has expired
    │   ├── StaleEpochError        another process acts in a later epoch
    │   ├── KeyReusedError         the Idempotency-Key was used for another request
    │   └── QuotaConflictError     as many as the quota allows exist
    ├── UnauthenticatedError       the API key is missing or unknown
    ├── ForbiddenError             the API key or its organisation may not do this
    │   ├── SuspendedError         an organisation is suspended
    │   └── OtherMemberError       the caller names another member as itself
    └── TooLargeError              the request exceeds a limit
        └── QuotaTooLargeError     that limit is a quota

DeliveryError                      `delivery` failed as expected; its packages define the kinds
"""

from collections.abc import Sequence
from dataclasses import dataclass


class RoomsError(Exception):
    """Report an expected failure."""


class DeliveryError(Exception):
    """Report an expected failure of `delivery`, for its own processes and commands."""


class TransientError(RoomsError):
    """Report a failure that a retry may overcome."""


class StorageUnavailableError(TransientError):
    """Report that PostgreSQL is unavailable, or that the connection broke during a statement."""


class StorageRefusedError(TransientError):
    """Report that nothing was written: full disk, missing partition, lock timeout or shutdown."""


class LockTimeoutError(StorageRefusedError):
    """Report that a statement waited for a lock for too long, and wrote nothing."""


class QueryTimeoutError(StorageRefusedError):
    """Report that a query was stopped at its limit in time; the text is for the caller."""


class BrokerUnavailableError(TransientError):
    """Report that the broker is unavailable, or that the connection broke before its answer."""


class ElectionUnavailableError(TransientError):
    """Report that the store of the election is unavailable."""


class MagazineUnavailableError(TransientError):
    """Report that the store of magazines is unavailable, full, or broke off before its answer."""


class RateLimitedError(TransientError):
    """Report that the caller exceeds a rate limit, with the seconds until the next try."""

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QuotaExceededError(RateLimitedError):
    """Report that a quota is used up; `limit` names it."""

    def __init__(self, message: str, *, limit: str, retry_after_s: int) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.limit = limit


class PermanentError(RoomsError):
    """Report a failure that a retry of the same request cannot overcome."""


class SettingsError(PermanentError):
    """Report all invalid settings."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


class MalformedError(PermanentError):
    """Report a body that is not JSON."""


class EncodedBodyError(MalformedError):
    """Report a body with a Content-Encoding, such as gzip, which is not decoded."""


@dataclass(frozen=True, slots=True)
class FieldProblem:
    """Name an invalid field (`messages[3].payload.amount`), and say what it must be."""

    field: str
    message: str
    bound: str | None = None
    """The kind of bound that it exceeds: `schema` or `filter`; refusals are counted by it."""


class InvalidError(PermanentError):
    """Report all invalid fields of a request."""

    def __init__(self, *problems: FieldProblem) -> None:
        super().__init__("; ".join(f"{problem.field}: {problem.message}" for problem in problems))
        self.problems = problems


class NotFoundError(PermanentError):
    """Report an object that does not exist in this organisation."""


class MagazineMissingError(PermanentError):
    """Report a magazine that was never created, was dropped, or whose store was emptied."""


class ConflictError(PermanentError):
    """Report an object whose state does not allow the request."""


class KeyReusedError(ConflictError):
    """Report an Idempotency-Key that was used for another request."""


class LeaseExpiredError(ConflictError):
    """Report that every lease of a request has expired. `results`: each ack id with its status."""

    def __init__(self, message: str, results: Sequence[tuple[str, str]]) -> None:
        super().__init__(message)
        self.results = tuple(results)


class StaleEpochError(ConflictError):
    """Report that another process acts in a later epoch, so the term of this one is over."""


class UnauthenticatedError(PermanentError):
    """Report an API key that is missing or unknown."""


class ForbiddenError(PermanentError):
    """Report an API key without the scope, or an organisation without the right."""


class SuspendedError(ForbiddenError):
    """Report that an organisation is suspended: the caller's, or that of the room."""


class OtherMemberError(ForbiddenError):
    """Report a caller that says it is another member, or another application, than its key's."""


class TooLargeError(PermanentError):
    """Report a request that exceeds a limit."""


class QuotaConflictError(ConflictError):
    """Report that as many exist as a quota allows; `limit` names it."""

    def __init__(self, message: str, *, limit: str) -> None:
        super().__init__(message)
        self.limit = limit


class QuotaTooLargeError(TooLargeError):
    """Report that the request exceeds a quota; `limit` names it."""

    def __init__(self, message: str, *, limit: str) -> None:
        super().__init__(message)
        self.limit = limit
