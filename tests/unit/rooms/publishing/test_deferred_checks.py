"""Test which checks a request asks of the sandbox, and that their results reach it."""

import json
import secrets
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Final, cast

import msgspec
import pytest

from rooms.db.publish.request_rows import InsertRows
from rooms.db.publish.routing import RoutingRecord, SubscriptionRecord, VersionRecord
from rooms.domain.ids import IdGenerator, OrganisationId, RoomId, SubscriptionId
from rooms.domain.state_machine import SubscriptionType
from rooms.errors import FieldProblem, InvalidError, TooLargeError
from rooms.publishing import batch_bounds, deferred_checks
from rooms.publishing.cel_filter import FilterInput, FilterResult, load_filter
from rooms.publishing.deferred_checks import ChecksPendingError, DeferredChecks
from rooms.publishing.json_schema import PayloadSchema
from rooms.publishing.prepare import Preparer
from rooms.publishing.request import MessageRequest
from rooms.publishing.routing import RoutingTable
from rooms.publishing.sandbox.client import CheckSandbox
from rooms.publishing.sandbox.frames import Check, CheckOutcome, FilterCheck, SchemaCheck


class Recorder:
    """Answer each check with what it asks."""

    cpu_ms = 100

    def __init__(self) -> None:
        self.checks: list[Check] = []

    async def run(self, _: str, checks: Sequence[Check]) -> list[CheckOutcome]:
        self.checks += checks
        return [
            CheckOutcome(matches=False, error=f"{check.expression} {check.message.payload!r}")
            if isinstance(check, FilterCheck)
            else CheckOutcome([("field", f"{check!r}", None)])
            for check in checks
        ]


def subject(payload: bytes) -> FilterInput:
    return FilterInput(
        payload=payload,
        headers={},
        event_type="e",
        event_version=1,
        ordering_key=None,
        priority=4,
    )


async def test_each_result_reaches_its_check_whatever_their_order() -> None:
    """Check that filters come last, and that checks of one schema follow one another."""
    schemas = [PayloadSchema({"title": title}) for title in "abc"]
    filters = [load_filter(expression) for expression in ("priority == 1", "priority == 2")]
    checks, recorder = DeferredChecks(), Recorder()

    def ask() -> list[list[FieldProblem] | FilterResult]:
        found: list[list[FieldProblem] | FilterResult] = []
        for index in range(9):
            payload, message = b"%d" % index, subject(b"%d" % index)
            found += (
                checks.problems(schemas[index % 3], index, payload, "payload"),
                *(checks.filter_result(one, index, message) for one in filters),
            )
        return found

    assert ask() == [[], FilterResult(matches=True), FilterResult(matches=True)] * 9
    await checks.run(cast("CheckSandbox", recorder), "tenant")
    assert not checks.pending
    assert ask() == [
        result
        for index in range(9)
        for result in (
            [
                FieldProblem(
                    "field", f"{SchemaCheck(schemas[index % 3].text, b'%d' % index, 'payload')!r}"
                )
            ],
            FilterResult(matches=False, error=f"priority == 1 b'{index}'"),
            FilterResult(matches=False, error=f"priority == 2 b'{index}'"),
        )
    ]
    assert not checks.pending
    asked = [check.schema for check in recorder.checks[:9] if isinstance(check, SchemaCheck)]
    assert all(asked[at] == asked[at + 1] == asked[at + 2] for at in (0, 3, 6))
    messages = [check.message for check in recorder.checks[9:] if isinstance(check, FilterCheck)]
    assert len({id(message) for message in messages}) == 9


def test_a_batch_with_too_many_checks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_checks, "MAX_PENDING", 10)
    schema, checks = PayloadSchema({"title": "a"}), DeferredChecks()
    for index in range(10):
        checks.problems(schema, index, b"1", "payload")
    with pytest.raises(TooLargeError, match=r"more than 10 .*; publish fewer messages at a time"):
        checks.problems(schema, 10, b"1", "payload")


COUNTRY = "payload.country == 'NL' && payload.amount > 10"
"""An ordinary filter, of 2 microseconds."""


def prepare(
    subscriptions: int,
    messages: int,
    *,
    schema: str | None = None,
    payload: bytes | None = None,
    wanted: str | None = COUNTRY,
) -> InsertRows:
    """Prepare a batch of messages that match the filter of all subscriptions of its room."""
    return prepare_in_slices(
        subscriptions, messages, schema=schema, payload=payload, wanted=wanted
    )[0]


