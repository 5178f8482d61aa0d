"""What one attempt at a webhook came to."""

from dataclasses import dataclass
from enum import StrEnum


class ErrorClass(StrEnum):
    """Why an attempt failed, in the word that logs, metrics and the API use."""

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
class Answer:
    """The outcome of one attempt. Nobody changes one; it is not frozen, nor by keyword alone, for the reasons that a `Copy` is not.

    `status` is None when no complete answer came. `error` is None on 2xx only; STATUS or REDIRECT tell of another
    status. `detail` is one line for people, empty on success. `body_head` is the first KiB of the body, `retry_after`
    the header's value as it came (on 2xx, where it means nothing: None).
    """

    status: int | None
    error: ErrorClass | None
    detail: str
    body_head: bytes
    retry_after: str | None
    latency_ms: float
