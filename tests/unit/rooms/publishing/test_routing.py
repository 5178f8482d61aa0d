"""The plan of a room against the plainest statement of who gets what; request and schema rules beside it."""

import contextlib
import json
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rooms.db.publish.routing import (
    GrantRecord,
    InterestRecord,
    PublishGrantRecord,
    RoutingRecord,
    SubscriptionRecord,
    VersionRecord,
)
from rooms.domain.ids import IdGenerator, KeyId, OrganisationId, RoomId, SubscriptionId
from rooms.domain.principal import Principal
from rooms.domain.room import destination_name
from rooms.domain.state_machine import Scope, SubscriptionType
from rooms.errors import (
    FieldProblem,
    ForbiddenError,
    InvalidError,
    MalformedError,
    NotFoundError,
    SuspendedError,
)
from rooms.publishing import prepare, routing
from rooms.publishing.cel_filter import FilterInput, MessageFilter, SandboxedFilter
from rooms.publishing.event_route import EventRoute
from rooms.publishing.json_schema import PayloadSchema
from rooms.publishing.prepare import Preparer
from rooms.publishing.request import (
    MAX_PROBLEMS,
    MessageRequest,
    check_idempotency_key,
    decode_batch,
    decode_message,
)
from rooms.publishing.routing import PublishAccess, RoutingTable, UnroutableError
from tests.support.publisher import make_id

ROOM = RoomId(77)
OURS = OrganisationId("ours")
NAMES = ("a", "b", "c")
VERSIONS = (1, 2, 3)

interests = st.builds(
    InterestRecord,
    name=st.sampled_from(NAMES),
    versions=st.none() | st.frozensets(st.sampled_from(VERSIONS), max_size=3),
)
subscriptions = st.builds(
    SubscriptionRecord,
    id=st.builds(lambda: SubscriptionId(make_id(ROOM))),
    organisation_id=st.just(OURS),
    type=st.sampled_from(SubscriptionType),
    version=st.integers(1, 5),
    event_types=st.none() | st.lists(interests, max_size=3).map(tuple),
)
versions = st.lists(
    st.builds(
        VersionRecord,
        name=st.sampled_from(NAMES),
        version=st.sampled_from(VERSIONS),
        schema=st.none(),
    ),
    unique_by=lambda record: (record.name, record.version),
)


def a_plan(**changes: object) -> RoutingRecord:
    record = RoutingRecord(
        room_id=ROOM,
        organisation_id=OURS,
        plan_version=1,
        expiration_ms=None,
        subscriptions=(),
        versions=(),
    )
    return msgspec.structs.replace(record, **changes)


def a_version(name: str) -> VersionRecord:
    return VersionRecord(name=name, version=1, schema=None)


def subscribed_by(organisation: str) -> SubscriptionRecord:
    return SubscriptionRecord(
        id=SubscriptionId(make_id(ROOM)),
        organisation_id=OrganisationId(organisation),
        type=SubscriptionType.PULL,
        version=1,
        event_types=None,
    )


def advice(known: list[str], name: str, access: PublishAccess | None = None) -> str:
    plan = RoutingTable(a_plan(versions=tuple(map(a_version, known))))
    return plan.event_type_advice(name, access)


def test_an_unknown_event_type_is_answered_with_the_nearest_and_where_they_are_listed() -> None:
    listed = f"; GET /v1/rooms/{ROOM}/event-types lists them"
    assert advice(["order.paid", "order.created"], "order.creatd") == (
        f"; is order.created meant?{listed}"
    )
    assert advice(["order.created"], "shipment") == listed
    assert advice([], "order.created") == listed
    # The search takes its time on the event loop.
    assert advice([f"order.{number}" for number in range(51)], "order.00") == listed


@pytest.mark.parametrize("of", ["grants", "key"])
def test_no_event_type_is_suggested_that_the_publisher_may_not_publish(of: str) -> None:
    wanted = ("order.creatd", "bill.*")
    access = PublishAccess(
        caller("theirs", event_types=wanted if of == "key" else None),
        wanted if of == "grants" else None,
        owns=False,
        transparent=False,
    )
    assert "meant" not in advice(["order.created"], "order.creatd", access)
    assert "; is bill.created meant?" in advice(["bill.created"], "bill.creatd", access)


