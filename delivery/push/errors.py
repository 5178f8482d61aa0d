"""Define the errors of PUSH deliveries, below `rooms.errors.DeliveryError`.

DeliveryError
├── TargetRefusedError          the SSRF guard lets no request go to the target
│   ├── BlockedError            its addresses are not public (a ValueError too, for the API)
│   └── UnresolvableError       its name has no address
├── AttemptFailedError          no complete response came; carries the error class
│   └── StaleConnectionError    a kept connection had been closed before any byte of the response
├── AttemptCrashedError         the process that made the attempt died
├── ClaimExpiredError           no attempt was made before the claim ran out
│   └── SandboxDiedError        a sandbox died before that, and the claim counts as lost
├── ResourceShortageError       no attempt was made: this process or machine lacks files or ports
├── LookupShortageError         a name was not looked up, because there is no file for a socket
├── LookupsBusyError            a name was not looked up, because too many others are
└── SandboxUnavailableError     no sandbox process can be started
"""

from rooms.domain.attempt import ErrorClass
from rooms.errors import DeliveryError


class TargetRefusedError(DeliveryError):
    """Report that the guard lets no request go to this target."""


class BlockedError(TargetRefusedError, ValueError):
    """Report that a target is, or resolves to, addresses that webhooks must not reach."""


class UnresolvableError(TargetRefusedError):
    """Report that a target's name has no address."""


class LookupsBusyError(DeliveryError):
    """Report that a name was not looked up, because too many others are."""


class LookupShortageError(DeliveryError):
    """Report that a name was not looked up, because this process or machine lacks what it takes."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


class AttemptFailedError(DeliveryError):
    """Report that an attempt ended without a complete response."""

    def __init__(self, error: ErrorClass, detail: str) -> None:
        super().__init__(detail)
        self.error = error
        self.detail = detail


class StaleConnectionError(AttemptFailedError):
    """Report that a kept connection closed before any response.

    The request may be sent again at once, if the endpoint had no time to work on it.
    """


class AttemptCrashedError(DeliveryError):
    """Report that the process that made this attempt died before it had a result."""


class ClaimExpiredError(DeliveryError):
    """Report that no attempt was made before the claim ran out."""


class SandboxDiedError(ClaimExpiredError):
    """Report that a sandbox died with this delivery, and no other was ready in time.

    Its claim must count as lost, and not as returned without an attempt.
    """


class ResourceShortageError(DeliveryError):
    """Report that no attempt was made, because this process or machine lacks what it takes.

    That is files or ports, or the process in which a delivery that kills others is attempted.
    """


class SandboxUnavailableError(DeliveryError):
    """Report that no sandbox process can make this attempt."""
