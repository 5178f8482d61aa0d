"""Test STOMP frames: no value breaks one, and no split of the stream changes the result."""

import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delivery.brokers.artemis.consumer import window_bytes
from delivery.brokers.artemis.frames import (
    Frame,
    FrameParser,
    ProtocolError,
    encode,
    escape,
    header,
    unescape,
)
from delivery.brokers.artemis.message_format import (
    MIN_FRAME_BYTES,
    CopyDecoder,
    decode_copy,
    decode_malformed,
    encode_copy,
)
from delivery.brokers.artemis.queue_names import QueueNames, destination_headers
from rooms.domain.delivery_properties import DeliveryProperties
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import DeliveryId, MessageId, OrganisationId, RoomId, SubscriptionId
from rooms.domain.state_machine import SubscriptionType

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
DELIVERY = DeliveryId("01890a5d-ac96-774b-bcce-b30200000007")
MESSAGE = MessageId("01890a5d-ac96-774b-bcce-b30300000007")
SUBSCRIPTION = SubscriptionId("01890a5d-ac96-774b-bcce-b30400000007")
NOW_MS = 1_800_000_000_000
NOW = datetime.fromtimestamp(NOW_MS / 1000, UTC)


def make_copy(
    *, correlation_id: str = "trace", event_type: str = "created", payload: bytes = b"{}"
) -> DeliveryTask:
    return DeliveryTask(
        room_id=RoomId(7),
        delivery_id=DELIVERY,
        message_id=MESSAGE,
        subscription_id=SUBSCRIPTION,
        kind=SubscriptionType.PUSH,
        generation=2,
        attempt=3,
        delay_ms=400,
        priority=7,
        event_type=event_type,
        event_version=3,
        correlation_id=correlation_id,
        published_ms=1_700_000_000_000,
        expires_ms=1_900_000_000_000,
        subscription_version=None,
        deadline=float("inf"),
        headers=b'{"x-one": "1:\\\\2"}',
        payload=payload,
    )


def sent(copy: DeliveryTask, *, due: datetime = NOW, receipt: str | None = None) -> Frame:
    to = destination_headers(QueueNames("farm", "client").queue_for(copy))
    (frame,) = FrameParser().feed(
        encode_copy(copy, destination=to, not_before=due, now_ms=NOW_MS, receipt=receipt)
    )
    return frame


def handed_out(frame: Frame) -> Frame:
    """Return the MESSAGE that the broker makes of a SEND."""
    return Frame(b"MESSAGE", b"\nsubscription:1" + frame.head + b"ack:12,34\n", frame.body)


@given(TEXT)
def test_escaping_is_reversible(value: str) -> None:
    escaped = escape(value)
    assert not set(escaped) & set("\n\r:")
    assert unescape(escaped) == value


def test_values_that_no_frame_can_carry_are_rejected() -> None:
    with pytest.raises(ValueError, match="NUL"):
        escape("a\0b")
    with pytest.raises(ValueError, match="is invalid"):
        unescape("a\\t")


@given(TEXT, TEXT, st.binary())
def test_encoding_a_copy_is_reversible(
    correlation_id: str, event_type: str, payload: bytes
) -> None:
    copy = make_copy(correlation_id=correlation_id, event_type=event_type, payload=payload)
    assert decode_copy(handed_out(sent(copy)), SubscriptionType.PUSH) == (copy, "12,34")


@given(priority=st.integers(0, 9), behind=st.booleans())
def test_a_copy_is_behind_others_by_the_queue_that_it_comes_from(
    *, priority: int, behind: bool
) -> None:
    queues = QueueNames("farm", "client")
    copy = replace(make_copy(), headers=None, priority=priority, behind=behind)
    assert queues.queue_for(copy) == (queues.backlog if behind else queues.push)
    frame = handed_out(sent(copy))
    if behind:
        frame = frame._replace(head=frame.head.replace(b"subscription:1\n", b"subscription:2\n"))
    assert header(frame.head, b"priority") == str(priority).encode()
    decoder = CopyDecoder(SubscriptionType.PUSH)
    assert decoder.decode(frame) == (copy, "12,34")
    assert FrameParser(decoder.decode_fast).feed(on_the_wire([frame])) == [(copy, "12,34")]


def test_a_copy_of_an_older_relay_has_its_own_priority() -> None:
    """It had a lower one in the broker if it came behind others."""
    copy = replace(make_copy(), headers=None)
    decoder = CopyDecoder(SubscriptionType.PUSH)
    decoder.decode(handed_out(sent(copy)))
    frame = handed_out(sent(replace(copy, priority=copy.priority - 1)))
    old = frame._replace(head=frame.head + f"rooms-priority:{copy.priority}\n".encode())
    assert decoder.decode(old) == (copy, "12,34")
    assert FrameParser(decoder.decode_fast).feed(on_the_wire([old])) == [old], "read by no pattern"