def prepare_in_slices(
    subscriptions: int,
    messages: int,
    *,
    schema: str | None = None,
    payload: bytes | None = None,
    wanted: str | None = COUNTRY,
) -> tuple[InsertRows, int]:
    """Return the rows of such a batch, and after how many slices they were complete."""
    organisation = OrganisationId(str(uuid.UUID(int=9)))
    table = RoutingTable(
        RoutingRecord(
            room_id=RoomId(1),
            organisation_id=organisation,
            plan_version=1,
            expiration_ms=None,
            subscriptions=tuple(
                SubscriptionRecord(
                    id=SubscriptionId(str(uuid.UUID(int=number + 1))),
                    organisation_id=organisation,
                    type=SubscriptionType.PUSH,
                    version=1,
                    event_types=None,
                    filter=wanted,
                )
                for number in range(subscriptions)
            ),
            versions=(VersionRecord("made", 1, schema),),
        )
    )
    raw = msgspec.Raw(payload or b'{"country": "NL", "amount": 11, "note": "' + b"x" * 150 + b'"}')
    slices = Preparer(IdGenerator(secrets.randbits), max_payload_bytes=300_000).prepare_in_slices(
        table,
        [MessageRequest(event_type="made", payload=raw) for _ in range(messages)],
        batch=True,
        publisher=b"",
        now_ms=1,
        access=None,
        application=None,
        answered={},
        refused={},
    )
    count = 1
    while True:
        try:
            next(slices)
        except StopIteration as done:
            rows: InsertRows = done.value
            return rows, count
        count += 1


def test_a_batch_for_many_ordinary_filters_needs_no_sandbox() -> None:
    """Others may have subscribed: they must not end the batches of a publisher."""
    assert prepare(40, 1000).row_count == 41_000


@pytest.mark.parametrize(
    ("schema", "payload"),
    [
        ({"items": {"required": [f"{number:x}" for number in range(4000)]}}, [{}] * 150),
        ({"items": {"multipleOf": 0.1}}, [1e300] * 30_000),
        ({"items": {"multipleOf": 1e-308}}, [1e308] * 30_000),
        ({"items": {"multipleOf": 0.1}}, [1] * 30_000),
    ],
)
def test_a_message_that_may_keep_the_event_loop_is_checked_in_the_sandbox(
    schema: object, payload: object
) -> None:
    with pytest.raises(ChecksPendingError) as caught:
        prepare(0, 1, schema=json.dumps(schema), payload=json.dumps(payload).encode())
    assert len(caught.value.checks.pending) == 1


def test_a_batch_lists_problems_within_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the lists of 300 names, each of which may take 1.7 ms."""
    monkeypatch.setattr("rooms.publishing.prepare.MAX_PROBLEMS", 1000)
    schema = PayloadSchema({"required": [f"{number:x}" for number in range(300)]})
    listed: list[str] = []

    def list_problems(_: PayloadSchema, __: object, at: str) -> list[FieldProblem]:
        listed.append(at)
        return [FieldProblem(at, "does not match")]

    monkeypatch.setattr(PayloadSchema, "_list_problems", list_problems)
    with pytest.raises(InvalidError):
        prepare(0, 50, schema=schema.text.decode(), payload=b"{}")
    assert len(listed) == 5


ORDERS: Final = {
    "properties": {
        "amount": {"type": "number", "minimum": 0},
        "items": {"items": {"properties": {"count": {"type": "integer", "minimum": 0}}}},
    },
    "required": ["amount"],
}


def an_order(amount: str) -> bytes:
    """Return an order of 440 bytes, with an id that looks like a number with an exponent."""
    items = ", ".join(f'{{"sku": "AB-{number}", "count": {number}}}' for number in range(5))
    return (
        f'{{"id": "3f2b4e55-9a7d-4e55", "amount": {amount}, "note": "{"x" * 230}",'
        f' "items": [{items}]}}'
    ).encode()


@pytest.mark.parametrize(
    ("schema", "payload"),
    [
        (ORDERS, an_order("19.99")),
        (ORDERS, an_order("1e-05")),
        (
            {"properties": {"a": {"multipleOf": 0.01}, "b": {"enum": [1, 2, 3, 4, 5]}}},
            b'{"a": 19.99, "b": 3}',
        ),
    ],
)
def test_a_batch_of_ordinary_orders_needs_no_sandbox(schema: object, payload: bytes) -> None:
    assert prepare(0, 500, schema=json.dumps(schema), payload=payload).row_count == 500


@pytest.mark.parametrize("number", ["8999", "1e-05"])
def test_a_large_array_of_ordinary_numbers_needs_no_sandbox(number: str) -> None:
    payload = b"[" + b",".join([number.encode()] * 9000) + b"]"
    assert prepare(0, 1, schema='{"items": {"minimum": 0}}', payload=payload).row_count == 1


def test_a_batch_names_each_message_that_is_wrong() -> None:
    with pytest.raises(InvalidError) as caught:
        prepare(0, 100, schema=json.dumps(ORDERS), payload=an_order("-5"))
    assert [one.field for one in caught.value.problems] == [
        f"messages[{index}].payload.amount" for index in range(100)
    ]


def test_validations_that_are_pending_run_before_a_batch_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Count lists of 1.7 ms: of `anyOf` the library makes all problems before the first."""
    monkeypatch.setattr("rooms.publishing.inline_checks.BASE_BUDGET_NS", 2_500_000)
    schema = {"anyOf": [{"required": [f"{number:x}" for number in range(300)]}, False]}
    with pytest.raises(ChecksPendingError) as caught:
        prepare(0, 5, schema=json.dumps(schema), payload=b"{}")
    assert [index for _, index, _ in caught.value.checks.pending] == [1, 2, 3, 4]


