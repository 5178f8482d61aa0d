"""A signed message from outside: what its webhook and its stream carry, and what its receipt proves."""

from rooms.domain.message_headers import SIGNATURE_HEADER
from rooms.evidence.jose import generate_key, public_key
from rooms.evidence.message_signature import (
    MessageIdentity,
    payload_hash,
    read_signature,
    read_statement,
    sign_message,
)
from rooms.evidence.receipt import read_keys, verify_receipt
from tests.e2e.test_streams import events
from tests.support.room import EVENT_TYPE, Place
from tests.support.service import Service
from tests.support.webhook_sink import Sink


def test_a_webhook_a_stream_and_a_receipt_carry_the_publishers_signature(
    service: Service, place: Place, sink: Sink
) -> None:
    key = generate_key("ES256")
    jwk = key.public.to_jwk()
    service.post("/signing-keys", {"name": f"room-{place.id}", "jwk": jwk})
    identity = MessageIdentity(
        publisher=service.get("/whoami")["organisation"]["id"],
        room=place.id,
        event_type=EVENT_TYPE,
        version=1,
        id="m-1",
    )
    hook, queue = place.push(), place.queue()
    signature = sign_message(key, identity, b"{}")
    message = place.publish({}, version=1, id="m-1", signature=signature)["message_id"]
    place.await_state(message, hook.id, "delivered")

    [call] = sink.wait(hook.path)
    statement = read_statement(
        read_signature(call.headers[SIGNATURE_HEADER.lower()]), public_key(jwk)
    )
    statement.check_identity(identity)
    statement.check_payload(payload_hash(call.body))

    with events(service, f"/subscriptions/{queue}/stream") as stream:
        assert stream.message()["headers"] == {SIGNATURE_HEADER: signature}

    receipt = service.get(f"/messages/{message}/receipt")["receipt"]
    keys = read_keys(service.http.get("/.well-known/jwks.json").content)
    found = verify_receipt(
        receipt, keys, payload=call.body, publisher_keys={key.public.kid: key.public}
    )
    assert found.receipt.fanout == sum(found.receipt.states.values()) == 2
    attempts = {one.subscription_id: one.attempts for one in found.receipt.deliveries}
    assert attempts[hook.id] == 1
