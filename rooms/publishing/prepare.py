"""Build the rows and the answer of a request from its messages and the routing table.

Pure, except for the ids that it draws and the clock that divides its work.
"""

import hashlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from itertools import chain, islice
from time import perf_counter_ns
from typing import Final

import msgspec

from rooms.db.pg_arrays import uuid_element, uuid_text
from rooms.db.publish.request_rows import CallerId, ExtendedColumns, InsertRows
from rooms.domain.delivery_task import DEFAULT_PRIORITY
from rooms.domain.ids import IdGenerator, SubscriptionId
from rooms.errors import FieldProblem, InvalidError, TooLargeError
from rooms.publishing.batch_bounds import check_deliveries
from rooms.publishing.deferred_checks import (
    BUDGET_NS_PER_BYTE,
    DeferredChecks,
    FiltersPendingError,
)
from rooms.publishing.event_route import EventRoute
from rooms.publishing.inline_checks import PART_NS, InlineChecks
from rooms.publishing.request import MAX_PROBLEMS, MessageRequest
from rooms.publishing.routing import (
    PublishAccess,
    RoutingTable,
    UnroutableError,
    delivery_schedule,
    message_problems,
    routing_problems,
)

NOTIFY_WITHIN_MS: Final = 2_000
"""Consumers look this far ahead, so messages that are due later need no notification."""
SLICE_ROWS: Final = 1_000
"""Most messages and deliveries that are prepared at a time, unless one message has more."""
SLICE_NS: Final = 500_000
"""Nanoseconds, about, for which messages are checked and routed, or prepared, at a time.

On a busy machine they take two or three times as long, and other requests wait for several slices.
"""
_encode: Final = msgspec.json.encode


def content_hash(message: MessageRequest) -> bytes:
    """Return the hash of a message's content. Equal hashes mean equal content, byte for byte."""
    if message.signature is None:
        message.signature = msgspec.UNSET  # null counts as omitted, and older hashes have neither
    return hashlib.sha256(_encode(message)).digest()


