"""From decoded messages and a plan to what is written: pure but for the ids it is given."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from rooms.domain.due import MAX_DELAY_MS, Due
from rooms.domain.ids import IdMaker, SubscriptionId
from rooms.errors import FieldProblem, InvalidError, TooLargeError
from rooms.publishing.checks import BYTE_NS, SLACK_NS, ChecksPendingError, RequestChecks
from rooms.publishing.filter import Judgement, MessageFilter, Subject
from rooms.publishing.plan import RoomPlan, Route, UnroutableError
from rooms.publishing.request import MAX_PROBLEMS, MessageRequest
from rooms.publishing.schemas import PayloadSchema
from rooms.storage.arrays import uuid, uuid_text
from rooms.storage.submission import More, Name, Submission

DEFAULT_PRIORITY: Final = 4
RING_WITHIN_MS: Final = 2_000
"""Whoever waits for messages looks this far ahead by itself; of what is due later nobody need be told yet."""
_NOBODYS: Final[Mapping[str, bytes]] = {}
_encode: Final = msgspec.json.encode


def content_hash(message: MessageRequest) -> bytes:
    """Two messages of one hash say the same, payload byte for byte."""
    return hashlib.sha256(_encode(message)).digest()


class Drafter:
    """Makes submissions for one process."""

    def __init__(
        self,
        ids: IdMaker,
        *,
        max_payload_bytes: int,
        filter_failed: Callable[[SubscriptionId, str], None] | None = None,
        crowded: Callable[[], frozenset[SubscriptionId]] = frozenset,
    ) -> None:
        """`filter_failed` is told of filters that could not say whether they want a message; it is delivered then. `crowded`
        says for whom plain messages are held at once.
        """
        self._ids = ids
        self._max_payload_bytes = max_payload_bytes
        self._filter_failed = filter_failed
        self._crowded = crowded

    def draft(
        self,
        plan: RoomPlan,
        messages: Sequence[MessageRequest],
        *,
        batch: bool,
        publisher: bytes,
        now_ms: int,
        known: Mapping[str, bytes] = _NOBODYS,
        checks: RequestChecks | None = None,
    ) -> Submission:
        """Everything that a request writes, and its answer. `publisher` is the key's id as a packed element; `known`: the
        answers of messages that were published before, by their publisher's own ids. `checks`: the verdicts of an earlier draft.

        ChecksPendingError: some checks are too costly to be done here. InvalidError: names every field that does not fit the room. TooLargeError: a payload is beyond the limit.
        """
        routes = self._routes(plan, messages, batch=batch, now_ms=now_ms, known=known, checks=checks)
        submission = Submission(plan.room_id, plan.plan_version)
        answers = [
            known[message.id or ""]
            if route is None
            else self._add(submission, plan, route, message, publisher=publisher, now_ms=now_ms)
            for route, message in zip(routes, messages, strict=True)
        ]
        submission.answer = b'{"messages":[' + b",".join(answers) + b"]}" if batch else answers[0]
        return submission

    def _routes(
        self,
        plan: RoomPlan,
        messages: Sequence[MessageRequest],
        *,
        batch: bool,
        now_ms: int,
        known: Mapping[str, bytes],
        checks: RequestChecks | None,
    ) -> list[Route | None]:
        """A route for each message, None for those that are known."""
        routes: list[Route | None] = []
        problems: list[FieldProblem] = []
        checking: _Checking | None = None
        for index, message in enumerate(messages):
            if message.id in known:
                routes.append(None)
                continue
            prefix = f"messages[{index}]." if batch else ""
            size = len(message.payload)
            if size > self._max_payload_bytes:
                raise TooLargeError(f"{prefix}payload: {size} bytes; the limit is {self._max_payload_bytes}")
            try:
                route = plan.route(message.event_type, message.version)
                schema = plan.schema(message.event_type, route.version)
            except (UnroutableError, InvalidError) as exc:
                problems += _unroutable(exc, prefix)
                continue
            chosen = message.destinations
            if message.deliver_at is not None or chosen is not None:
                problems += _misfits(route, message, prefix, now_ms)
                route = route if chosen is None else plan.only(route, message.event_type, chosen)
            if schema is not None or route.filtered:
                checking = checking or _Checking(checks)
                checking.left_ns += size * BYTE_NS
                problems += checking.problems(schema, index, message.payload, prefix)
                route = route if problems or not route.filtered else checking.sieve(plan, route, message, index)
            routes.append(route)
            if len(problems) >= MAX_PROBLEMS:
                break
        if problems:
            raise InvalidError(*problems[:MAX_PROBLEMS])
        if checking is not None:
            checking.end(self._filter_failed)
        return routes

    def _add(
        self,
        submission: Submission,
        plan: RoomPlan,
        route: Route,
        message: MessageRequest,
        *,
        publisher: bytes,
        now_ms: int,
    ) -> bytes:
        # A delivery is born in its message's millisecond, so that the two are found by each other's ids.
        message_octets, *deliveries = self._ids.octets(plan.room_id, now_ms, 1 + route.rows.count)
        identity = uuid(message_octets)
        message_id = correlation_id = uuid_text(identity)
        if message.correlation_id is None:
            told = message_id + b'"'
        else:
            correlation_id = message.correlation_id.encode()
            told = _encode(message.correlation_id)[1:]
        due = None if message.is_plain else _due(message)
        crowded = self._crowded()
        submission.add(
            route.rows,
            identity=identity,
            publisher=publisher,
            correlation_id=correlation_id,
            priority=DEFAULT_PRIORITY if message.priority is None else message.priority,
            life_ms=plan.expiration_ms if message.ttl_ms is None else plan.life_ms(message.ttl_ms),
            ordering_key=message.ordering_key,
            headers=_encode(message.headers) if message.headers else None,
            payload=message.payload,
            deliveries=deliveries,
            more=None if due is None else More(due=due, business_key=message.business_key, caller_id=message.id),
            held=route.holds(crowded) if crowded else b"",
        )
        wait_ms = 0 if due is None else due.wait_from_ms(now_ms)
        if wait_ms <= RING_WITHIN_MS:
            if route.pushes:
                submission.pushes = True
            if route.pulls:
                if wait_ms:
                    submission.later.append((wait_ms, route.pulls))
                else:
                    submission.pulls |= route.pulls
        answer = b'{"message_id":"' + message_id + b'","correlation_id":"' + told + route.told
        if message.id is not None:
            submission.names.append(Name(message.id, identity, content_hash(message), answer))
        return answer


def _unroutable(error: UnroutableError | InvalidError, prefix: str) -> Iterator[FieldProblem]:
    if isinstance(error, UnroutableError):
        yield FieldProblem(prefix + error.field, str(error))
    else:
        yield from (FieldProblem(prefix + one.field, one.message) for one in error.problems)


class _Checking:
    """The checks of one draft: done here as long as its budget lasts."""

    __slots__ = ("checks", "failures", "left_ns")

    def __init__(self, checks: RequestChecks | None) -> None:
        self.checks = checks
        self.left_ns: float = SLACK_NS
        self.failures: list[tuple[SubscriptionId, str]] = []

    def problems(
        self, schema: PayloadSchema | None, index: int, payload: msgspec.Raw, prefix: str
    ) -> Sequence[FieldProblem]:
        """Return what does not fit, or nothing as long as it is pending."""
        if schema is None:
            return ()
        cost_ns = schema.cost_ns(len(payload))
        if cost_ns is not None and cost_ns <= self.left_ns:
            self.left_ns -= cost_ns
            found = schema.problems(payload, f"{prefix}payload")
            if found is not None:
                return found
        self.checks = self.checks or RequestChecks()
        return self.checks.problems(schema, index, bytes(payload), f"{prefix}payload")

    def sieve(self, plan: RoomPlan, route: Route, message: MessageRequest, index: int) -> Route:
        """Return the part of a route whose filters let the message pass, or may, as long as they are pending."""
        return plan.sieve(route, _subject(route, message), self.failed, self.judge(index))

    def end(self, filter_failed: Callable[[SubscriptionId, str], None] | None) -> None:
        """Report filters that failed. ChecksPendingError: some checks are still to be done."""
        if self.checks is not None and self.checks.pending:
            raise ChecksPendingError(self.checks)
        if filter_failed is not None:
            for subscription, error in self.failures:
                filter_failed(subscription, error)

    def failed(self, subscription: SubscriptionId, error: str) -> None:
        """Note a filter that could not say whether it wants a message."""
        self.failures.append((subscription, error))

    def judge(self, index: int) -> Callable[[MessageFilter, Subject], Judgement]:
        """Return how filters judge that message."""

        def judge(chosen: MessageFilter, subject: Subject) -> Judgement:
            cost_ns = chosen.cost_ns(len(subject.payload))
            if cost_ns <= self.left_ns:
                self.left_ns -= cost_ns
                return chosen.judge(subject)
            self.checks = self.checks or RequestChecks()
            return self.checks.judgement(chosen, index, subject)

        return judge


def _subject(route: Route, message: MessageRequest) -> Subject:
    return Subject(
        payload=bytes(message.payload),
        headers=message.headers or {},
        event_type=message.event_type,
        event_version=route.version,
        ordering_key=message.ordering_key,
        priority=DEFAULT_PRIORITY if message.priority is None else message.priority,
    )


def _due(message: MessageRequest) -> Due:
    return Due.of(delay_ms=message.delay_ms, deliver_at=message.deliver_at)


def _misfits(route: Route, message: MessageRequest, prefix: str, now_ms: int) -> Iterator[FieldProblem]:
    if message.deliver_at is not None and _due(message).wait_from_ms(now_ms) > MAX_DELAY_MS:
        yield FieldProblem(f"{prefix}deliver_at", "is more than ten years off")
    for index, text in enumerate(message.destinations or ()):
        if text not in route.by_destination:
            field = f"{prefix}destinations[{index}]"
            yield FieldProblem(field, "no subscription of this room with this event type and version reads so")
