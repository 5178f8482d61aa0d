"""Describe the result of one webhook attempt."""

from dataclasses import dataclass
from enum import StrEnum


class ErrorClass(StrEnum):
    """Name why an attempt failed, as logs, metrics and the API do."""

    DNS = "dns"
    BLOCKED = "blocked"
    CONNECT = "connect"
    TLS = "tls"
    TIMEOUT = "timeout"
    CLOSED = "closed"
    PROTOCOL = "protocol"
    TOO_LARGE = "too_large"
    STATUS = "status"
    REDIRECT = "redirect"


@dataclass(slots=True)
class AttemptResult:
    """Hold the result of one attempt. It is never changed.

    As with `DeliveryTask`, it is neither frozen nor keyword-only, so that creating one is cheap.
    """

    status: int | None
    """None: no complete answer came."""
    error: ErrorClass | None
    """None on 2xx only. Other statuses have STATUS or REDIRECT."""
    detail: str
    """One line for operators, empty on success."""
    body_head: bytes
    """First KiB of the body."""
    retry_after: str | None
    """Value of the header as it came; None on 2xx."""
    latency_ms: float


def unexpected_failure(error: Exception, latency_ms: float) -> AttemptResult:
    """Return the result of an attempt whose sender raised what its port forbids."""
    return AttemptResult(
        status=None,
        error=ErrorClass.PROTOCOL,
        detail=f"the sender failed: {type(error).__name__}",
        body_head=b"",
        retry_after=None,
        latency_ms=latency_ms,
    )
