"""Name what the API calls by a code - states, reasons, steps, jobs - in words of the catalogue."""

from collections.abc import Mapping
from typing import Final

from rooms.api.readiness import PARTS
from rooms.db.catalog.subscription_states import SubscriptionAction
from rooms.domain.attempt import ErrorClass
from rooms.domain.job import JobKind, JobState
from rooms.domain.sharing import OrganisationStatus
from rooms.domain.state_machine import LogKind, Reason, State, SubscriptionStatus
from rooms.domain.throttle import CircuitState

_ENUMS: Final = (
    *(State, Reason, LogKind, SubscriptionStatus, SubscriptionAction, OrganisationStatus),
    *(JobKind, JobState, CircuitState, ErrorClass),
)
_WORDS: Final[Mapping[str, str]] = {
    Reason.ORDER: "waits for its turn",
    LogKind.PULL_ACKED: "acknowledged",
    JobKind.ANALYSE_LOG: "analyse the log",
    ErrorClass.DNS: "unknown host",
    ErrorClass.BLOCKED: "address not allowed",
    ErrorClass.CONNECT: "no connection",
    ErrorClass.TLS: "no secure connection",
    ErrorClass.TIMEOUT: "no answer in time",
    ErrorClass.PROTOCOL: "no HTTP",
    ErrorClass.TOO_LARGE: "answer too large",
    ErrorClass.STATUS: "status",
    ErrorClass.REDIRECT: "redirected",
}
"""Words for codes that say less than words can."""
TERMS: Final[Mapping[str, str]] = {
    code: _WORDS.get(code, code.replace("_", " "))
    for code in (
        *(str(one.value) for kind in _ENUMS for one in kind),
        *PARTS,
        "relay",
        "up",
        "down",
    )
}
"""The text in the catalogue, by the code of the API."""


def term(code: str) -> str:
    """Return the text of a code; of an unknown one, the code with spaces."""
    return TERMS.get(code, code.replace("_", " "))