@given(
    st.lists(subscriptions, max_size=6),
    versions,
    st.sampled_from(NAMES),
    st.none() | st.sampled_from(VERSIONS),
)
def test_a_route_has_the_subscriptions_of_the_type_and_version(
    them: list[SubscriptionRecord], known: list[VersionRecord], name: str, version: int | None
) -> None:
    plan = RoutingTable(a_plan(subscriptions=tuple(them), versions=tuple(known)))
    there = sorted(record.version for record in known if record.name == name)
    if not there or (version is not None and version not in there):
        with pytest.raises(UnroutableError):
            plan.route(name, version)
        return
    meant = there[-1] if version is None else version
    expected = [
        one.id
        for one in them
        if one.event_types is None
        or any(
            want.name == name and (want.versions is None or meant in want.versions)
            for want in one.event_types
        )
    ]
    route = plan.route(name, version)
    assert route.version == meant
    assert [one.id for one in route.recipients] == expected
    assert json.loads(b'{"x":1' + route.answer_tail)["destinations"] == [
        f"room-{ROOM}::subscription-{identity}" for identity in expected
    ]
    assert route.pulls == {
        one.id for one in them if one.id in expected and one.type is SubscriptionType.PULL
    }
    assert route.pushes == any(
        one.id in expected and one.type is SubscriptionType.PUSH for one in them
    )
    assert route.rows.recipient_count == len(expected)


@given(st.lists(subscriptions, max_size=6), st.data())
def test_chosen_destinations_are_a_part_of_the_route_in_its_order(
    them: list[SubscriptionRecord], data: st.DataObject
) -> None:
    plan = RoutingTable(a_plan(subscriptions=tuple(them), versions=(VersionRecord("a", 1, None),)))
    route = plan.route("a", None)
    everything = list(route.by_destination)
    chosen = data.draw(st.lists(st.sampled_from(everything) if everything else st.nothing()))
    part = route.restricted_to([*chosen, "unknown"])
    assert list(part.by_destination) == [text for text in everything if text in chosen]
    assert route.restricted_to(reversed(chosen)) is part


@given(st.none() | st.integers(1, 10**12), st.none() | st.integers(1, 10**12))
def test_a_message_lives_no_longer_than_its_room_allows(room: int | None, ttl: int | None) -> None:
    life = RoutingTable(a_plan(expiration_ms=room)).effective_ttl_ms(ttl)
    limits = [limit for limit in (room, ttl) if limit is not None]
    assert life == (min(limits) if limits else None)


def caller(organisation: str, **restrictions: Any) -> Principal:
    return Principal(
        key_id=KeyId("k"),
        organisation_id=OrganisationId(organisation),
        scopes=frozenset({Scope.PUBLISH}),
        **restrictions,
    )


def granted(
    *event_types: str, to: str | None = "theirs", starts_ms: int = 0, until_ms: int | None = None
) -> PublishGrantRecord:
    return PublishGrantRecord(
        organisation_id=None if to is None else OrganisationId(to),
        event_types=event_types or None,
        starts_ms=starts_ms,
        until_ms=until_ms,
    )


def test_the_owner_may_publish_everything_and_a_stranger_sees_no_room() -> None:
    table = RoutingTable(a_plan(grants=(granted(to="friends"),)))
    assert table.access(caller(OURS), 0) is None
    with pytest.raises(NotFoundError):
        table.access(caller("theirs"), 0)


@pytest.mark.parametrize(
    ("grants", "at_ms", "allowed"),
    [
        ([granted()], 5, {"a", "a.b", "c"}),
        ([granted(to=None)], 5, {"a", "a.b", "c"}),
        ([granted("a")], 5, {"a"}),
        ([granted("a.*"), granted("c", to=None)], 5, {"a.b", "c"}),
        ([granted(starts_ms=6)], 5, None),
        ([granted(until_ms=5)], 5, None),
        ([granted(until_ms=6), granted("a", until_ms=5)], 5, {"a", "a.b", "c"}),
        ([], 5, None),
    ],
)
def test_grants_decide_what_another_organisation_publishes(
    grants: list[PublishGrantRecord], at_ms: int, allowed: set[str] | None
) -> None:
    table = RoutingTable(a_plan(grants=tuple(grants)))
    if allowed is None:
        with pytest.raises(NotFoundError):
            table.access(caller("theirs"), at_ms)
        return
    access = table.access(caller("theirs"), at_ms)
    assert access is not None
    for event_type in ("a", "a.b", "c"):
        if event_type in allowed:
            access.check_event_type(event_type)
        else:
            with pytest.raises(ForbiddenError, match=event_type):
                access.check_event_type(event_type)