def test_a_batch_that_makes_too_many_deliveries_is_refused_before_any_is_prepared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Count what 1,000 messages to 1,000 subscriptions, a million rows, take."""
    assert prepare(100, 1000, wanted=None).row_count == 101_000
    monkeypatch.setattr(Preparer, "_add", None)
    with pytest.raises(TooLargeError, match=r"^messages: they make 1000000 deliveries.* fewer"):
        prepare(1000, 1000, wanted=None)


def test_one_message_may_have_any_number_of_recipients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_bounds, "MAX_BATCH_DELIVERIES", 10)
    assert prepare(30, 1, wanted=None).row_count == 31
    assert prepare(5, 2, wanted=None).row_count == 12
    with pytest.raises(TooLargeError):
        prepare(30, 2, wanted=None)


def a_list(item: bytes, size: int) -> bytes:
    return b"[" + b",".join([item] * (size // (len(item) + 1))) + b"]"


@pytest.mark.parametrize("item", [b"1", b"null", b'"abc"', b'{"a": "some text"}'])
def test_a_payload_that_is_decoded_for_a_filter_ends_a_slice(item: bytes) -> None:
    """Another request waits for one such payload, not for all: each takes milliseconds."""
    rows, slices = prepare_in_slices(1, 30, payload=a_list(item, 60_000), wanted="payload.b == 1")
    assert rows.row_count == 60
    assert slices >= 30


def test_payloads_that_take_long_to_decode_are_filtered_in_the_sandbox() -> None:
    with pytest.raises(ChecksPendingError) as caught:
        prepare(2, 30, payload=a_list(b"{}", 262_000))
    pending = Counter(index for _, index, _ in caught.value.checks.pending)
    assert len(pending) >= 10


def test_ordinary_large_payloads_are_filtered_at_once() -> None:
    order = json.dumps({"id": 3817, "name": "an item", "amount": 12.25, "tags": ["a", "b"]})
    payload = b'{"country": "NL", "amount": 11, "items": ' + a_list(order.encode(), 200_000) + b"}"
    assert prepare(3, 30, payload=payload).row_count == 30 * 4


def test_only_the_first_filter_of_a_message_decodes_it() -> None:
    for payload in (b"[1]", a_list(b"1", 1_000), a_list(b"1e308", 20_000)):
        message = subject(payload)
        assert message.decode_ns() > len(payload) * 10
        load_filter("payload.size() > 0").evaluate(message)
        assert message.decode_ns() == 0


def test_each_message_of_a_batch_has_a_budget_for_cheap_checks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FilterInput, "decode_ns", lambda _: 0)
    monkeypatch.setattr("rooms.publishing.inline_checks.BASE_BUDGET_NS", 4_000)
    monkeypatch.setattr("rooms.publishing.prepare.BUDGET_NS_PER_BYTE", 0)
    with pytest.raises(ChecksPendingError) as caught:
        prepare(5, 3)
    assert Counter(index for _, index, _ in caught.value.checks.pending) == {0: 3, 1: 3, 2: 3}
    monkeypatch.setattr("rooms.publishing.inline_checks.CHEAP_NS", 1_000)
    with pytest.raises(ChecksPendingError) as caught:
        prepare(5, 3)
    assert Counter(index for _, index, _ in caught.value.checks.pending) == {0: 3, 1: 5, 2: 5}


def test_cheap_checks_of_a_batch_take_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FilterInput, "decode_ns", lambda _: 0)
    monkeypatch.setattr("rooms.publishing.inline_checks.BASE_BUDGET_NS", 4_000)
    monkeypatch.setattr("rooms.publishing.prepare.BUDGET_NS_PER_BYTE", 0)
    monkeypatch.setattr("rooms.publishing.inline_checks.CHEAP_BUDGET_NS", 10_000)
    with pytest.raises(ChecksPendingError) as caught:
        prepare(5, 6)
    pending = Counter(index for _, index, _ in caught.value.checks.pending)
    assert [pending[index] for index in range(6)] == [3, 3, 3, 4, 5, 5]


def test_one_message_may_have_any_number_of_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a room with many subscriptions still accepts single messages."""
    monkeypatch.setattr(deferred_checks, "MAX_PENDING", 10)
    checks, message = DeferredChecks(), subject(b"1")
    for number in range(20):
        checks.filter_result(load_filter(f"priority == {number}"), 0, message)
    assert len(checks.pending) == 20
