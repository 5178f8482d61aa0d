"""Say a problem of the API in the reader's language, with the labels of the console's forms.

Titles and the most frequent texts are translated; others stay English, as those of commands are.
"""

from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, Final

from rooms.api.errors import TITLES

FIELD_LABELS: Final[Mapping[str, str]] = {
    "circuit_failures": "Failures that open the circuit",
    "circuit_open_ms": "Time to a probe, in milliseconds",
    "circuit_window_ms": "Within, in milliseconds",
    "delivery_attempts": "Redeliveries",
    "delivery_delay_ms": "First delay, in milliseconds",
    "delivery_delay_multiplier": "Multiplier",
    "delivery_jitter": "Jitter, 0 to 1",
    "delivery_max_delay_ms": "Longest delay, in milliseconds",
    "description": "Description",
    "disable_after_ms": "Disable after only failures for, in milliseconds",
    "drain_per_s": "Held deliveries a second",
    "event_type": "Event type",
    "event_types": "Event types",
    "filter": "Filter, in CEL",
    "headers": "Headers",
    "ignorable_statuses": "Statuses that drop the delivery",
    "max_concurrency": "Calls at a time",
    "max_receives": "Leases before the sideline",
    "name": "Name",
    "push_url": "Webhook",
    "reason": "Reason",
}
"""Labels of fields that mean the same in every form, by the API's name."""
_PHRASES: Final = tuple(HTTPStatus(code).phrase for code in (404, 405))
_TEXTS: Final = (
    "The page could not be made",
    "the log of the service says why",
    "this form is not of your session: open the page again, and repeat what you did",
    "another site sent this form; open the console and do it there",
    "your role reads no payloads",
    "there is no such room",
    "there is no such queue",
    "there is no such event type",
    "there is no such version",
    "there is no such signing key",
    "there is a room of this name",
    "one is under way already; wait for its result",
    "is missing",
)
PROBLEM_TEXTS: Final = (*dict.fromkeys((*TITLES, *_PHRASES, *_TEXTS)),)
"""All texts of problems that the catalogues have."""


def translate(problem: Mapping[str, Any], text: Callable[[str], str]) -> dict[str, Any]:
    """Return a problem with its texts in the reader's language by `text`.

    Each of its `errors` has a `label`; None: the console has no label for the field.
    """
    errors = [
        {
            "field": one["field"],
            "label": (label := FIELD_LABELS.get(one["field"])) and text(label),
            "message": text(one["message"]),
        }
        for one in problem.get("errors") or ()
    ]
    said = {name: text(problem[name]) for name in ("title", "detail") if problem.get(name)}
    return {**problem, **said, "errors": errors}