OTHER = OrganisationId("01890a5d-ac96-774b-bcce-000000000009")
IDENTITIES = st.builds(
    DeliveryProperties,
    ordering_key=st.none() | TEXT,
    sequence=st.none() | st.integers(0, (1 << 63) - 1),
    business_key=st.none() | TEXT,
    organisation=st.sampled_from([None, OTHER]),
    application=st.sampled_from([None, "billing", "a.b-c_1"]),
)


@given(IDENTITIES)
def test_the_identity_of_a_copy_is_carried(identity: DeliveryProperties) -> None:
    copy = replace(make_copy(), properties=identity)
    found, _ = decode_copy(handed_out(sent(copy)), SubscriptionType.PUSH)
    assert found == replace(copy, properties=None if identity == DeliveryProperties() else identity)


@given(st.lists(st.none() | IDENTITIES, max_size=6))
def test_no_pattern_of_plain_copies_loses_an_identity(
    identities: list[DeliveryProperties | None],
) -> None:
    reader = CopyDecoder(SubscriptionType.PUSH)
    plain = replace(make_copy(), headers=None)
    reader.decode(no_expiry(handed_out(sent(plain))))
    copies = [replace(plain, properties=identity) for identity in identities]
    stream = on_the_wire([no_expiry(handed_out(sent(copy))) for copy in copies])
    for _ in range(2):
        found = [
            reader.decode(one)[0] if isinstance(one, Frame) else one[0]
            for one in FrameParser(reader.decode_fast).feed(stream)
        ]
        assert [one.properties for one in found] == [
            None if identity == DeliveryProperties() else identity for identity in identities
        ]


def test_a_copy_that_an_older_version_sent_has_no_known_publisher() -> None:
    """It may be of any organisation, so it must not be attributed to the room's owner."""
    copy = replace(make_copy(), headers=None)
    frame = no_expiry(handed_out(sent(copy)))
    older = frame._replace(head=frame.head.replace(b"rooms-publisher:owner\n", b""))
    assert older != frame
    reader = CopyDecoder(SubscriptionType.PUSH)
    for _ in range(2):
        (one,) = FrameParser(reader.decode_fast).feed(on_the_wire([older]))
        assert isinstance(one, Frame)
        assert reader.decode(one)[0] == replace(
            copy, properties=DeliveryProperties(has_publisher=False)
        )


def test_a_native_copy_says_everything_by_names_of_jms_too() -> None:
    identity = DeliveryProperties(
        "key\n7", 12, "order:9", OTHER, "billing", True, 1_750_000_000_123
    )
    head = sent(replace(make_copy(), native=True, properties=identity)).head
    own = {
        "publisher": f"{OTHER}/billing",
        "ordering-key": "key\n7",
        "sequence": "12",
        "business-key": "order:9",
        "expires-at": "2025-06-15T15:06:40.123Z",
    }
    for name, value in own.items():
        for header_name in (f"rooms-{name}", f"rooms_{name.replace('-', '_')}"):
            assert unescape((header(head, header_name.encode()) or b"").decode()) == value
    assert header(head, b"rooms_replayed") is None
    replayed = replace(
        make_copy(), native=True, message_id=MessageId(MESSAGE.replace("bcce", "9cce"))
    )
    assert header(sent(replayed).head, b"rooms_replayed") == b"true"


Taken = Frame | tuple[DeliveryTask, str]


def on_the_wire(frames: Iterable[Frame]) -> bytes:
    return b"\n".join([b"%b%b\n%b\0" % frame for frame in frames])


def fed(
    parser: FrameParser[tuple[DeliveryTask, str]], stream: bytes, cuts: Iterable[int]
) -> list[Taken]:
    bounds = sorted(cuts)
    parts = zip([0, *bounds], [*bounds, len(stream)], strict=True)
    return [found for start, end in parts for found in parser.feed(stream[start:end])]


