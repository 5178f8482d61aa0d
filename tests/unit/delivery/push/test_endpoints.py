"""Test the header lines of a webhook."""

import asyncio
import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, cast
from urllib.parse import unquote

import pytest
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from delivery.push.endpoints import (
    Endpoint,
    EndpointCache,
    InvalidEndpoint,
)
from delivery.push.http.signing import new_secret
from rooms.db.connection import PersistentConnection
from rooms.db.encrypted_headers import encrypt_headers
from rooms.db.queue.endpoints import EndpointRecord
from rooms.db.secrets import Cipher
from rooms.domain.delivery_properties import DeliveryProperties
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import DeliveryId, MessageId, OrganisationId, RoomId, SubscriptionId
from rooms.domain.retry_policy import RetryPolicy
from rooms.domain.state_machine import SubscriptionStatus, SubscriptionType
from rooms.domain.throttle import ThrottlePolicy

SEAL = Cipher(bytes(32))
SECRET = new_secret(lambda count: bytes(range(count)))
OLD_SECRET = new_secret(lambda count: bytes(range(100, 100 + count)))
PAYLOAD = '{"name": "Zoë", "n": 1.0}'.encode()


def sealed(*secrets: str) -> tuple[bytes, ...]:
    return tuple(SEAL.encrypt(secret.encode()) for secret in secrets)


RECORD = EndpointRecord(
    room_id=RoomId(7),
    subscription_id=SubscriptionId("01900000-0000-7000-8000-000000000007"),
    organisation_id=OrganisationId("01900000-0000-7000-8000-000000000001"),
    room_owner_id=OrganisationId("01900000-0000-7000-8000-000000000002"),
    push_url="https://Example.test:8443/hook?a=1",
    headers={"X-Tenant": "blue", "Authorization": "Bearer abc"},
    throttle=ThrottlePolicy(timeout_ms=2500),
    cloud_events=False,
    event_item=False,
    status=SubscriptionStatus.ACTIVE,
    status_since=datetime(2026, 1, 1, tzinfo=UTC),
    updated_at=datetime(2026, 1, 1, tzinfo=UTC),
    version=3,
    encrypted_secrets=sealed(SECRET),
    policy=RetryPolicy(delay_ms=1, multiplier=2.0, attempts=3),
)
TASK = DeliveryTask(
    room_id=RoomId(7),
    delivery_id=DeliveryId("01900000-0000-7000-8000-100000000007"),
    message_id=MessageId("01900000-0000-7000-8000-200000000007"),
    subscription_id=RECORD.subscription_id,
    kind=SubscriptionType.PUSH,
    generation=0,
    attempt=0,
    delay_ms=0,
    priority=4,
    event_type="order.created",
    event_version=3,
    correlation_id="corr-1",
    published_ms=1_750_000_000_123,
    expires_ms=None,
    subscription_version=3,
    deadline=0.0,
    headers=None,
    payload=PAYLOAD,
)
NOW_S = 1_800_000_000


def epoch_s() -> int:
    """Return the current time: the public library takes no clock, and refuses old signatures."""
    return int(datetime.now(UTC).timestamp())


def lines(endpoint: Endpoint, copy: DeliveryTask, now_s: int = NOW_S) -> list[tuple[str, str]]:
    text = endpoint.headers(copy, copy.payload, now_s).decode("latin-1")
    assert text.endswith("\r\n")
    assert "\r\n\r\n" not in text
    return [
        (name, value)
        for name, value in (line.split(": ", 1) for line in text.removesuffix("\r\n").split("\r\n"))
    ]


def headers(endpoint: Endpoint, copy: DeliveryTask, now_s: int = NOW_S) -> dict[str, str]:
    found = lines(endpoint, copy, now_s)
    assert len({name.lower() for name, _ in found}) == len(found), "a header is there twice"
    return dict(found)


def test_url_host_and_organisation_come_from_the_record() -> None:
    endpoint = Endpoint(RECORD, SEAL)
    assert (endpoint.url.scheme, endpoint.host, endpoint.url.port) == (
        "https",
        "example.test",
        8443,
    )
    assert endpoint.url.path == "/hook?a=1"
    assert endpoint.timeout_s == 2.5
    assert endpoint.is_active
    assert not Endpoint(replace(RECORD, status=SubscriptionStatus.PAUSED), SEAL).is_active


def test_the_headers_of_a_first_attempt() -> None:
    found = headers(Endpoint(RECORD, SEAL), TASK)
    assert found["webhook-id"] == TASK.delivery_id
    assert found["webhook-timestamp"] == str(NOW_S)
    assert found["Rooms-Delivery-Attempt"] == "0"
    assert found["Rooms-Delivery-Delay"] == "0"
    assert found["Rooms-Correlation-Id"] == "corr-1"
    assert found["Rooms-Message-Id"] == TASK.message_id
    assert found["Rooms-Event-Type"] == "order.created"
    assert found["Rooms-Event-Version"] == "3"
    assert found["Content-Type"] == "application/json"
    assert found["X-Tenant"] == "blue"
    assert found["Authorization"] == "Bearer abc"
    assert {"host", "content-length", "connection"}.isdisjoint(name.lower() for name in found)


