"""Outcomes of messages, from their handlers' results. No I/O."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

MAX_DETAIL: Final = 500


class HandlerResult(StrEnum):
    """Deleted as handled, loaded into the sideline and then deleted, or deleted unhandled."""

    HANDLED = "handled"
    SIDELINED = "sidelined"
    IGNORED = "ignored"


class SidelineReason(StrEnum):
    """The reason for which a message was sidelined."""

    REFUSED = "refused"
    """The handler returned False."""
    RAISED = "raised"
    TIMED_OUT = "timed_out"
    STUCK = "stuck"
    """Its process died, or hung, while it was handled."""
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerOutcome:
    """A result, with reason and detail if it is sidelined."""

    result: HandlerResult
    reason: SidelineReason | None = None
    detail: str | None = None


HANDLED_OUTCOME: Final = HandlerOutcome(result=HandlerResult.HANDLED)
REFUSED_OUTCOME: Final = HandlerOutcome(
    result=HandlerResult.SIDELINED, reason=SidelineReason.REFUSED
)


def outcome_of_error(
    error: BaseException, ignorable: tuple[type[Exception], ...]
) -> HandlerOutcome:
    """Return the outcome of a handler's exception."""
    if isinstance(error, ignorable):
        return HandlerOutcome(result=HandlerResult.IGNORED)
    return HandlerOutcome(
        result=HandlerResult.SIDELINED,
        reason=SidelineReason.RAISED,
        detail=f"{type(error).__name__}: {error}"[:MAX_DETAIL],
    )


def timeout_outcome(timeout_s: float) -> HandlerOutcome:
    """Return the outcome of a handler that did not return in time."""
    return HandlerOutcome(
        result=HandlerResult.SIDELINED,
        reason=SidelineReason.TIMED_OUT,
        detail=f"no answer within {timeout_s:g} s",
    )


def outcomes_of_return(returned: object, count: int) -> Sequence[HandlerOutcome]:
    """Return the outcomes of a handler's return value, for each of its `count` messages."""
    match returned:
        case bool():
            return [HANDLED_OUTCOME if returned else REFUSED_OUTCOME] * count
        case [*each] if len(each) == count and all(isinstance(one, bool) for one in each):
            return [HANDLED_OUTCOME if one else REFUSED_OUTCOME for one in each]
        case _:
            detail = f"the handler returned {returned!r}, which is neither True nor False"
            return [
                HandlerOutcome(
                    result=HandlerResult.SIDELINED,
                    reason=SidelineReason.RAISED,
                    detail=detail[:MAX_DETAIL],
                )
            ] * count
