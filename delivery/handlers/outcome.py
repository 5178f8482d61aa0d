"""What becomes of a message, by what its handler did (row B2). No I/O."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

MAX_DETAIL: Final = 500


class Result(StrEnum):
    """Deleted as handled, loaded into the sideline and then deleted, or deleted unhandled."""

    HANDLED = "handled"
    SIDELINED = "sidelined"
    IGNORED = "ignored"


class Why(StrEnum):
    """Why a message of a handler queue is in its sideline."""

    REFUSED = "refused"
    """The handler said False."""
    RAISED = "raised"
    TIMED_OUT = "timed_out"
    STUCK = "stuck"
    """Its process died, or hung, with it."""
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A result, and for the sideline why."""

    result: Result
    why: Why | None = None
    detail: str | None = None


HANDLED: Final = Outcome(result=Result.HANDLED)
REFUSED: Final = Outcome(result=Result.SIDELINED, why=Why.REFUSED)


def failed(error: BaseException, ignorable: tuple[type[Exception], ...]) -> Outcome:
    """What an exception of a handler means."""
    if isinstance(error, ignorable):
        return Outcome(result=Result.IGNORED)
    return Outcome(result=Result.SIDELINED, why=Why.RAISED, detail=f"{type(error).__name__}: {error}"[:MAX_DETAIL])


def timed_out(after_s: float) -> Outcome:
    """The handler did not answer in time; whatever it still does, this stands."""
    return Outcome(result=Result.SIDELINED, why=Why.TIMED_OUT, detail=f"no answer within {after_s:g} s")


def judge(returned: object, count: int) -> Sequence[Outcome]:
    """What an answer means for each of the `count` messages that the handler had."""
    match returned:
        case bool():
            return [HANDLED if returned else REFUSED] * count
        case [*each] if len(each) == count and all(isinstance(one, bool) for one in each):
            return [HANDLED if one else REFUSED for one in each]
        case _:
            said = f"the handler returned {returned!r}, which is neither True nor False"
            return [Outcome(result=Result.SIDELINED, why=Why.RAISED, detail=said[:MAX_DETAIL])] * count
