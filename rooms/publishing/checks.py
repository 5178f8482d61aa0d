"""Checks of one request that are too costly to do inline: collected while it is drafted, done in the sandbox, then drafted again.

A draft may spend `SLACK_NS`, and `BYTE_NS` for each byte of its payloads, on checks whose cost is known before. So what one
request does to the event loop is in proportion to what it sent.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from rooms.errors import FieldProblem, InvalidError
from rooms.publishing.filter import Judgement, MessageFilter, Subject
from rooms.publishing.sandbox import Sandbox
from rooms.publishing.sandbox_frames import Check, FilterCheck, Outcome, SchemaCheck, SchemaCompile
from rooms.publishing.schemas import PayloadSchema

SLACK_NS: Final = 10_000_000
BYTE_NS: Final = 50
_UNLISTED: Final = "does not fit the schema of its event type; to list what does not fit takes too long"
_MOST_LATE: Final = 3
_MAX_HEADERS_BYTES: Final = 25_000
"""As `rooms.publishing.filter_bounds` counts on; what is published has no more."""


class RequestChecks:
    """Verdicts of one request's checks, by what checks and the message's index; and the checks still to be done."""

    __slots__ = ("_verdicts", "pending")

    def __init__(self) -> None:
        self._verdicts: dict[tuple[PayloadSchema | MessageFilter, int], list[FieldProblem] | Judgement] = {}
        self.pending: list[tuple[PayloadSchema | MessageFilter, int, Check]] = []

    def problems(self, schema: PayloadSchema, index: int, payload: bytes, at: str) -> list[FieldProblem]:
        """Return what does not fit, or nothing as long as it is pending."""
        found = self._verdicts.get((schema, index))
        if isinstance(found, list):
            return found
        self.pending.append((schema, index, SchemaCheck(schema.text, payload, at)))
        return []

    def judgement(self, chosen: MessageFilter, index: int, subject: Subject) -> Judgement:
        """Return what a filter says, or that it matches as long as it is pending."""
        found = self._verdicts.get((chosen, index))
        if isinstance(found, Judgement):
            return found
        self.pending.append((chosen, index, _filter_check(chosen.expression, subject)))
        return Judgement(matches=True)

    async def run(self, sandbox: Sandbox, tenant: str) -> None:
        """Do what is pending. TransientError: it cannot be done now."""
        pending, self.pending = self.pending, []
        outcomes = await sandbox.run(tenant, [check for _, _, check in pending])
        for (what, index, check), outcome in zip(pending, outcomes, strict=True):
            if isinstance(check, FilterCheck):
                self._verdicts[what, index] = _judgement(outcome, sandbox)
            else:
                self._verdicts[what, index] = _problems(outcome, check.at, sandbox)


class ChecksPendingError(Exception):
    """A draft needs verdicts that only the sandbox can give."""

    def __init__(self, checks: RequestChecks) -> None:
        super().__init__()
        self.checks = checks


class Checker:
    """Checks schemas and filters outside of a publish."""

    def __init__(self, sandbox: Sandbox, *, max_schema_bytes: int) -> None:
        self._sandbox = sandbox
        self._max_schema_bytes = max_schema_bytes

    async def schema(self, tenant: str, schema: object, *, field: str) -> None:
        """Raise InvalidError (naming `field`) where it is no schema, or exceeds a bound."""
        found = PayloadSchema(schema, field=field, max_bytes=self._max_schema_bytes)
        if not found.plain:
            (outcome,) = await self._sandbox.run(tenant, [SchemaCompile(found.text, field)])
            if outcome.late:
                raise InvalidError(FieldProblem(field, f"takes longer than {self._sandbox.cpu_ms} ms to compile"))
            if outcome.problems:
                raise InvalidError(*(FieldProblem(*problem) for problem in outcome.problems))

    async def judge(self, tenant: str, chosen: MessageFilter, subject: Subject) -> Judgement:
        """Return what a filter says of a message."""
        size = len(subject.payload)
        small = _text_bytes(subject.headers) <= _MAX_HEADERS_BYTES
        if small and chosen.cost_ns(size) <= SLACK_NS + BYTE_NS * size:
            return chosen.judge(subject)
        (outcome,) = await self._sandbox.run(tenant, [_filter_check(chosen.expression, subject)])
        return _judgement(outcome, self._sandbox)


async def judge_all(sandbox: Sandbox, chosen: MessageFilter, subjects: Sequence[Subject]) -> list[Judgement]:
    """Return what a filter says of each of many messages that were published before."""
    found: list[Judgement] = []
    costly: list[int] = []
    for index, subject in enumerate(subjects):
        if chosen.cost_ns(len(subject.payload)) <= SLACK_NS:
            found.append(chosen.judge(subject))
            await asyncio.sleep(0)
        else:
            costly.append(index)
            found.append(Judgement(matches=True))
    late = 0
    for index in costly:
        if late >= _MOST_LATE:
            found[index] = Judgement(matches=True, error="it took too long for others")
            continue
        (outcome,) = await sandbox.run("", [_filter_check(chosen.expression, subjects[index])])
        late += outcome.late
        found[index] = _judgement(outcome, sandbox)
    return found


def _text_bytes(headers: Mapping[str, str]) -> int:
    return sum(len(name) + len(value) + 8 for name, value in headers.items())


def _filter_check(expression: str, subject: Subject) -> FilterCheck:
    return FilterCheck(
        expression,
        subject.payload,
        dict(subject.headers),
        subject.event_type,
        subject.event_version,
        subject.ordering_key,
        subject.priority,
    )


def _judgement(outcome: Outcome, sandbox: Sandbox) -> Judgement:
    if outcome.late:
        return Judgement(matches=True, error=f"it takes more than its share of {sandbox.cpu_ms} ms, or of memory")
    return Judgement(matches=outcome.matches, error=outcome.error)


def _problems(outcome: Outcome, at: str, sandbox: Sandbox) -> list[FieldProblem]:
    if not outcome.late:
        return [FieldProblem(*problem) for problem in outcome.problems]
    if not outcome.final:
        return [FieldProblem(at, _UNLISTED)]
    return [
        FieldProblem(
            at,
            f"to validate it by the schema of its event type takes more than {sandbox.cpu_ms} ms, or too much memory;"
            " simplify the schema, or publish a smaller payload",
        )
    ]
