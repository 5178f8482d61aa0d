"""Defer checks that are too costly for the event loop to the sandbox.

Preparing a request may spend `BASE_BUDGET_NS`, and `BUDGET_NS_PER_BYTE` for each byte of its
payloads, on checks of known cost. Each message after the first may spend `BASE_BUDGET_NS` more on
filters of at most `CHEAP_NS` and validations of at most `CHEAP_SCHEMA_NS`, up to `CHEAP_BUDGET_NS`
for all of a batch. The other checks are collected and run in the sandbox. The request is then
prepared again with their results.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from rooms.domain.message_headers import HEADER_OVERHEAD, MAX_DELIVERED_BYTES
from rooms.errors import FieldProblem, InvalidError
from rooms.publishing.batch_bounds import BatchTooCostlyError
from rooms.publishing.cel_filter import FilterInput, FilterResult, MessageFilter
from rooms.publishing.json_schema import PayloadSchema
from rooms.publishing.sandbox.client import CheckSandbox
from rooms.publishing.sandbox.frames import (
    Check,
    CheckOutcome,
    FilterCheck,
    FilterMessage,
    SchemaCheck,
    SchemaCompile,
)

BASE_BUDGET_NS: Final = 10_000_000
BUDGET_NS_PER_BYTE: Final = 50
CHEAP_NS: Final = 20_000
"""A check costs the event loop more than this on its way to the sandbox and back."""
CHEAP_SCHEMA_NS: Final = 1_000_000
"""Bounds of validations are several times what these take, and ordinary batches pass with them."""
CHEAP_BUDGET_NS: Final = 1_000_000_000
"""As long as the sandbox has for a request by default."""
MAX_PENDING: Final = 20_000
"""Most checks of one batch in the sandbox; they would use up its CPU time long before."""
_PROBLEMS_NOT_LISTED: Final = (
    "does not match the schema of its event type; listing the problems takes too long"
)
_MAX_LATE: Final = 3


_PendingCheck = tuple[PayloadSchema | MessageFilter, int, Check]
"""Hold what is asked, the index of the message, and the check."""


class DeferredChecks:
    """Hold the results of one request's checks, and the checks that are pending.

    `problems` and `filter_result` raise BatchTooCostlyError where a batch has too many that are
    pending.
    """

    __slots__ = ("_messages", "_results", "pending")

    def __init__(self) -> None:
        self._results: dict[
            tuple[PayloadSchema | MessageFilter, int], list[FieldProblem] | FilterResult
        ] = {}
        self._messages: dict[int, FilterMessage] = {}
        self.pending: list[_PendingCheck] = []

    def problems(
        self, schema: PayloadSchema, index: int, payload: bytes, at: str
    ) -> list[FieldProblem]:
        """Return the problems of a payload, or none while its check is pending."""
        found = self._results.get((schema, index))
        if isinstance(found, list):
            return found
        self._add(schema, index, SchemaCheck(schema.text, payload, at))
        return []

    def filter_result(
        self, message_filter: MessageFilter, index: int, subject: FilterInput
    ) -> FilterResult:
        """Return the result of a filter, or a match while its check is pending."""
        found = self._results.get((message_filter, index))
        if isinstance(found, FilterResult):
            return found
        message = self._messages.get(index)
        if message is None:
            message = self._messages[index] = _filter_message(subject)
        self._add(message_filter, index, FilterCheck(message_filter.expression, message))
        return FilterResult(matches=True)

    def _add(self, subject: PayloadSchema | MessageFilter, index: int, check: Check) -> None:
        # One message passes with any number of filters: it cannot be divided.
        if len(self.pending) >= MAX_PENDING and index != self.pending[0][1]:
            raise BatchTooCostlyError(
                f"messages: more than {MAX_PENDING} of their validations and filters may take long;"
                " publish fewer messages at a time"
            )
        self.pending.append((subject, index, check))

    def drop_filters(self) -> bool:
        """Leave out the filters that are pending. Return whether validations are."""
        self.pending = [one for one in self.pending if isinstance(one[2], SchemaCheck)]
        return bool(self.pending)

    async def run(self, sandbox: CheckSandbox, tenant: str) -> None:
        """Run the pending checks. TransientError: they cannot run now."""
        pending = sorted(self.pending, key=_job_order)
        self.pending = []
        self._messages.clear()
        outcomes = await sandbox.run(tenant, [check for _, _, check in pending])
        for (subject, index, check), outcome in zip(pending, outcomes, strict=True):
            if isinstance(check, FilterCheck):
                self._results[subject, index] = _filter_result(outcome, sandbox)
            else:
                self._results[subject, index] = _problems(outcome, check.at, sandbox)


def _job_order(pending: _PendingCheck) -> tuple[bool, int]:
    """Order the checks of each schema one behind another, so that few jobs contain it.

    Filters come last: a filter without a result lets its message through, a validation does not.
    """
    check = pending[2]
    return (True, 0) if isinstance(check, FilterCheck) else (False, id(check.schema))


class ChecksPendingError(Exception):
    """Report that a request needs checks of the sandbox."""

    def __init__(self, checks: DeferredChecks) -> None:
        super().__init__()
        self.checks = checks


class FiltersPendingError(ChecksPendingError):
    """Report that filters of a request's route must be compiled first, which may take long."""

    def __init__(self) -> None:
        super().__init__(DeferredChecks())