@pytest.mark.parametrize(
    ("known", "is_known"),
    [
        ({}, False),
        ({"listed": True}, True),
        ({"subscribe_grants": (GrantRecord(OrganisationId("theirs"), 0, 6),)}, True),
        ({"subscribe_grants": (GrantRecord(None, 0, None),)}, True),
        ({"subscribe_grants": (GrantRecord(OrganisationId("theirs"), 0, 5),)}, False),
        ({"subscribe_grants": (GrantRecord(OrganisationId("theirs"), 6, None),)}, False),
        ({"subscribe_grants": (GrantRecord(OrganisationId("others"), 0, None),)}, False),
        ({"subscriptions": (subscribed_by("theirs"),)}, True),
        ({"subscriptions": (subscribed_by("others"),)}, False),
    ],
)
def test_where_it_may_publish_nothing_an_organisation_learns_of_rooms_that_it_knows(
    known: dict[str, Any], *, is_known: bool
) -> None:
    table = RoutingTable(a_plan(**known))
    with pytest.raises(ForbiddenError if is_known else NotFoundError) as refused:
        table.access(caller("theirs"), 5)
    assert is_known is ("the room's owner did not grant publishing" in str(refused.value))
    with pytest.raises(NotFoundError):
        table.access(caller("theirs", rooms=frozenset({RoomId(1)})), 5)


def test_a_narrow_key_publishes_only_its_rooms_and_event_types() -> None:
    table = RoutingTable(a_plan(grants=(granted(),)))
    for organisation in (OURS, "theirs"):
        with pytest.raises(NotFoundError):
            table.access(caller(organisation, rooms=frozenset({RoomId(1)})), 0)
        access = table.access(caller(organisation, event_types=("a.*",)), 0)
        assert access is not None
        access.check_event_type("a.b")
        with pytest.raises(ForbiddenError, match="this key"):
            access.check_event_type("b")


def test_a_suspended_owner_takes_no_publishes_of_others() -> None:
    table = RoutingTable(a_plan(grants=(granted(),), owner_active=False))
    with pytest.raises(SuspendedError):
        table.access(caller("theirs"), 0)
    with pytest.raises(NotFoundError):
        table.access(caller("strangers"), 0)


def test_an_answer_names_a_hundred_destinations_and_only_those_to_be_seen() -> None:
    record = a_plan(
        subscriptions=tuple(
            SubscriptionRecord(
                id=SubscriptionId(make_id(ROOM)),
                organisation_id=OrganisationId("theirs" if number % 75 == 0 else OURS),
                type=SubscriptionType.PULL,
                version=1,
                event_types=None,
            )
            for number in range(150)
        ),
        versions=(VersionRecord("a", 1, None),),
    )
    route = RoutingTable(record).route("a", 1)
    whole = msgspec.json.decode(b"{" + route.answer_tail[1:])
    assert (len(whole["destinations"]), whole["destination_count"]) == (100, 150)
    own = msgspec.json.decode(b"{" + route.answer_tail_for(OrganisationId("theirs"))[1:])
    assert own["destination_count"] == 150
    assert own["destinations"] == [
        destination_name(ROOM, one.id)
        for one in record.subscriptions
        if one.organisation_id == "theirs"
    ]


def a_filtered_plan(count: int, types: int) -> RoutingRecord:
    """Return a plan of so many subscriptions with filters, all to each of so many event types."""
    return a_plan(
        subscriptions=tuple(
            SubscriptionRecord(
                id=SubscriptionId(make_id(ROOM)),
                organisation_id=OURS,
                type=SubscriptionType.PUSH,
                version=1,
                event_types=None,
                filter="payload == 1",
            )
            for _ in range(count)
        ),
        versions=tuple(VersionRecord(f"t{number}", 1, None) for number in range(types)),
    )


