"""The plan of a room against the plainest statement of who gets what; request and schema rules beside it."""

import asyncio
import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rooms.domain.ids import OrganisationId, RoomId, SubscriptionId
from rooms.domain.states import SubscriptionType
from rooms.errors import InvalidError, MalformedError, NotFoundError
from rooms.publishing.filter import Subject
from rooms.publishing.plan import RoomPlan, Route, UnroutableError
from rooms.publishing.planner import Planner
from rooms.publishing.request import check_key, read_batch, read_one
from rooms.publishing.schemas import PayloadSchema
from rooms.storage.plans import InterestRecord, PlanRecord, SubscriptionRecord, VersionRecord
from tests.publishing import make_id

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
    type=st.sampled_from(SubscriptionType),
    version=st.integers(1, 5),
    event_types=st.none() | st.lists(interests, max_size=3).map(tuple),
)
versions = st.lists(
    st.builds(VersionRecord, name=st.sampled_from(NAMES), version=st.sampled_from(VERSIONS), schema=st.none()),
    unique_by=lambda record: (record.name, record.version),
)


def a_plan(**changes: object) -> PlanRecord:
    record = PlanRecord(
        room_id=ROOM, organisation_id=OURS, plan_version=1, expiration_ms=None, subscriptions=(), versions=()
    )
    return msgspec.structs.replace(record, **changes)


@given(st.lists(subscriptions, max_size=6), versions, st.sampled_from(NAMES), st.none() | st.sampled_from(VERSIONS))
def test_a_route_goes_to_whoever_wants_the_type_and_version(
    them: list[SubscriptionRecord], known: list[VersionRecord], name: str, version: int | None
) -> None:
    plan = RoomPlan(a_plan(subscriptions=tuple(them), versions=tuple(known)))
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
        or any(want.name == name and (want.versions is None or meant in want.versions) for want in one.event_types)
    ]
    route = plan.route(name, version)
    assert route.version == meant
    assert [one.id for one in route.recipients] == expected
    assert json.loads(b'{"x":1' + route.told)["destinations"] == [
        f"room-{ROOM}::subscription-{identity}" for identity in expected
    ]
    assert route.pulls == {one.id for one in them if one.id in expected and one.type is SubscriptionType.PULL}
    assert route.pushes == any(one.id in expected and one.type is SubscriptionType.PUSH for one in them)
    assert route.rows.count == len(expected)


@given(st.lists(subscriptions, max_size=6), st.data())
def test_chosen_destinations_are_a_part_of_the_route_in_its_order(
    them: list[SubscriptionRecord], data: st.DataObject
) -> None:
    plan = RoomPlan(a_plan(subscriptions=tuple(them), versions=(VersionRecord("a", 1, None),)))
    route = plan.route("a", None)
    everything = list(route.by_destination)
    chosen = data.draw(st.lists(st.sampled_from(everything) if everything else st.nothing()))
    part = plan.only(route, "a", chosen)
    assert list(part.by_destination) == [text for text in everything if text in chosen]


@given(st.none() | st.integers(1, 10**12), st.none() | st.integers(1, 10**12))
def test_a_message_lives_no_longer_than_its_room_allows(room: int | None, ttl: int | None) -> None:
    life = RoomPlan(a_plan(expiration_ms=room)).life_ms(ttl)
    limits = [limit for limit in (room, ttl) if limit is not None]
    assert life == (min(limits) if limits else None)


async def test_a_hundred_that_ask_at_once_cause_at_most_two_loads() -> None:
    loads = 0

    async def load(room: RoomId) -> PlanRecord:
        nonlocal loads
        loads += 1
        await asyncio.sleep(0)
        return a_plan()

    planner = Planner(load)
    await asyncio.gather(*[planner.plan(ROOM, OURS) for _ in range(100)])
    assert loads == 1
    await asyncio.gather(*[planner.fresh(ROOM, OURS) for _ in range(100)])
    assert loads <= 3


