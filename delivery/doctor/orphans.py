"""Orphans at rest: deliveries that PostgreSQL had no row of, or whose message it has not, and the way back for them."""

import shlex
from collections.abc import Sequence
from typing import Final

from delivery.doctor.findings import Finding
from rooms.domain.states import Reason
from rooms.storage.orphan_counts import OrphanCount, count_orphans
from rooms.storage.writer import Writer

PART: Final = "orphans"
_EXAMPLES: Final = 5


class OrphanExamination:
    """Reports them as a state and not as a fault: only the operator knows whether they are to be sent."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    async def run(self) -> list[Finding]:
        """Count what can be shoveled, and what lacks its message. Errors are `Writer.run`'s."""
        found = await count_orphans(self._writer)
        whole = [one for one in found if one.whole]
        bare = [one for one in found if one.count > one.whole]
        findings = []
        if whole:
            what = (
                "sidelined as orphans: the broker had copies of them, PostgreSQL no rows (restored to an earlier time?)"
            )
            findings.append(
                _finding(
                    what, sum(one.whole for one in whole), whole, advice=f"bring them back with {_commands(whole)}"
                )
            )
        if bare:
            what = "sidelined as orphans whose message is not there (a detached partition?)"
            advice = "attach the partition again, then shovel them; or end them with `rooms sideline purge`"
            findings.append(_finding(what, sum(one.count - one.whole for one in bare), bare, advice=advice))
        return findings


def _finding(what: str, count: int, found: Sequence[OrphanCount], *, advice: str) -> Finding:
    return Finding(
        part=PART,
        what=what,
        count=count,
        under_way=True,
        examples=[_reference(one) for one in found[:_EXAMPLES]],
        since=min(one.since for one in found),
        advice=advice,
    )


def _commands(found: Sequence[OrphanCount]) -> str:
    commands = [
        f"`rooms sideline shovel {shlex.quote(_reference(one))} --reason {Reason.ORPHAN}`" for one in found[:_EXAMPLES]
    ]
    more = len(found) - len(commands)
    return ", ".join(commands) + (f", and so on for {more} more subscriptions" if more else "")


def _reference(one: OrphanCount) -> str:
    return f"{one.room}/{one.name}"
