"""Run the cheap checks of a request inline, within the time that it may take from others.

Payloads are validated against schemas, and filters are evaluated. What exceeds the budget is
deferred to the sandbox (`rooms.publishing.deferred_checks`).
"""

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from rooms.domain.delivery_task import DEFAULT_PRIORITY
from rooms.domain.ids import SubscriptionId
from rooms.errors import FieldProblem
from rooms.publishing.cel_filter import FilterInput, FilterResult, MessageFilter
from rooms.publishing.deferred_checks import (
    BASE_BUDGET_NS,
    CHEAP_BUDGET_NS,
    CHEAP_NS,
    CHEAP_SCHEMA_NS,
    ChecksPendingError,
    DeferredChecks,
)
from rooms.publishing.event_route import EventRoute
from rooms.publishing.json_schema import PayloadSchema
from rooms.publishing.request import MessageRequest
from rooms.publishing.routing import RoutingTable

PART_NS: Final = 4_000
"""About so long a recipient takes where a part of a route is built."""


class InlineChecks:
    """Run the checks of one request inline, as far as its budget allows.

    `spent_ns`: bound of the time that they took since it was last set to 0.
    """

    __slots__ = (
        "_cheap_budget_ns",
        "_cheap_of_message_ns",
        "budget_ns",
        "deferred",
        "filter_errors",
        "spent_ns",
    )

    def __init__(self, checks: DeferredChecks | None) -> None:
        self.deferred = checks
        self.budget_ns: float = BASE_BUDGET_NS
        self._cheap_budget_ns: float = CHEAP_BUDGET_NS
        self._cheap_of_message_ns: float = 0
        self.spent_ns: float = 0
        self.filter_errors: list[tuple[SubscriptionId, str]] = []

    def begin_message(self) -> None:
        """Let a further message of a batch spend time of its own on cheap checks."""
        self._cheap_of_message_ns = min(BASE_BUDGET_NS, self._cheap_budget_ns)

    def _spend(self, cost_ns: float, cheap_ns: int) -> bool:
        """Take the cost of a check from a budget; return False if none has so much.

        The budget that each message has is for checks of at most `cheap_ns`.
        """
        if cost_ns <= self.budget_ns:
            self.budget_ns -= cost_ns
        elif cost_ns <= cheap_ns and cost_ns <= self._cheap_of_message_ns:
            self._cheap_of_message_ns -= cost_ns
            self._cheap_budget_ns -= cost_ns
        else:
            return False
        self.spent_ns += cost_ns
        return True

    def _spend_on_schema(self, cost_ns: float) -> bool:
        return self._spend(cost_ns, CHEAP_SCHEMA_NS)

    def problems(
        self, schema: PayloadSchema | None, index: int, payload: msgspec.Raw, prefix: str
    ) -> Sequence[FieldProblem]:
        """Return the problems of a payload, or none while its check is pending."""
        if schema is None:
            return ()
        cost_ns = schema.cost_ns(len(payload))
        if cost_ns is not None and self._spend_on_schema(cost_ns):
            found = schema.problems(
                payload, f"{prefix}payload", self._spend_on_schema, many=index > 0
            )
            if found is not None:
                return found
        self.deferred = self.deferred or DeferredChecks()
        return self.deferred.problems(schema, index, bytes(payload), f"{prefix}payload")

    def apply_filters(
        self, routing: RoutingTable, route: EventRoute, message: MessageRequest, index: int
    ) -> EventRoute:
        """Return the recipients whose filters match, or are pending, as a route."""
        part = routing.apply_filters(
            route, _filter_input(route, message), self.add_filter_error, self.evaluator(index)
        )
        if part is not route:
            self.spent_ns += PART_NS * len(route.recipients)
        return part

    def finish_schemas(self) -> None:
        """Leave out filters that are pending. ChecksPendingError: validations are."""
        if self.deferred is not None and self.deferred.drop_filters():
            raise ChecksPendingError(self.deferred)

    def finish(self, on_filter_error: Callable[[SubscriptionId, str], None] | None) -> None:
        """Report filters that failed. ChecksPendingError: some checks are pending."""
        if self.deferred is not None and self.deferred.pending:
            raise ChecksPendingError(self.deferred)
        if on_filter_error is not None:
            for subscription, error in self.filter_errors:
                on_filter_error(subscription, error)

    def add_filter_error(self, subscription: SubscriptionId, error: str) -> None:
        """Note a filter that failed."""
        self.filter_errors.append((subscription, error))

    def evaluator(self, index: int) -> Callable[[MessageFilter, FilterInput], FilterResult]:
        """Return a function that evaluates filters for a message, or defers them."""

        def evaluate(message_filter: MessageFilter, subject: FilterInput) -> FilterResult:
            cost_ns = message_filter.cost_ns(len(subject.payload)) + subject.decode_ns()
            if self._spend(cost_ns, CHEAP_NS):
                return message_filter.evaluate(subject)
            self.deferred = self.deferred or DeferredChecks()
            return self.deferred.filter_result(message_filter, index, subject)

        return evaluate


def _filter_input(route: EventRoute, message: MessageRequest) -> FilterInput:
    return FilterInput(
        payload=bytes(message.payload),
        headers=message.delivered_headers or {},
        event_type=message.event_type,
        event_version=route.version,
        ordering_key=message.ordering_key,
        priority=DEFAULT_PRIORITY if message.priority is None else message.priority,
    )