class Preparer:
    """Prepare requests for one process."""

    def __init__(
        self,
        ids: IdGenerator,
        *,
        max_payload_bytes: int,
        on_filter_error: Callable[[SubscriptionId, str], None] | None = None,
        saturated: Callable[[], frozenset[SubscriptionId]] = frozenset,
    ) -> None:
        """Set callbacks: for filters that failed, whose messages are delivered, and for saturation.

        Deliveries to subscriptions that `saturated` returns are held at once.
        """
        self._ids = ids
        self._max_payload_bytes = max_payload_bytes
        self._on_filter_error = on_filter_error
        self._saturated = saturated

    def prepare_one(
        self,
        routing: RoutingTable,
        message: MessageRequest,
        *,
        publisher: bytes,
        now_ms: int,
        access: PublishAccess | None,
        application: str | None,
        answered: Mapping[str, bytes],
        refused: Mapping[int, str],
    ) -> InsertRows:
        """Return the rows of a request with one message, as `prepare_in_slices` does at once.

        FiltersPendingError: that would take too long.
        """
        found = _RoutedMessages(None)
        self._route(
            found,
            ((0, message),),
            routing,
            batch=False,
            now_ms=now_ms,
            access=access,
            answered=answered,
            refused=refused,
        )
        if found.waiting:
            raise FiltersPendingError
        (route,) = found.finish(self._on_filter_error)
        rows = InsertRows(routing.room_id, routing.plan_version)
        rows.tracks_completion = routing.tracks_completion
        rows.answer = (
            answered[message.id or ""]
            if route is None
            else self._add(
                rows,
                routing,
                route,
                message,
                publisher=publisher,
                now_ms=now_ms,
                access=access,
                application=application,
            )
        )
        return rows

    def prepare_in_slices(
        self,
        routing: RoutingTable,
        messages: Sequence[MessageRequest],
        *,
        batch: bool,
        publisher: bytes,
        now_ms: int,
        access: PublishAccess | None,
        application: str | None,
        answered: Mapping[str, bytes],
        refused: Mapping[int, str],
        checks: DeferredChecks | None = None,
    ) -> Generator[None, None, InsertRows]:
        """Return the rows of a request and its answer. Yield after slices of half a millisecond.

        Other requests go on meanwhile. If the room changes, the statement finds that the table is
        old.

        `access`: what the publisher may do; None: everything. `publisher`: id of the API key, as a
        packed element; `application`: that of the key. `answered`: answers of messages that were
        published before, by caller id. `refused`: why signatures are not accepted, by index.
        `checks`: results of deferred checks.

        ChecksPendingError: some checks are too costly to run here. InvalidError: names every field
        that the room does not accept. TooLargeError: a payload exceeds the limit.
        BatchTooCostlyError: too many would be pending, or the batch makes too many deliveries.
        ForbiddenError: `access` does not include an event type.
        """
        found = _RoutedMessages(checks)
        rest = enumerate(messages)
        while self._route(
            found,
            rest,
            routing,
            batch=batch,
            now_ms=now_ms,
            access=access,
            answered=answered,
            refused=refused,
        ):
            yield
        routes = found.finish(self._on_filter_error)
        check_deliveries(route.rows.recipient_count for route in routes if route is not None)
        rows = InsertRows(routing.room_id, routing.plan_version)
        rows.tracks_completion = routing.tracks_completion
        answers: list[bytes] = []
        slice_end, ends_ns = SLICE_ROWS, perf_counter_ns() + SLICE_NS
        for route, message in zip(routes, messages, strict=True):
            if rows.row_count >= slice_end or perf_counter_ns() >= ends_ns:
                yield
                slice_end, ends_ns = rows.row_count + SLICE_ROWS, perf_counter_ns() + SLICE_NS
            answers.append(
                answered[message.id or ""]
                if route is None
                else self._add(
                    rows,
                    routing,
                    route,
                    message,
                    publisher=publisher,
                    now_ms=now_ms,
                    access=access,
                    application=application,
                )
            )
        rows.answer = _batch_answer(answers) if batch else answers[0]
        return rows

    def _route(
        self,
        found: "_RoutedMessages",
        messages: Iterable[tuple[int, MessageRequest]],
        routing: RoutingTable,
        *,
        batch: bool,
        now_ms: int,
        access: PublishAccess | None,
        answered: Mapping[str, bytes],
        refused: Mapping[int, str],
    ) -> bool:
        """Check messages until `SLICE_NS` or a schema is built. Return whether that ended it.

        A message waits where filters of its route are not prepared by then; it is the next one.
        """
        routes, problems = found.routes, found.problems
        work_ns: float = 0
        is_searched = bool(problems)
        loaded_schemas = routing.loaded_schemas
        for index, message in found.resume(messages):
            if message.id in answered:
                routes.append(None)
                continue
            prefix = f"messages[{index}]." if batch else ""
            self._check_size(message, prefix)
            try:
                route = _route(routing, message, access, refused.get(index))
                schema = routing.schema(message.event_type, route.version)
            except (UnroutableError, InvalidError) as exc:
                # Only once: the search for a similar name takes longer than the rest.
                searches = not is_searched and getattr(exc, "field", "") == "event_type"
                is_searched = is_searched or searches
                problems += routing_problems(
                    exc,
                    prefix,
                    routing.event_type_advice(message.event_type, access) if searches else "",
                )
                if len(problems) >= MAX_PROBLEMS or routing.loaded_schemas != loaded_schemas:
                    return len(problems) < MAX_PROBLEMS
                continue
            whole, chosen = route, message.destinations
            route = route if chosen is None else found.restricted(index, route, chosen)
            if route.filtered and not routing.prepare_filters(
                route, len(message.payload), SLICE_NS
            ):
                found.waiting = ((index, message),)
                return True
            if message.deliver_at is not None or chosen is not None:
                # No more are made than an answer has: they take longer than all the rest.
                problems += islice(
                    message_problems(whole, message, prefix, now_ms, access),
                    MAX_PROBLEMS - len(problems),
                )
                work_ns += PART_NS * len(chosen or ())
            if schema is not None or route.filtered:
                checking = found.next_checking()
                checking.budget_ns += len(message.payload) * BUDGET_NS_PER_BYTE
                problems += checking.problems(schema, index, message.payload, prefix)
                route = (
                    route
                    if problems or not route.filtered
                    else checking.apply_filters(routing, route, message, index)
                )
                work_ns += checking.spent_ns
                checking.spent_ns = 0
            routes.append(route)
            if len(problems) >= MAX_PROBLEMS:
                break
            if work_ns >= SLICE_NS or routing.loaded_schemas != loaded_schemas:
                return True
        return False

    def _check_size(self, message: MessageRequest, prefix: str) -> None:
        size = len(message.payload)
        if size > self._max_payload_bytes:
            raise TooLargeError(
                f"{prefix}payload: {size} bytes; the limit is {self._max_payload_bytes}"
            )

    def _add(
        self,
        rows: InsertRows,
        routing: RoutingTable,
        route: EventRoute,
        message: MessageRequest,
        *,
        publisher: bytes,
        now_ms: int,
        access: PublishAccess | None,
        application: str | None,
    ) -> bytes:
        # Deliveries get the millisecond of their message, so that each is found by the other's id.
        message_octets, *deliveries = self._ids.generate_octets(
            routing.room_id, now_ms, 1 + route.rows.recipient_count
        )
        identity = uuid_element(message_octets)
        message_id = correlation_id = uuid_text(identity)
        if message.correlation_id is None:
            correlation_json = message_id + b'"'
        else:
            correlation_id = message.correlation_id.encode()
            correlation_json = _encode(message.correlation_id)[1:]
        foreign = None if access is None or access.owns else access.organisation
        is_plain = message.is_plain and foreign is None and application is None
        due = None if is_plain else delivery_schedule(message)
        caller_id = message.id
        if caller_id is not None and access is not None:
            caller_id = access.scope(caller_id)
        saturated = self._saturated()
        rows.add(
            route.rows,
            identity=identity,
            publisher=publisher,
            correlation_id=correlation_id,
            priority=DEFAULT_PRIORITY if message.priority is None else message.priority,
            life_ms=routing.expiration_ms
            if message.ttl_ms is None
            else routing.effective_ttl_ms(message.ttl_ms),
            ordering_key=message.ordering_key,
            headers=_encode(headers) if (headers := message.delivered_headers) else None,
            payload=message.payload,
            deliveries=deliveries,
            extension=None
            if due is None
            else ExtendedColumns(
                due=due,
                business_key=message.business_key,
                caller_id=caller_id,
                publisher_organisation=foreign,
                application=application,
                directed=message.destinations is not None,
            ),
            held=route.hold_flags(saturated) if saturated else b"",
        )
        wait_ms = 0 if due is None else due.delay_from_ms(now_ms)
        if wait_ms <= NOTIFY_WITHIN_MS:
            if route.pushes:
                rows.has_push = True
            if route.pulls:
                if wait_ms:
                    rows.due_soon.append((wait_ms, route.pulls))
                else:
                    rows.pull_subscriptions |= route.pulls
        answer = (
            b'{"message_id":"'
            + message_id
            + b'","correlation_id":"'
            + correlation_json
            + (
                route.answer_tail
                if access is None or access.sees_all
                else route.answer_tail_for(access.organisation)
            )
        )
        if caller_id is not None:
            rows.caller_ids.append(CallerId(caller_id, identity, content_hash(message), answer))
        return answer