class Checker:
    """Check schemas and filters outside of publishing."""

    def __init__(self, sandbox: CheckSandbox, *, max_schema_bytes: int) -> None:
        self._sandbox = sandbox
        self._max_schema_bytes = max_schema_bytes

    async def check_schema(self, tenant: str, schema: object, *, field: str) -> None:
        """Raise InvalidError (naming `field`) if it is no schema, or exceeds a bound."""
        found = PayloadSchema(schema, field=field, max_bytes=self._max_schema_bytes)
        if not found.is_plain:
            (outcome,) = await self._sandbox.run(tenant, [SchemaCompile(found.text, field)])
            if outcome.late:
                raise InvalidError(
                    FieldProblem(
                        field,
                        f"takes longer than {self._sandbox.cpu_ms} ms to compile",
                        bound="schema",
                    )
                )
            if outcome.problems:
                raise InvalidError(*(FieldProblem(*problem) for problem in outcome.problems))

    async def evaluate_filter(
        self, tenant: str, message_filter: MessageFilter, subject: FilterInput
    ) -> FilterResult:
        """Return the result of a filter for a message."""
        size = len(subject.payload)
        small = _headers_bytes(subject.headers) <= MAX_DELIVERED_BYTES
        if small and message_filter.cost_ns(size) <= BASE_BUDGET_NS + BUDGET_NS_PER_BYTE * size:
            return message_filter.evaluate(subject)
        (outcome,) = await self._sandbox.run(
            tenant, [FilterCheck(message_filter.expression, _filter_message(subject))]
        )
        return _filter_result(outcome, self._sandbox)


async def evaluate_all(
    sandbox: CheckSandbox, message_filter: MessageFilter, messages: Sequence[FilterInput]
) -> list[FilterResult]:
    """Return the results of a filter for many stored messages."""
    found: list[FilterResult] = []
    costly: list[int] = []
    for index, subject in enumerate(messages):
        if message_filter.cost_ns(len(subject.payload)) <= BASE_BUDGET_NS:
            found.append(message_filter.evaluate(subject))
            await asyncio.sleep(0)
        else:
            costly.append(index)
            found.append(FilterResult(matches=True))
    late = 0
    for index in costly:
        if late >= _MAX_LATE:
            found[index] = FilterResult(matches=True, error="it took too long for other messages")
            continue
        (outcome,) = await sandbox.run(
            "", [FilterCheck(message_filter.expression, _filter_message(messages[index]))]
        )
        late += outcome.late
        found[index] = _filter_result(outcome, sandbox)
    return found


def _headers_bytes(headers: Mapping[str, str]) -> int:
    return sum(len(name) + len(value) + HEADER_OVERHEAD for name, value in headers.items())


def _filter_message(subject: FilterInput) -> FilterMessage:
    return FilterMessage(
        subject.payload,
        dict(subject.headers),
        subject.event_type,
        subject.event_version,
        subject.ordering_key,
        subject.priority,
    )


def _filter_result(outcome: CheckOutcome, sandbox: CheckSandbox) -> FilterResult:
    if outcome.late:
        return FilterResult(
            matches=True, error=f"it takes more than its share of {sandbox.cpu_ms} ms, or of memory"
        )
    return FilterResult(matches=outcome.matches, error=outcome.error)


def _problems(outcome: CheckOutcome, at: str, sandbox: CheckSandbox) -> list[FieldProblem]:
    if not outcome.late:
        return [FieldProblem(*problem) for problem in outcome.problems]
    if not outcome.final:
        return [FieldProblem(at, _PROBLEMS_NOT_LISTED)]
    return [
        FieldProblem(
            at,
            f"validating it by the schema of its event type takes more than {sandbox.cpu_ms} ms,"
            " or too much memory; simplify the schema, or publish a smaller payload",
        )
    ]
