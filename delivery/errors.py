"""The errors of `delivery`:

DeliveryError
├── TargetRefusedError          the guard lets no request go there
│   ├── BlockedError            its addresses are not for the outside (a ValueError too, for the API)
│   └── UnresolvableError       its name has no address
├── AttemptFailedError          no complete answer came; says why by its class
│   └── StaleConnectionError    a kept connection had been closed before anything was answered
├── AttemptCrashedError         the process that attempted it died
├── AttemptLateError            its turn did not come in time
├── LookupsBusyError            a name was not looked up, because too many others are
└── WardUnavailableError        no process can be had that may die of an attempt
"""

from rooms.domain.attempt import ErrorClass


class DeliveryError(Exception):
    """Something delivery expected to go wrong went wrong."""


class TargetRefusedError(DeliveryError):
    """The guard lets no request go to this target."""


class BlockedError(TargetRefusedError, ValueError):
    """The target is, or resolves to, addresses that webhooks must not reach."""


class UnresolvableError(TargetRefusedError):
    """The target's name has no address."""


class LookupsBusyError(DeliveryError):
    """A name was not looked up, because too many others are."""


class AttemptFailedError(DeliveryError):
    """An attempt ended without a complete answer."""

    def __init__(self, error: ErrorClass, detail: str) -> None:
        super().__init__(detail)
        self.error = error
        self.detail = detail


class StaleConnectionError(AttemptFailedError):
    """A kept connection closed before any byte of the answer: the request may be sent once again."""


class AttemptCrashedError(DeliveryError):
    """The process that made this attempt died before it was answered."""


class AttemptLateError(DeliveryError):
    """No attempt was made before the claim ran out."""


class WardUnavailableError(DeliveryError):
    """There is no process beside the worker that could make this attempt."""