async def test_a_fresh_plan_was_read_after_it_was_asked_for() -> None:
    """A load that was under way when the room changed is no answer to who asks after the change."""
    version = 1
    reading, go_on = asyncio.Event(), asyncio.Event()

    async def load(room: RoomId) -> PlanRecord:
        record = a_plan(plan_version=version)
        reading.set()
        await go_on.wait()
        return record

    planner = Planner(load)
    early = asyncio.create_task(planner.plan(ROOM, OURS))
    await reading.wait()
    version = 2
    late = asyncio.create_task(planner.fresh(ROOM, OURS))
    await asyncio.sleep(0)
    go_on.set()
    assert (await early).plan_version == 1
    assert (await late).plan_version == 2


async def test_another_organisations_room_is_not_there() -> None:
    async def load(room: RoomId) -> PlanRecord | None:
        return a_plan() if room == ROOM else None

    planner = Planner(load)
    await planner.plan(ROOM, OURS)
    assert planner.known(ROOM, OrganisationId("theirs")) is None
    for room, organisation in ((ROOM, OrganisationId("theirs")), (RoomId(1), OURS)):
        with pytest.raises(NotFoundError):
            await planner.plan(room, organisation)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
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
    assert bytes(read_one(body).payload) == payload


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
        read_one(body)
    with pytest.raises(MalformedError):
        read_batch(b'{"messages":[' + body + b"]}" if body else b"", 10)


@settings(max_examples=300)
@given(st.binary(max_size=60))
def test_no_bytes_at_all_are_more_than_wrong(body: bytes) -> None:
    for attempt in (body, b'{"event_type":"x","payload":' + body + b"}"):
        try:
            bytes(read_one(attempt).payload).decode()
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
        read_one(json.dumps(message).encode())
    assert sorted(problem.field for problem in refused.value.problems) == sorted(wrong)
    with pytest.raises(InvalidError) as refused:
        read_batch(json.dumps({"messages": [{"event_type": "x", "payload": 1}, message]}).encode(), 10)
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
        read_batch(body, 3)
    assert [problem.field for problem in refused.value.problems] == [wrong]


def test_problems_are_bounded() -> None:
    body = json.dumps({"messages": [{"zork": 1}] * 1000}).encode()
    with pytest.raises(InvalidError) as refused:
        read_batch(body, 1000)
    assert len(refused.value.problems) == 100


def test_what_is_null_is_left_out() -> None:
    optional = ("version", "destinations", "correlation_id", "priority", "ttl_ms", "headers", "ordering_key")
    message = read_one(json.dumps({"event_type": "x", "payload": None, **dict.fromkeys(optional)}).encode())
    assert bytes(message.payload) == b"null"
    assert all(getattr(message, name) is None for name in optional)


@pytest.mark.parametrize("key", ["", "a b", "a\n", "ü", "x" * 256, "\x00"])
def test_what_is_no_idempotency_key_is_refused(key: str) -> None:
    with pytest.raises(InvalidError):
        check_key(key)


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

    def at(plan_version: int, version: int) -> PlanRecord:
        one = SubscriptionRecord(
            id=identity, type=SubscriptionType.PULL, version=version, event_types=None, filter="payload == 1"
        )
        known = VersionRecord(name="a", version=1, schema=None)
        return a_plan(plan_version=plan_version, subscriptions=(one,), versions=(known,))

    def passing(plan: RoomPlan) -> Route:
        subject = Subject(payload=b"2", headers={}, event_type="a", event_version=1, ordering_key=None, priority=4)
        return plan.sieve(plan.route("a", None), subject)

    first = RoomPlan(at(1, 1))
    assert passing(first).recipients == ()
    assert passing(first) is passing(first)
    second, third = RoomPlan(at(2, 1), before=first), RoomPlan(at(3, 2), before=first)
    assert second.filters == first.filters
    assert passing(third).recipients == ()
    assert third.filters.keys().isdisjoint(first.filters)
