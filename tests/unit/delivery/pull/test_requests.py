"""Test ack ids and the JSON of responses."""

import json
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delivery.pull.requests import (
    ACK_ID_LENGTH,
    NackRequest,
    SelectorRequest,
    ack_id,
    decode_client_frame,
    parse_ack_id,
    parse_frame_leases,
)
from delivery.pull.responses import messages_json, results_json
from rooms.errors import InvalidError
from rooms.publishing.request import decode_message

GENERATIONS = st.integers(0, 2**31 - 1)


@given(delivery=st.binary(min_size=16, max_size=16), generation=GENERATIONS)
def test_an_ack_id_stands_for_one_lease(delivery: bytes, generation: int) -> None:
    packed = generation.to_bytes(4, "big")
    text = ack_id(delivery, packed).decode("ascii")
    assert len(text) == ACK_ID_LENGTH
    assert set(text) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")
    assert parse_ack_id(text) == (delivery, packed)


@given(
    text=st.text(max_size=40)
    | st.text(alphabet="AQaz09-_+/=", min_size=ACK_ID_LENGTH, max_size=ACK_ID_LENGTH)
)
def test_other_text_is_no_ack_id_or_the_only_one_of_its_lease(text: str) -> None:
    try:
        lease = parse_ack_id(text)
    except ValueError:
        return
    assert ack_id(*lease).decode() == text


@pytest.mark.parametrize("change", [lambda text: text[:-1], lambda text: text + "A", lambda text: "B" + text[1:],
                                    lambda text: text[:-1] + "=", lambda text: text[:-2] + "==",
                                    lambda text: text[:-1] + "/", lambda text: text[:-1] + "é"])  # fmt: skip
def test_a_changed_ack_id_is_refused(change: object) -> None:
    assert callable(change)
    with pytest.raises(ValueError):
        parse_ack_id(change(ack_id(bytes(range(16)), bytes(4)).decode()))


@given(
    correlation_id=st.text(min_size=1, max_size=20),
    published_us=st.integers(0, 4_000_000_000_000_000),
    attempt=GENERATIONS,
    headers=st.none() | st.dictionaries(st.text(max_size=5), st.text(max_size=5), min_size=1),
    payload=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner, max_size=3),
        max_leaves=5,
    ),
)
def test_a_message_is_valid_json_with_its_payload_byte_for_byte(
    correlation_id: str,
    published_us: int,
    attempt: int,
    headers: dict[str, str] | None,
    payload: object,
) -> None:
    raw = json.dumps(payload, indent=1).encode()
    row = (
        bytes(16), bytes(4), attempt.to_bytes(4, "big"), b"0190", b"0190", b"order.created",
        (3).to_bytes(4, "big"), correlation_id.encode(), published_us.to_bytes(8, "big"),
        (4).to_bytes(4, "big"), (250).to_bytes(8, "big"), bytes(8), None, None, None,
        None if headers is None else json.dumps(headers).encode(), raw,
    )  # fmt: skip
    answer = messages_json([row, row])
    assert answer.count(b'"payload":' + raw) >= 2
    for message in json.loads(answer)["messages"]:
        at = datetime.fromisoformat(message.pop("published_at"))
        assert (at - datetime(2000, 1, 1, tzinfo=UTC)).total_seconds() == pytest.approx(
            published_us / 1e6
        )
        assert message.pop("headers", None) == headers
        assert message == {
            "ack_id": ack_id(bytes(16), bytes(4)).decode(),
            "delivery_id": "0190",
            "message_id": "0190",
            "attempt": attempt,
            "event_type": "order.created",
            "version": 3,
            "correlation_id": correlation_id,
            "priority": 4,
            "delay_ms": 250,
            "lease_until": "2000-01-01T00:00:00Z",
            "payload": payload,
        }


def test_a_message_has_what_it_has_and_nothing_else() -> None:
    delivery, message = (
        b"01890a5d-ac96-774b-bcce-b30200000007",
        b"01890a5d-ac96-774b-9cce-b30200000007",
    )
    keys = b'{"ordering_key" : "a\\"b", "sequence" : 3}'
    row = (
        bytes(16), bytes(4), bytes(4), delivery, message, b"order.created", (3).to_bytes(4, "big"), message, bytes(8),
        (9).to_bytes(4, "big"), bytes(8), (1_500_000).to_bytes(8, "big"), (2_000_000).to_bytes(8, "big"),
        b"01890a5d-ac96-774b-bcce-000000000009/billing", keys, None, b"{}",
    )  # fmt: skip
    (found,) = json.loads(messages_json([row]))["messages"]
    assert {name: value for name, value in found.items() if name in IDENTITY_FIELDS} == {
        "priority": 9,
        "delay_ms": 0,
        "lease_until": "2000-01-01T00:00:01.500000Z",
        "expires_at": "2000-01-01T00:00:02Z",
        "publisher": {
            "organisation_id": "01890a5d-ac96-774b-bcce-000000000009",
            "application": "billing",
        },
        "ordering_key": 'a"b',
        "sequence": 3,
        "replayed": True,
    }


IDENTITY_FIELDS = {
    "priority", "delay_ms", "lease_until", "expires_at", "publisher", "ordering_key", "sequence", "business_key", "replayed",
}  # fmt: skip


def test_results_keep_the_order_of_the_request() -> None:
    response = json.loads(results_json([("b", "acked"), ("a", "late"), ("b", "acked")]))
    assert [(result["ack_id"], result["status"]) for result in response["results"]] == [
        ("b", "acked"), ("a", "late"), ("b", "acked"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "value", [b"1e999", b"-1e999", b"9" * 5000, b"[" * 800 + b"]" * 800, b"1e308", b"9" * 25]
)
def test_a_payload_that_no_selector_can_read_does_not_match(value: bytes) -> None:
    payload = b'{"a":%b}' % value
    decode_message(b'{"event_type":"e","payload":%b}' % payload)
    selector = SelectorRequest(payload={"a": "1"}).selector()
    assert selector is not None
    assert not selector.matches("e", None, payload)


ACK_ID = ack_id(bytes(16), bytes(4)).decode()


@pytest.mark.parametrize(
    ("frame", "field"),
    [
        ({"nack": [ACK_ID], "delay_ms": 99999999999999999999999}, "delay_ms"),
        ({"nack": [ACK_ID], "delay_ms": -1}, "delay_ms"),
        ({"extend": [ACK_ID]}, "lease_ms"),
        ({"extend": [ACK_ID], "lease_ms": "1"}, "lease_ms"),
        ({"ack": [ACK_ID], "delay_ms": 1}, "delay_ms"),
        ({"ack": []}, "ack"),
        ({"nack": [ACK_ID, 1]}, "nack[1]"),
        ({"ack": [ACK_ID], "ack_ids": [ACK_ID]}, "ack_ids"),
        ({"credit": 0}, "credit"),
        ({"credit": 1, "ack": [ACK_ID]}, "frame"),
    ],
)
def test_a_problem_of_a_frame_names_the_client_s_field(frame: object, field: str) -> None:
    with pytest.raises(InvalidError) as raised:
        decode_client_frame(json.dumps(frame))
    assert [problem.field for problem in raised.value.problems] == [field]


def test_a_problem_of_an_ack_id_names_the_frame_s_field() -> None:
    frame = decode_client_frame(json.dumps({"nack": [ACK_ID, "x"]}))
    assert isinstance(frame, NackRequest)
    with pytest.raises(InvalidError) as raised:
        parse_frame_leases(frame)
    assert [problem.field for problem in raised.value.problems] == ["nack[1]"]