IDENTITY_HEADERS = {
    "Rooms-Publisher",
    "Rooms-Ordering-Key",
    "Rooms-Sequence",
    "Rooms-Business-Key",
    "Rooms-Priority",
    "Rooms-Expires-At",
    "Rooms-Replayed",
}


def identity_headers(copy: DeliveryTask) -> dict[str, str]:
    found = headers(Endpoint(RECORD, SEAL), copy)
    return {name: value for name, value in found.items() if name in IDENTITY_HEADERS}


def test_a_plain_message_names_only_its_publisher() -> None:
    assert identity_headers(TASK) == {"Rooms-Publisher": RECORD.room_owner_id}


def test_a_message_has_headers_for_what_it_has() -> None:
    other = OrganisationId("01900000-0000-7000-8000-000000000009")
    identity = DeliveryProperties("key 7", 12, "order/9", other, "billing", True, 1_750_000_000_123)
    assert identity_headers(replace(TASK, priority=9, properties=identity)) == {
        "Rooms-Publisher": f"{other}/billing",
        "Rooms-Ordering-Key": "key%207",
        "Rooms-Sequence": "12",
        "Rooms-Business-Key": "order/9",
        "Rooms-Priority": "9",
        "Rooms-Expires-At": "2025-06-15T15:06:40.123Z",
    }
    replayed = replace(TASK, message_id=MessageId("01900000-0000-7001-8000-200000000007"))
    assert identity_headers(replayed) == {
        "Rooms-Publisher": RECORD.room_owner_id,
        "Rooms-Replayed": "true",
    }
    unknown = DeliveryProperties(has_publisher=False)
    assert identity_headers(replace(TASK, properties=unknown)) == {}


@pytest.mark.parametrize("own", ["a\r\nX-Evil: 1\r\n", "\r\n\r\n{}", "é" * 128, " ", "\u2028"])
def test_no_key_can_add_a_header(own: str) -> None:
    identity = DeliveryProperties(ordering_key=own, business_key=own)
    found = identity_headers(replace(TASK, properties=identity))
    assert unquote(found["Rooms-Ordering-Key"]) == unquote(found["Rooms-Business-Key"]) == own


def test_sealed_headers_are_sent_and_those_of_another_key_hold_the_deliveries() -> None:
    columns = encrypt_headers(SEAL, RECORD.subscription_id, {"Authorization": "Bearer sealed"})
    record = replace(RECORD, headers={}, sealed_headers=columns["sealed_headers"])
    found = headers(Endpoint(record, SEAL), TASK)
    assert found["Authorization"] == "Bearer sealed"
    assert "X-Tenant" not in found
    other = Cipher(b"x" * 32)
    secret = (other.encrypt(SECRET.encode()),)
    with pytest.raises(ValueError, match="its headers were encrypted with another key"):
        Endpoint(replace(record, encrypted_secrets=secret), other)
    elsewhere = replace(record, subscription_id=SubscriptionId(TASK.message_id))
    with pytest.raises(ValueError, match="its headers"):
        Endpoint(elsewhere, SEAL)


class OneRecord:
    """Stand for a connection whose only subscription is `record`."""

    def __init__(self, record: EndpointRecord) -> None:
        self.record = record

    async def run(self, _: object) -> dict[SubscriptionId, EndpointRecord]:
        return {self.record.subscription_id: self.record}


async def test_a_key_that_is_put_back_serves_the_subscription_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    keys: list[bytes] = []
    cipher = Cipher(b"x" * 32, changed_keys=lambda: keys or None)
    reasons: list[str | None] = []

    def set_status_reason(record: EndpointRecord, reason: str | None) -> None:
        reasons.append(reason)
        connection.record = replace(record, status_reason=reason)

    connection = OneRecord(RECORD)
    cache = EndpointCache(
        cast("PersistentConnection", cast("Any", connection)),
        cipher,
        set_status_reason=set_status_reason,
    )
    identity = RECORD.subscription_id
    for now in (100.0, 200.0):
        assert isinstance((await cache.current([identity], now))[identity], InvalidEndpoint)
    assert len(caplog.records) == len(reasons) == 1, "said once"
    keys += [b"x" * 32, bytes(32)]
    for now in (300.0, 400.0):
        assert isinstance((await cache.current([identity], now))[identity], Endpoint)
    assert reasons[1:] == [None]


async def test_many_endpoints_are_built_in_portions() -> None:
    """Check that others go on in between, and that each endpoint is found."""
    asked: list[int] = []
    turns: list[int] = []
    turn = 0

    class Records:
        async def run(self, _load: object) -> dict[SubscriptionId, EndpointRecord]:
            turns.append(turn)
            portion = wanted[sum(asked) : sum(asked) + 200]
            asked.append(len(portion))
            return {one: replace(RECORD, subscription_id=one) for one in portion}

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    wanted = [SubscriptionId(f"01900000-0000-7000-8000-{number:012x}") for number in range(500)]
    cache = EndpointCache(
        cast("PersistentConnection", cast("Any", Records())),
        SEAL,
        set_status_reason=lambda _record, _reason: None,
    )
    counting = asyncio.create_task(count_turns())
    found = await cache.current(wanted, 100.0)
    counting.cancel()
    assert asked == [200, 200, 100]
    assert turns[0] < turns[1] < turns[2]
    assert all(isinstance(found[one], Endpoint) for one in wanted)


