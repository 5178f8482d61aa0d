"""Define how the commit of a request ends, and what this means for those that waited for it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from rooms.db.publish.insert import InsertConflict
from rooms.db.publish.request_rows import InsertRows
from rooms.errors import TransientError


class PlanChanged:
    """Report that the routing table is stale, and the request must be routed again."""


@dataclass(frozen=True, slots=True)
class KeyReused:
    """Report that another request has the idempotency key, with its hash and its answer."""

    request_hash: bytes
    answer: bytes


@dataclass(frozen=True, slots=True)
class IdReused:
    """Report caller ids that messages have already: the content hash and the answer of each."""

    answers: Mapping[str, tuple[bytes, bytes]]


CommitOutcome = PlanChanged | KeyReused | IdReused | None
"""None: committed."""
PLAN_CHANGED: Final = PlanChanged()


Settle = Callable[[CommitOutcome | Exception], None]
"""Called once, with the outcome of a request or the error of its commit."""


def find_conflict(
    submission: InsertRows, verdict: InsertConflict
) -> KeyReused | IdReused | PlanChanged | None:
    """Return the outcome of a request that was in conflict; None: it must be written again."""
    if submission.key is not None and (
        taken := verdict.used_keys.get((submission.room_id, submission.key))
    ):
        return KeyReused(*taken)
    if submission.caller_ids and verdict.used_ids:
        names = [name.caller_id for name in submission.caller_ids]
        answers = {
            name: found
            for name in names
            if (found := verdict.used_ids.get((submission.room_id, name))) is not None
        }
        if answers:
            return IdReused(answers)
    if (submission.room_id, submission.plan_version) in verdict.stale_plans:
        return PLAN_CHANGED
    return None


def find_used_ids(
    submission: InsertRows, outcome: CommitOutcome | Exception
) -> Mapping[str, tuple[bytes, bytes]]:
    """Return the caller ids that are used for certain once a request has its outcome."""
    if outcome is None:
        return {one.caller_id: (one.content_hash, one.answer) for one in submission.caller_ids}
    return outcome.answers if isinstance(outcome, IdReused) else {}


def decide_follower(
    follower: InsertRows,
    first: InsertRows,
    outcome: CommitOutcome | Exception,
    used_ids: Mapping[str, tuple[bytes, bytes]],
) -> KeyReused | IdReused | PlanChanged | TransientError | None:
    """Return what the outcome of a request means for one of the same room that waited for it.

    None: nothing; it must be written to be known.
    """
    if isinstance(outcome, TransientError):
        return outcome
    if follower.key is not None and follower.key == first.key:
        if outcome is None:
            return KeyReused(first.request_hash, first.answer)
        if isinstance(outcome, KeyReused):
            return outcome
    if outcome is PLAN_CHANGED and follower.plan_version == first.plan_version:
        return PLAN_CHANGED
    answers = {
        one.caller_id: used_ids[one.caller_id]
        for one in follower.caller_ids
        if one.caller_id in used_ids
    }
    return IdReused(answers) if answers else None