def route_parts(table: RoutingTable, record: RoutingRecord, part: int) -> None:
    """Route a message of each type to all subscriptions but one, to one, and for a publisher."""
    left_out = record.subscriptions[part % len(record.subscriptions)].id
    for version in record.versions:
        table.route(version.name, 1).excluding(frozenset({left_out}))
        table.route(version.name, 1).restricted_to([destination_name(ROOM, left_out)])
        table.route(version.name, 1).answer_tail_for(OrganisationId(f"publisher {part}"))


def test_what_is_built_of_routes_is_bounded_for_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many parts, types and publishers there are; the routes in use stay."""
    monkeypatch.setattr("rooms.publishing.routing.MAX_ROUTE_BYTES", 1_000_000)
    record = a_filtered_plan(50, 20)
    table = RoutingTable(record)
    at_first, largest = table.weight.bytes, 0
    for part in range(50):
        route_parts(table, record, part)
        largest = max(largest, table.weight.bytes)
    assert 500_000 < largest - at_first < 1_100_000
    kept = table.route("t0", 1)
    assert table.route("t0", 1) is kept


def test_the_routes_of_a_room_that_needs_more_than_the_bound_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rooms.publishing.routing.MAX_ROUTE_BYTES", 1)
    record = a_filtered_plan(50, 1)
    table = RoutingTable(record)
    excluded = frozenset({record.subscriptions[0].id})
    part = table.route("t0", 1).excluding(excluded)
    assert table.route("t0", 1).excluding(excluded) is part


def test_the_weight_of_a_table_is_about_the_memory_that_it_takes() -> None:
    record = a_filtered_plan(100, 10)
    table = RoutingTable(record)
    at_first = table.weight.bytes
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for part in range(20):
            route_parts(table, record, part)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.6 < (table.weight.bytes - at_first) / (after - before) < 1.7


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(json_values, st.booleans(), st.sampled_from(["", " ", "\n\t "]))
def test_a_payload_stays_the_bytes_that_came(value: object, ascii_only: bool, space: str) -> None:  # noqa: FBT001 - hypothesis
    try:
        payload = json.dumps(value, ensure_ascii=ascii_only, indent=1 if space else None).encode()
    except UnicodeEncodeError:
        return  # a lone surrogate cannot be sent as UTF-8 at all
    if b"\\ud" in payload.lower():
        return  # escaped pairs and halves have a test of their own
    body = b'{"payload":' + space.encode() + payload + space.encode() + b',"event_type":"x"}'
    assert bytes(decode_message(body).payload) == payload


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"event_type":"x","payload":"\xff"}',
        b'{"event_type":"\xff","payload":1}',
        b'{"event_type":"x","payload":"\\ud800"}',
        b'{"event_type":"x","payload":"\xed\xa0\x80"}',
        b'{"event_type":"x","payload":01}',
        b'{"event_type":"x","payload":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"event_type":"x","payload":1} 2',
        b"\xef\xbb\xbf{}",
    ],
)
def test_what_is_no_json_is_malformed(body: bytes) -> None:
    with pytest.raises(MalformedError):
        decode_message(body)
    with pytest.raises(MalformedError):
        decode_batch(b'{"messages":[' + body + b"]}" if body else b"", 10)


@settings(max_examples=300)
@given(st.binary(max_size=60))
def test_no_bytes_at_all_are_more_than_wrong(body: bytes) -> None:
    for attempt in (body, b'{"event_type":"x","payload":' + body + b"}"):
        try:
            bytes(decode_message(attempt).payload).decode()
        except (MalformedError, InvalidError) as refused:
            assert str(refused)  # noqa: PT017 - both outcomes are right


LONG = "x" * 129


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"event_type": 5}, ["event_type"]),
        ({"event_type": ""}, ["event_type"]),
        ({"zork": 1}, ["zork"]),
        ({"version": 0, "priority": 10, "ttl_ms": 0}, ["version", "priority", "ttl_ms"]),
        ({"priority": 4.5}, ["priority"]),
        ({"priority": True}, ["priority"]),
        ({"version": 2**31}, ["version"]),
        ({"ttl_ms": 10**30}, ["ttl_ms"]),
        ({"correlation_id": "a b"}, ["correlation_id"]),
        ({"correlation_id": "ü"}, ["correlation_id"]),
        ({"correlation_id": "a\n"}, ["correlation_id"]),
        ({"correlation_id": LONG}, ["correlation_id"]),
        ({"ordering_key": LONG}, ["ordering_key"]),
        ({"ordering_key": "a\x00"}, ["ordering_key"]),
        ({"destinations": []}, ["destinations"]),
        ({"destinations": ["a", 1]}, ["destinations[1]"]),
        ({"headers": {"host": "x"}}, ["headers.host"]),
        ({"headers": {"Webhook-Id": "x", "ROOMS-x": "y", "Content-Type": "z"}}, ["headers.Webhook-Id", "headers.ROOMS-x", "headers.Content-Type"]),
        ({"headers": {"authorization": "x", "connection": "y", "transfer-encoding": "z"}}, ["headers.authorization", "headers.connection", "headers.transfer-encoding"]),
        ({"headers": {"X-Road-Client": "x", "x-govstack-client": "y", "X_Forwarded_For": "z"}}, ["headers.X-Road-Client", "headers.x-govstack-client", "headers.X_Forwarded_For"]),
        ({"headers": {"Forwarded": "x", "X-Real-IP": "y", "Via": "z", "webhook_id": "w"}}, ["headers.Forwarded", "headers.X-Real-IP", "headers.Via", "headers.webhook_id"]),
        ({"headers": {"a b": "x"}}, ["headers.a b"]),
        ({"headers": {"": "x"}}, ["headers."]),
        ({"headers": {"x": "a\r\nb"}}, ["headers.x"]),
        ({"headers": {"x": "é"}}, ["headers.x"]),
        ({"headers": {"x": "a" * 1025}}, ["headers.x"]),
        ({"headers": {"x": "1", "X": "2"}}, ["headers.X"]),
        ({"headers": {f"x-{n}": "" for n in range(21)}}, ["headers"]),
        ({"headers": {"x": 1}}, ["headers"]),
        ({"event_type": None, "zork": 1, "headers": {"host": "x"}}, ["event_type", "zork", "headers.host"]),
    ],
)  # fmt: skip
def test_every_wrong_field_is_named(fields: dict[str, object], wrong: list[str]) -> None:
    message = {"event_type": "x", "payload": 1, **fields}
    with pytest.raises(InvalidError) as refused:
        decode_message(json.dumps(message).encode())
    assert sorted(problem.field for problem in refused.value.problems) == sorted(wrong)
    with pytest.raises(InvalidError) as refused:
        decode_batch(
            json.dumps({"messages": [{"event_type": "x", "payload": 1}, message]}).encode(), 10
        )
    assert sorted(problem.field for problem in refused.value.problems) == sorted(
        f"messages[1].{field}" for field in wrong
    )


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        (b"[]", "body"),
        (b"{}", "messages"),
        (b'{"messages":[]}', "messages"),
        (b'{"messages":5}', "messages"),
        (b'{"messages":[5]}', "messages[0]"),
        (b'{"messages":[1,1,1,1]}', "messages"),
        (b'{"messages":[{"event_type":"x","payload":1}],"zork":1}', "zork"),
    ],
)
def test_a_batch_names_what_is_wrong_with_it(body: bytes, wrong: str) -> None:
    with pytest.raises(InvalidError) as refused:
        decode_batch(body, 3)
    assert [problem.field for problem in refused.value.problems] == [wrong]


def test_problems_are_bounded() -> None:
    body = json.dumps({"messages": [{"zork": 1}] * 1000}).encode()
    with pytest.raises(InvalidError) as refused:
        decode_batch(body, 1000)
    assert len(refused.value.problems) == 100


def test_what_is_null_is_left_out() -> None:
    optional = (
        "version",
        "destinations",
        "correlation_id",
        "priority",
        "ttl_ms",
        "headers",
        "ordering_key",
    )
    message = decode_message(
        json.dumps({"event_type": "x", "payload": None, **dict.fromkeys(optional)}).encode()
    )
    assert bytes(message.payload) == b"null"
    assert all(getattr(message, name) is None for name in optional)


@pytest.mark.parametrize("key", ["", "a b", "a\n", "ü", "x" * 256, "\x00"])
def test_what_is_no_idempotency_key_is_refused(key: str) -> None:
    with pytest.raises(InvalidError):
        check_idempotency_key(key)


@pytest.mark.parametrize("draft", [{}, {"$schema": "http://json-schema.org/draft-07/schema#"}])
def test_a_schema_names_the_place_that_does_not_fit(draft: dict[str, str]) -> None:
    schema = PayloadSchema({
        **draft,
        "type": "object",
        "properties": {"amount": {"type": "number"}, "items": {"items": {"type": "string"}}, "odd name": {"const": 1}},
        "required": ["amount"],
    })  # fmt: skip

    def places(raw: bytes) -> list[str]:
        found = schema.problems(raw, "messages[3].payload")
        assert found is not None
        return [problem.field for problem in found]

    assert places(b'{"amount":1,"items":["a"]}') == []
    assert places(b'{"amount":"1","items":[1],"odd name":2}') == [
        "messages[3].payload.amount", "messages[3].payload.items[0]", 'messages[3].payload["odd name"]',
    ]  # fmt: skip
    assert places(b"{}") == ["messages[3].payload"]
    assert places(b'{"amount":1e999}') == ["messages[3].payload"]


@pytest.mark.parametrize(
    "schema",
    [
        5,
        "{}",
        {"type": "zork"},
        {"pattern": "("},
        {"$schema": "http://json-schema.org/draft-04/schema#"},
        {"$ref": "http://127.0.0.1:1/schema.json"},
        {"$ref": "file:///etc/passwd"},
        {"$ref": "#/nowhere"},
    ],
)
def test_what_is_no_schema_or_refers_outside_is_refused(schema: object) -> None:
    with pytest.raises(InvalidError):
        PayloadSchema(schema, compiled=True)


def test_a_pattern_cannot_spend_our_time() -> None:
    schema = PayloadSchema({"pattern": "^(?=(a+)+$)b"}, compiled=True)
    assert schema.problems(b'"' + b"a" * 5000 + b'!"', "payload")


def test_filters_are_compiled_once_a_subscription_version() -> None:
    identity = SubscriptionId(make_id(ROOM))

    def at(plan_version: int, version: int) -> RoutingRecord:
        one = SubscriptionRecord(
            id=identity,
            organisation_id=OURS,
            type=SubscriptionType.PULL,
            version=version,
            event_types=None,
            filter="payload == 1",
        )
        known = VersionRecord(name="a", version=1, schema=None)
        return a_plan(plan_version=plan_version, subscriptions=(one,), versions=(known,))

    def passing(plan: RoutingTable) -> EventRoute:
        subject = FilterInput(
            payload=b"2", headers={}, event_type="a", event_version=1, ordering_key=None, priority=4
        )
        return plan.apply_filters(plan.route("a", None), subject)

    first = RoutingTable(at(1, 1))
    assert passing(first).recipients == ()
    assert passing(first) is passing(first)
    second = RoutingTable(at(2, 1), compiled=first.filters)
    third = RoutingTable(at(3, 2), compiled=first.filters)
    assert second.filters == first.filters
    assert passing(third).recipients == ()
    assert third.filters.keys().isdisjoint(first.filters)


def test_compiled_filters_are_counted_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave to the sandbox what does not fit, until there is room for it; it counts nothing."""
    record = a_filtered_plan(4, 1)
    length = len(record.subscriptions[0].filter or "")
    monkeypatch.setattr(routing, "MAX_COMPILED_CHARACTERS", 3 * length)
    table = RoutingTable(record)
    at_first, growth = table.weight.bytes, list[int]()
    table.weight.on_growth = growth.append
    route = table.route("t0", None)
    of_routes = table.weight.route_bytes
    assert table.prepare_filters(route, 1, 10**9)
    kinds = [type(one) for one in table.filters.values()]
    assert kinds == [MessageFilter] * 3 + [SandboxedFilter]
    assert table.weight.bytes - at_first == of_routes + 3 * length * routing.FILTER_BYTES
    assert sum(growth) == table.weight.bytes - at_first
    assert table.weight.route_bytes == of_routes
    fewer = msgspec.structs.replace(record, subscriptions=record.subscriptions[1:])
    after = RoutingTable(fewer, compiled=table.filters)
    kept = 2 * length * routing.FILTER_BYTES
    assert after.weight.bytes == RoutingTable(fewer).weight.bytes + kept
    assert after.prepare_filters(after.route("t0", None), 1, 10**9)
    assert {type(one) for one in after.filters.values()} == {MessageFilter}