def test_a_later_attempt_is_the_same_webhook() -> None:
    endpoint = Endpoint(RECORD, SEAL)
    first = headers(endpoint, TASK)
    again = headers(endpoint, replace(TASK, attempt=3, delay_ms=8000, generation=2), NOW_S + 60)
    assert (again["Rooms-Delivery-Attempt"], again["Rooms-Delivery-Delay"]) == ("3", "8000")
    changed = {
        "Rooms-Delivery-Attempt",
        "Rooms-Delivery-Delay",
        "webhook-timestamp",
        "webhook-signature",
    }
    assert {name for name in first if first[name] != again[name]} == changed


def test_the_public_library_verifies_the_signature() -> None:
    found = headers(Endpoint(RECORD, SEAL), TASK, epoch_s())
    assert Webhook(SECRET).verify(PAYLOAD, found) == json.loads(PAYLOAD)
    with pytest.raises(WebhookVerificationError):
        Webhook(SECRET).verify(PAYLOAD.replace(b"1.0", b"1"), found)
    with pytest.raises(WebhookVerificationError):
        Webhook(OLD_SECRET).verify(PAYLOAD, found)


def test_during_a_rotation_both_secrets_verify_it() -> None:
    found = headers(
        Endpoint(replace(RECORD, encrypted_secrets=sealed(SECRET, OLD_SECRET)), SEAL),
        TASK,
        epoch_s(),
    )
    assert len(found["webhook-signature"].split(" ")) == 2
    for secret in (SECRET, OLD_SECRET):
        assert Webhook(secret).verify(PAYLOAD, found) == json.loads(PAYLOAD)


def test_cloud_events_in_binary_mode() -> None:
    found = headers(Endpoint(replace(RECORD, cloud_events=True), SEAL), TASK)
    assert found["ce-specversion"] == "1.0"
    assert found["ce-id"] == TASK.message_id
    assert found["ce-source"] == "/rooms/7"
    assert found["ce-type"] == "order.created"
    assert found["ce-time"] == "2025-06-15T15:06:40.123Z"
    assert found["Content-Type"] == "application/json"
    assert not [name for name in headers(Endpoint(RECORD, SEAL), TASK) if name.startswith("ce-")]


def test_the_publishers_headers_are_sent() -> None:
    copy = replace(TASK, headers=json.dumps({"X-Trace": "abc", "X-Other": "d e"}).encode())
    found = headers(Endpoint(RECORD, SEAL), copy)
    assert (found["X-Trace"], found["X-Other"]) == ("abc", "d e")


@pytest.mark.parametrize("name", ["X-Tenant", "x-tenant", "X_TENANT"])
def test_a_publisher_does_not_change_the_subscribers_headers(name: str) -> None:
    """Which of two lines a receiver believes is its choice: there is one, the subscriber's."""
    copy = replace(TASK, headers=json.dumps({name: "red", "X-Trace": "abc"}).encode())
    for sent in (copy, replace(copy, properties=DeliveryProperties(has_publisher=False))):
        found = lines(Endpoint(RECORD, SEAL), sent)
        assert [value for key, value in found if key.lower().replace("_", "-") == "x-tenant"] == [
            "blue"
        ]
        assert dict(found)["X-Trace"] == "abc"


@pytest.mark.parametrize(
    "name",
    ["X-Road-Client", "X-GovStack-Client", "X-Forwarded-For", "Forwarded", "rooms_publisher"],
)
def test_what_an_earlier_version_accepted_says_not_who_calls(name: str) -> None:
    own = {name: "EE/GOV/1", "Rooms-Publisher-Signature": "a.b.c"}
    found = headers(Endpoint(RECORD, SEAL), replace(TASK, headers=json.dumps(own).encode()))
    assert name not in found
    assert found["Rooms-Publisher-Signature"] == "a.b.c"


@pytest.mark.parametrize(
    "changed",
    [
        {"push_url": "gopher://example.test/"},
        {"push_url": "not a url"},
        {"encrypted_secrets": ()},
        {"encrypted_secrets": (b"sealed under another key",)},
        {"encrypted_secrets": sealed("no secret")},
    ],
)
def test_invalid_settings_are_refused(changed: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        Endpoint(replace(RECORD, **changed), SEAL)  # type: ignore[arg-type]


@pytest.mark.parametrize("own", [b"no json", b'{"X-Snowman": "\xe2\x98\x83"}'])
def test_headers_that_cannot_be_written_are_a_value_error(own: bytes) -> None:
    with pytest.raises(ValueError):
        Endpoint(RECORD, SEAL).headers(replace(TASK, headers=own), PAYLOAD, NOW_S)