@given(
    correlation_id=TEXT,
    event_type=TEXT,
    payload=st.binary(),
    headers=st.sampled_from([None, b'{"x-one": "1:\\\\2"}']),
    receipt=st.sampled_from([None, "r1"]),
    data=st.data(),
)
def test_known_header_orders_are_decoded_fast(
    *,
    correlation_id: str,
    event_type: str,
    payload: bytes,
    headers: bytes | None,
    receipt: str | None,
    data: st.DataObject,
) -> None:
    """The first copy teaches the order of headers; other orders and special values are parsed."""
    reader = CopyDecoder(SubscriptionType.PUSH)
    plain = replace(make_copy(), headers=None, expires_ms=None)
    assert reader.decode(no_expiry(handed_out(sent(plain)))) == (plain, "12,34")
    made = make_copy(correlation_id=correlation_id, event_type=event_type, payload=payload)
    copies = [
        plain,
        replace(made, headers=headers),
        replace(made, headers=None, expires_ms=None),
        plain,
    ]
    frames = [no_expiry(handed_out(sent(copy, receipt=receipt))) for copy in copies]
    stream = on_the_wire(frames)
    cuts = data.draw(st.sets(st.integers(0, len(stream))))
    found = fed(FrameParser(reader.decode_fast), stream, cuts)
    assert [reader.decode(one) if isinstance(one, Frame) else one for one in found] == [
        (copy, "12,34") for copy in copies
    ]
    # Each order of headers is known by now, so only other headers and values that are not plain are parsed.
    for frame, one in zip(frames, fed(FrameParser(reader.decode_fast), stream, cuts), strict=True):
        copy = decode_copy(frame, SubscriptionType.PUSH)[0]
        chosen = f"{copy.event_type}{copy.correlation_id}"
        hard = not chosen.isascii() or escape(chosen) != chosen or copy.headers is not None
        assert isinstance(one, Frame) == hard


def test_header_orders_are_learned_while_another_connection_opens() -> None:
    """One decoder serves all queues of a kind; first frames are decoded in another thread."""
    plain = no_expiry(handed_out(sent(replace(make_copy(), headers=None))))
    greeting = b"CONNECTED\nversion:1.2\n\n\0"
    frames = [plain._replace(head=plain.head + b"extra-%d:1\n" % number) for number in range(8)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as pool:
            for _ in range(200):
                reader = CopyDecoder(SubscriptionType.PUSH)
                reader.decode(plain)
                opened = pool.submit(
                    lambda reader: [
                        FrameParser(reader.decode_fast).feed(greeting) for _ in range(30)
                    ],
                    reader,
                )
                for frame in frames:
                    reader.decode(frame)
                assert opened.result() == [[Frame(b"CONNECTED", b"\nversion:1.2\n", b"")]] * 30
    finally:
        sys.setswitchinterval(interval)


def test_fast_decoding_checks_the_end_of_a_frame() -> None:
    reader = CopyDecoder(SubscriptionType.PUSH)
    plain = no_expiry(handed_out(sent(replace(make_copy(payload=b"x" * 20), headers=None))))
    reader.decode(plain)
    stream = on_the_wire([plain])
    assert FrameParser(reader.decode_fast).feed(stream) == [reader.decode(plain)]
    with pytest.raises(ProtocolError, match="is longer than its content-length"):
        FrameParser(reader.decode_fast).feed(stream[:-3] + b"xxx" + stream)
    other_room = stream.replace(DELIVERY.encode(), DELIVERY[:-1].encode() + b"f")
    (cut,) = FrameParser(reader.decode_fast).feed(other_room)
    assert isinstance(cut, Frame)
    with pytest.raises(ValueError, match="several rooms"):
        reader.decode(cut)


def no_expiry(frame: Frame) -> Frame:
    """This is how the broker writes that there is none."""
    return (
        frame if b"\nexpires:" in frame.head else frame._replace(head=frame.head + b"expires:0\n")
    )


@given(st.lists(st.binary(max_size=40), max_size=6), st.data())
def test_frames_are_found_however_the_stream_is_split(
    bodies: list[bytes], data: st.DataObject
) -> None:
    stream = b"".join(
        b"\n" * (number % 3) + encode("MESSAGE", {"number": str(number)}, body)
        for number, body in enumerate(bodies)
    )
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)))))
    parser, found = FrameParser[Frame](), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += parser.feed(stream[start:end])
    assert [frame.body for frame in found] == bodies
    assert [header(frame.head, b"number") for frame in found] == [
        str(n).encode() for n in range(len(bodies))
    ]


def test_a_frame_without_a_length_ends_at_nul() -> None:
    (first, second) = FrameParser().feed(
        b"\n\nRECEIPT\nreceipt-id:r1\n\n\0\nERROR\nmessage:no\n\nbody\0\n"
    )
    assert (first.command, header(first.head, b"receipt-id"), first.body) == (
        b"RECEIPT",
        b"r1",
        b"",
    )
    assert (second.command, second.body) == (b"ERROR", b"body")