def test_filters_of_a_route_are_prepared_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To bound what a filter costs for a size takes up to a millisecond, too."""
    sizes: list[int] = []

    def note(_: MessageFilter, size: int) -> float:
        sizes.append(size)
        return 1.0

    monkeypatch.setattr(MessageFilter, "cost_ns", note)
    table = RoutingTable(a_filtered_plan(3, 1))
    route = table.route("t0", None)
    for size in (100, 5000):
        prepared = [table.prepare_filters(route, size, 0) for _ in range(4)]
        assert prepared == [False, False, True, True]
    assert table.prepare_filters(route, 101, 0), "of about the same size"
    assert sizes == [100] * 3 + [5000] * 3
    assert len(table.filters) == 3


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (
            {
                "$defs": {
                    f"a{number}": {
                        "$anchor": f"a{number}",
                        "allOf": [{"$ref": f"#a{number + 1}"}] * 2,
                    }
                    for number in range(22)
                }
                | {"a22": {"$anchor": "a22"}},
                "$ref": "#a0",
            },
            "unfolds to more than",
        ),
        ({"$ref": "https://example.com/other"}, "to nothing in the schema"),
    ],
)
def test_a_stored_schema_beyond_a_bound_is_named_at_publish(schema: Any, why: str) -> None:
    plan = RoutingTable(a_plan(versions=(VersionRecord("a", 1, json.dumps(schema)),)))
    with pytest.raises(InvalidError, match="its schema cannot be used: .*" + why):
        plan.schema("a", 1)


@pytest.mark.parametrize("count", [1, 3])
def test_no_more_unknown_destinations_are_named_than_an_answer_has(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Otherwise those of one request take seconds on the loop, and hundreds of megabytes."""
    made: list[str] = []

    def make_problem(field: str, message: str) -> FieldProblem:
        made.append(field)
        return FieldProblem(field, message)

    monkeypatch.setattr(routing, "FieldProblem", make_problem)
    table = RoutingTable(a_plan(versions=(a_version("a"),)))
    unknown = [f"none{number}" for number in range(80 if count > 1 else 40_000)]
    with pytest.raises(InvalidError) as refused:
        for _ in Preparer(IdGenerator(lambda _: 0), max_payload_bytes=1000).prepare_in_slices(
            table,
            [
                MessageRequest(event_type="a", payload=msgspec.Raw(b"1"), destinations=unknown)
                for _ in range(count)
            ],
            batch=count > 1,
            publisher=b"",
            now_ms=1,
            access=None,
            application=None,
            answered={},
            refused={},
        ):
            pass
    assert len(made) == len(refused.value.problems) == MAX_PROBLEMS


@pytest.mark.parametrize("schema", ['{"type": "object"}', '{"$ref": "#none"}'])
def test_a_batch_lets_others_go_on_after_each_schema_that_it_builds(
    schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Build those of ten event types, valid or not: each may take tens of milliseconds."""
    monkeypatch.setattr(prepare, "SLICE_NS", 10**12)
    names = [f"type{number}" for number in range(10)]
    table = RoutingTable(a_plan(versions=tuple(VersionRecord(name, 1, schema) for name in names)))

    def count_slices() -> int:
        slices = Preparer(IdGenerator(lambda _: 0), max_payload_bytes=1000).prepare_in_slices(
            table,
            [MessageRequest(event_type=name, payload=msgspec.Raw(b"{}")) for name in names],
            batch=True,
            publisher=b"",
            now_ms=1,
            access=None,
            application=None,
            answered={},
            refused={},
        )
        count = 0
        with contextlib.suppress(InvalidError):
            for _ in slices:
                count += 1
        return count

    assert [count_slices(), count_slices()] == [10, 0]
