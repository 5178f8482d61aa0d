"""Name what the API calls by a code, such as states and actions, in words of the catalogue."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from rooms.api.readiness import PARTS
from rooms.api.search import SearchField, SearchKind
from rooms.console.actions import ACTIONS
from rooms.db.catalog.subscription_states import SubscriptionAction
from rooms.domain.attempt import ErrorClass
from rooms.domain.job import JobKind, JobState
from rooms.domain.journal import ActorKind, Outcome
from rooms.domain.sharing import OrganisationStatus, ReapprovalField
from rooms.domain.state_machine import LogKind, Reason, State, SubscriptionStatus
from rooms.domain.throttle import CircuitState

_ENUMS: Final = (
    *(State, Reason, LogKind, SubscriptionStatus, SubscriptionAction, OrganisationStatus),
    *(JobKind, JobState, CircuitState, ErrorClass, Outcome, ActorKind, SearchKind, SearchField),
    ReapprovalField,
)
_ERRORS: Final = frozenset(one.value for one in ErrorClass)
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
    SearchField.CALLER_ID: "id of the publisher",
    ReapprovalField.PUSH_URL: "address of the webhook",
}
"""Words for codes that say less than words can."""
_FIELDS: Final = (
    *("since", "until", "days", "rate_per_s", "concurrency", "max_shovels", "repair", "queue"),
    *("moved", "shard", "load_pointer", "fire_pointer", "sweep_pointer", "epoch", "loaded"),
    *("fired", "reloaded", "sent_again"),
    *("reason", "error", "delivery_id", "target"),
)
"""Names in the arguments and results of jobs, in the shards of magazines, and of filters."""
_ANALYSED: Final[Mapping[str, str]] = {
    "room_id": "room",
    "target_host": "host",
    "network": "network",
    "event_type": "event type",
    "event_version": "version of the event type",
    "worker": "worker",
    "worker_host": "machine of the worker",
    "worker_version": "version of the worker",
    "error_class": "error",
    "http_status": "HTTP status",
    "policy_version": "version of the settings",
    "shared": "shared",
    "single": "single",
    "chronic": "chronic",
}
"""Attributes of attempts that the analysis compares, and kinds of incidents."""
TERMS: Final[Mapping[str, str]] = {
    code: _WORDS.get(code, code.replace("_", " "))
    for code in (
        *(str(one.value) for kind in _ENUMS for one in kind),
        *(*PARTS, "relay", "up", "down"),
        *_FIELDS,
    )
} | {**_ANALYSED, **ACTIONS}
"""The text in the catalogue, by the code of the API."""


def term(code: str) -> str:
    """Return the text of a code; of an unknown one, the code with spaces."""
    return TERMS.get(code, code.replace("_", " "))


def last_answer(observed: Mapping[str, Any], translate: Callable[[str], str]) -> str:
    """Return what an endpoint answered last, as `HTTP 503`, or why there was no answer."""
    status, error = observed["last_status"], observed["last_error"] or ""
    named = f"HTTP {status}" if status else ""
    code, _, detail = error.partition(": ")
    if code == ErrorClass.STATUS:
        error = detail
    elif code in _ERRORS:
        words = translate(term(code))
        error = f"{words}: {detail}" if detail and detail != term(code) else words
    return (error or named) if error.startswith(named) or not error else f"{named} {error}"