@pytest.mark.parametrize(
    "stream",
    [b"MESSAGE\ncontent-length:2\n\nabc\0", b"MESSAGE\ncontent-length:x\n\n\0", b"MESSAGE\ncontent-length:-1\n\n\0", b"x" * (2 << 20)],
)  # fmt: skip
def test_a_stream_that_is_not_stomp_is_reported(stream: bytes) -> None:
    with pytest.raises(ProtocolError):
        FrameParser().feed(stream)


def test_a_copy_due_later_is_scheduled() -> None:
    later = datetime.fromtimestamp(NOW_MS / 1000 + 5, UTC)
    assert (
        header(sent(make_copy(), due=later).head, b"AMQ_SCHEDULED_TIME")
        == str(NOW_MS + 5000).encode()
    )
    assert header(sent(make_copy()).head, b"AMQ_SCHEDULED_TIME") is None


def test_only_copies_for_native_queues_are_durable_and_named_by_their_version() -> None:
    native = sent(replace(make_copy(), native=True)).head
    assert header(native, b"persistent") == b"true"
    assert unescape((header(native, b"_AMQ_DUPL_ID") or b"").decode()) == make_copy().dedup_id
    head = sent(make_copy(), receipt="r9").head
    names = {line.split(b":")[0].decode() for line in head.strip().split(b"\n")}
    assert header(head, b"destination-type") == b"ANYCAST"
    assert header(head, b"expires") == b"1900000000000"
    assert header(head, b"receipt") == b"r9"
    theirs = {
        "destination", "destination-type", "priority", "expires", "receipt", "content-length",
    }  # fmt: skip
    assert {name for name in names if not name.startswith("rooms-")} == theirs


def test_destinations_are_fully_qualified() -> None:
    queues = QueueNames("farm", "client")
    assert queues.push.destination == "push-farm-client::push-farm-client"
    assert queues.backlog.destination == "backlog-farm-client::backlog-farm-client"
    assert queues.pull(SUBSCRIPTION).destination == f"room-7::subscription-{SUBSCRIPTION}"


@pytest.mark.parametrize(
    ("found", "instead"),
    [
        (b"rooms-format:1\n", b"rooms-format:2\n"),
        (b"rooms-format:1\n", b""),
        (b"rooms-generation:2\n", b"rooms-generation:two\n"),
        (b"rooms-generation:2\n", b"rooms-generation:-2\n"),
        (b"rooms-generation:2\n", b"rooms-generation:2147483648\n"),
        (MESSAGE.encode(), b"01890a5d-ac96-774b-bcce-b30300000008"),
        (MESSAGE.encode(), b"'; DROP TABLE deliveries; --"),
        (b"rooms-headers:{", b"rooms-headers:["),
        (b'"x-one"', b'{"x-one"'),
        (b"rooms-publisher:owner", b"rooms-publisher:invalid"),
        (b"rooms-publisher:owner", b"rooms-publisher:owner\nrooms-sequence:x"),
        (b"priority:7", b"priority:10"),
        (b"priority:7", b"priority:7\nrooms-priority:10"),
        (b"trace", b"\xff\xfe"),
        (b"trace", b"\\t"),
        (b"rooms-event-version", b"no-colon-here\nrooms-event-version"),
    ],
)
def test_a_message_that_is_not_a_copy_is_malformed(found: bytes, instead: bytes) -> None:
    frame = handed_out(sent(make_copy()))
    assert found in frame.head
    broken = frame._replace(head=frame.head.replace(found, instead))
    with pytest.raises((ValueError, KeyError)):
        decode_copy(broken, SubscriptionType.PUSH)
    reader, plain = (
        CopyDecoder(SubscriptionType.PUSH),
        handed_out(sent(replace(make_copy(), headers=None))),
    )
    reader.decode(plain)
    for other in {broken, plain._replace(head=plain.head.replace(found, instead))} - {plain}:
        (cut,) = FrameParser(reader.decode_fast).feed(on_the_wire([other]))
        assert cut == other
        with pytest.raises((ValueError, KeyError)):
            reader.decode(other)
    reported = decode_malformed(broken, "why")
    assert (reported.reason, reported.body, reported.delivery_id) == ("why", b"{}", DELIVERY)
    assert reported.attempt == 3


def test_a_small_credit_is_exact_and_a_large_one_roomy() -> None:
    assert window_bytes(3) == 3 * MIN_FRAME_BYTES
    assert window_bytes(1000) >= 1000 * 2000
    assert window_bytes(10**9) == 64 * 1024 * 1024


def test_a_copy_never_comes_before_its_row_is_due() -> None:
    due = NOW + timedelta(seconds=1, microseconds=1)
    assert (
        header(sent(make_copy(), due=due).head, b"AMQ_SCHEDULED_TIME")
        == str(NOW_MS + 1001).encode()
    )