def _batch_answer(answers: Iterable[bytes]) -> bytes:
    return b'{"messages":[' + b",".join(answers) + b"]}"


def _route(
    routing: RoutingTable,
    message: MessageRequest,
    access: PublishAccess | None,
    refused_signature: str | None,
) -> EventRoute:
    if access is not None:
        access.check_event_type(message.event_type)
    if refused_signature is not None:
        raise InvalidError(FieldProblem("signature", refused_signature))
    return routing.route(message.event_type, message.version)


class _RoutedMessages:
    """Collect the routes of a request's messages, and what is wrong with them.

    A route is None for a message that was published before.
    """

    __slots__ = ("_restricted", "checking", "checks", "problems", "routes", "waiting")

    def __init__(self, checks: DeferredChecks | None) -> None:
        self.checks = checks
        self.checking: InlineChecks | None = None
        self.problems: list[FieldProblem] = []
        self.routes: list[EventRoute | None] = []
        self.waiting: tuple[tuple[int, MessageRequest], ...] = ()
        """The message whose route has filters that are not prepared, with its index."""
        self._restricted: tuple[int, EventRoute] | None = None

    def resume(
        self, messages: Iterable[tuple[int, MessageRequest]]
    ) -> Iterable[tuple[int, MessageRequest]]:
        """Return the messages that are left, the one that waited first."""
        if not self.waiting:
            return messages
        waiting, self.waiting = self.waiting, ()
        return chain(waiting, messages)

    def restricted(self, index: int, route: EventRoute, chosen: Iterable[str]) -> EventRoute:
        """Return the route of the message at `index` with its destinations only.

        It is found once, and not again in each slice for which the message waits.
        """
        if self._restricted is None or self._restricted[0] != index:
            self._restricted = index, route.restricted_to(chosen)
        return self._restricted[1]

    def next_checking(self) -> InlineChecks:
        """Return the checks that run inline, for a further message."""
        if self.checking is None:
            self.checking = InlineChecks(self.checks)
        else:
            self.checking.begin_message()
        return self.checking

    def finish(
        self, on_filter_error: Callable[[SubscriptionId, str], None] | None
    ) -> list[EventRoute | None]:
        """Return a route for each message. InvalidError, ChecksPendingError.

        Validations that are pending come first: each wrong message is named, as far as an answer
        goes.
        """
        if self.problems:
            if len(self.problems) < MAX_PROBLEMS and self.checking is not None:
                self.checking.finish_schemas()
            raise InvalidError(*self.problems[:MAX_PROBLEMS])
        if self.checking is not None:
            self.checking.finish(on_filter_error)
        return self.routes
