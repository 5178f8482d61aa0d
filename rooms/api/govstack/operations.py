"""Declare what an operation of GovStack's interfaces answers, for its OpenAPI document."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from rooms.api.errors import Problem

OPERATION: Final = "govstack_operation"
"""The key in a handler's `opt` for its `Operation`."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Describe one answer of an operation: its body's type (None: no body), and its headers."""

    description: str
    kind: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    """The description of each header by name."""
    is_table: bool = field(default=False, kw_only=True)
    """It can be CSV, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """Describe an operation: the type of its body, its query, and the answers of its own."""

    replies: Mapping[int, Reply]
    body: Any = None
    body_is_required: bool = True
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Description, schema and more of each query parameter by name."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Further headers of the request."""

    def all_replies(self) -> Mapping[int, Reply]:
        """Return the answers of its own, and the problems that every operation may answer."""
        return dict(sorted({**COMMON_PROBLEMS, **self.replies}.items()))


def problem(description: str) -> Reply:
    """Return a reply that is a problem of RFC 9457."""
    return Reply(description, Problem)


COMMON_PROBLEMS: Final[dict[int, Reply]] = {
    400: problem("A header, a parameter or a field of the body is wrong"),
    401: problem("The caller is not authenticated"),
    403: problem("The caller may not do this, or names another member"),
    404: problem("There is no such thing for this caller"),
    413: problem("Beyond a limit"),
    429: problem("Too many requests, or a quota is used up"),
    503: problem("Try again soon"),
}
CONFLICT: Final = "Conflict with the present state"


def declare(operation: Operation) -> dict[str, Any]:
    """Return the entry of a handler's `opt`."""
    return {OPERATION: operation}
