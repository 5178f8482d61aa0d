"""Define the event types that a subscription selects, and what is wrong with them."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Final

from msgspec import Meta, Struct

from rooms.domain.event_type_pattern import check_pattern, is_pattern
from rooms.domain.names import MAX_NAME
from rooms.domain.room import Interest
from rooms.errors import FieldProblem

_MAX_INT4: Final = 0x7FFF_FFFF


class InterestRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Select an event type, in every version where none are named.

    The name may be a pattern, `order.*` or `*`, which selects types that are added later, too.
    """

    name: Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
    versions: (
        Annotated[
            list[Annotated[int, Meta(ge=1, le=_MAX_INT4)]], Meta(min_length=1, max_length=1000)
        ]
        | None
    ) = None


Interests = Annotated[
    list[InterestRequest],
    Meta(min_length=1, max_length=1000, description="null: every type of the room."),
]


def to_interests(found: list[InterestRequest] | None) -> list[Interest] | None:
    """Return the interests that a request selects; None: every event type."""
    if found is None:
        return None
    return [
        Interest(
            name=entry.name, versions=None if entry.versions is None else frozenset(entry.versions)
        )
        for entry in found
    ]


def interest_problems(
    found: list[InterestRequest] | None, types: Mapping[str, frozenset[int]]
) -> Iterator[FieldProblem]:
    """Yield what is wrong; `types`: the versions of each event type of the room."""
    seen: set[str] = set()
    for index, entry in enumerate(found or ()):
        at = f"event_types[{index}]"
        if is_pattern(entry.name):
            if entry.versions is not None:
                yield FieldProblem(f"{at}.versions", "a pattern takes every version")
            try:
                check_pattern(entry.name)
            except ValueError as exc:
                yield FieldProblem(f"{at}.name", str(exc))
            if entry.name in seen:
                yield FieldProblem(f"{at}.name", "is given twice")
        elif entry.name not in types:
            yield FieldProblem(f"{at}.name", "the room has no such event type")
        elif entry.name in seen:
            yield FieldProblem(f"{at}.name", "is given twice")
        else:
            for path, version in enumerate(entry.versions or ()):
                if version not in types[entry.name]:
                    yield FieldProblem(
                        f"{at}.versions[{path}]", f"{entry.name} has no version {version}"
                    )
        seen.add(entry.name)
