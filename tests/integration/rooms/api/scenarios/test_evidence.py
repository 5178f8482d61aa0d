"""Test signatures of publishers, receipts and their keys through the API."""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import pytest

from rooms.api import receipts
from rooms.db.connection import transaction
from rooms.db.queries.deliveries import deliveries_of_message
from rooms.db.receipt_keys import ReceiptKeyError, current_key, rotate_key
from rooms.db.secrets import Cipher
from rooms.domain.ids import RoomId
from rooms.domain.message_headers import SIGNATURE_HEADER
from rooms.domain.principal import Principal
from rooms.errors import ConflictError, InvalidError
from rooms.evidence.jose import (
    ALGORITHMS,
    EvidenceError,
    PublicKey,
    SigningKey,
    generate_key,
    read_jws,
    sign,
)
from rooms.evidence.message_signature import (
    MessageIdentity,
    payload_hash,
    sign_message,
)
from rooms.evidence.receipt import (
    TYPE,
    VerifiedReceipt,
    read_keys,
    verify_receipt,
)
from tests.integration.rooms.api.conftest import Api
from tests.integration.rooms.api.sharing_world import (
    OWNER,
    PUBLISHER,
    STRANGER,
    SUBSCRIBER,
    SUSPENDED,
    World,
    build_world,
)

EVENT_TYPE: Final = "made"
PAYLOAD: Final = b'{"amount" : 1.50}'
OWN_IDS: Final = ["m-%", "% m-%"]
"""The callers' ids of these tests as they are stored; the world has others."""


@pytest.fixture
async def world(api: Api) -> World:
    return await build_world(api)


async def principal_of(api: Api, key: str) -> Principal:
    return await api.services.keys.authenticate(f"Bearer {api.keys.get(key, key)}".encode())


async def register(api: Api, key: str, algorithm: str = "EdDSA") -> SigningKey:
    made = generate_key(algorithm)
    await api.made("/signing-keys", {"name": "k", "jwk": made.public.to_jwk()}, key)
    return made


async def publish(
    api: Api, key: str, room: int, signature: str | None = None, **fields: Any
) -> str:
    """Publish the payload byte for byte, and return the message's id."""
    named = {"event_type": EVENT_TYPE, "version": 1, "id": "m-1", **fields}
    payload = named.pop("payload", PAYLOAD)
    text = json.dumps({**named, "signature": signature})
    body = text[:-1].encode() + b',"payload":' + payload + b"}"
    answer = await api.services.publisher.publish(
        await principal_of(api, key), RoomId(room), body, None
    )
    found: dict[str, Any] = json.loads(answer.body)
    return str(found["message_id"])


async def installation_keys(api: Api) -> dict[str, PublicKey]:
    api.services.receipt_keys.forget()
    answer = await api.http.get("/.well-known/jwks.json")
    assert answer.headers["cache-control"] == "public, max-age=300"
    return read_keys(answer.content)


async def receipt(api: Api, key: str, message: str) -> str:
    answer = await api.call("GET", f"/messages/{message}/receipt", key)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["receipt"])


async def proved(api: Api, key: str, message: str, **options: Any) -> VerifiedReceipt:
    return verify_receipt(await receipt(api, key, message), await installation_keys(api), **options)


class Shared:
    """A publisher's messages in the room of another organisation."""

    def __init__(self, api: Api, world: World) -> None:
        self.api = api
        self.world = world
        self.room = int(world.paths["room_id"][OWNER])
        self.key = world.keys[PUBLISHER]

    def identity(self, **other: Any) -> MessageIdentity:
        fields = {
            "publisher": self.world.organisations[PUBLISHER],
            "room": self.room,
            "event_type": EVENT_TYPE,
            "version": 1,
            "id": "m-1",
        }
        return MessageIdentity(**{**fields, **other})

    async def publish(self, signature: str, **fields: Any) -> str:
        return await publish(self.api, self.key, self.room, signature, **fields)


@pytest.fixture
def shared(api: Api, world: World) -> Shared:
    return Shared(api, world)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
async def test_a_signature_is_kept_and_proved_by_the_receipt_of_each_role(
    api: Api, world: World, shared: Shared, algorithm: str
) -> None:
    key = await register(api, shared.key, algorithm)
    signature = sign_message(key, shared.identity(ordering_key="k"), PAYLOAD)
    message = await shared.publish(signature, ordering_key="k", headers={"X-A": "b"})

    [(headers,)] = await api.sql("SELECT headers FROM messages WHERE id = %s", message)
    assert json.loads(headers) == {"X-A": "b", SIGNATURE_HEADER: signature}
    trusted = {key.public.kid: key.public}
    for role in (OWNER, PUBLISHER, SUBSCRIBER):
        found = await proved(
            api, world.keys[role], message, payload=PAYLOAD, publisher_keys=trusted
        )
        assert found.receipt.message_id == message
        assert found.statement is not None
        assert found.statement.id == "m-1"
        assert found.publisher_kid == key.public.kid


async def test_a_receipt_says_what_its_asker_may_see(
    api: Api, world: World, shared: Shared
) -> None:
    message = world.paths["message_id"][PUBLISHER]
    seen = {
        role: (await proved(api, world.keys[role], message)).receipt
        for role in (OWNER, PUBLISHER, SUBSCRIBER, SUSPENDED)
    }
    owner = seen[OWNER]
    assert owner.publisher is not None
    assert owner.publisher.organisation_id == world.organisations[PUBLISHER]
    assert owner.publisher.key_id is not None
    assert seen[PUBLISHER].publisher == owner.publisher
    assert owner.id == "named-publisher"
    assert owner.fanout == sum(owner.states.values()) == len(owner.deliveries) == 4
    assert owner.sha256 == payload_hash(b"{}")
    assert owner.payload_bytes == 2

    assert (seen[PUBLISHER].fanout, seen[PUBLISHER].states) == (4, owner.states)
    assert seen[PUBLISHER].deliveries == []

    subscriber = seen[SUBSCRIBER]
    assert subscriber.publisher == msgspec.structs.replace(owner.publisher, key_id=None)
    assert subscriber.id is None
    assert subscriber.fanout == sum(subscriber.states.values()) == 1
    [delivery] = subscriber.deliveries
    assert delivery.subscription_id == world.paths["subscription_id"][SUBSCRIBER]
    assert subscriber.sha256 == owner.sha256

    suspended = seen[SUSPENDED]
    assert (suspended.publisher, suspended.sha256, suspended.payload_bytes) == (None, None, None)
    refused = await api.call("GET", f"/messages/{message}/receipt", world.keys[STRANGER])
    assert refused.status_code == 404


async def test_a_receipt_names_the_application_as_the_webhook_does(
    api: Api, world: World, shared: Shared
) -> None:
    body = {"name": "billing", "scopes": ["publish"], "application": "billing"}
    key = await api.made("/keys", body, world.keys[PUBLISHER])
    message = await publish(api, key["key"], shared.room)
    for role, key_id in ((OWNER, key["id"]), (SUBSCRIBER, None)):
        publisher = (await proved(api, world.keys[role], message)).receipt.publisher
        assert publisher is not None
        assert publisher.organisation_id == world.organisations[PUBLISHER]
        assert (publisher.application, publisher.key_id) == ("billing", key_id)


async def test_a_signature_is_hidden_with_its_payload(
    api: Api, world: World, shared: Shared
) -> None:
    key = await register(api, shared.key)
    message = await shared.publish(
        sign_message(key, shared.identity(), PAYLOAD), delay_ms=3_600_000
    )
    path = f"/messages/{message}/receipt"
    assert (await api.call("GET", path, world.keys[SUBSCRIBER])).status_code == 404
    viewer = await api.made("/keys", {"name": "view", "scopes": ["view"]}, world.keys[OWNER])
    found = (await proved(api, viewer["key"], message)).receipt
    assert (found.sha256, found.signature) == (None, None)
    assert (await proved(api, world.keys[OWNER], message)).statement is not None


async def test_a_wrong_signature_is_refused_with_its_reason(
    api: Api, world: World, shared: Shared
) -> None:
    key, other = await register(api, shared.key), generate_key("EdDSA")
    theirs = await register(api, world.keys[OWNER])
    good = sign_message(key, shared.identity(), PAYLOAD)
    forged = sign_message(SigningKey(key.public, other.key), shared.identity(), PAYLOAD)
    es256 = generate_key("ES256")
    confused = sign_message(
        SigningKey(PublicKey(key.public.kid, "ES256", {}, es256.public.key), es256.key),
        shared.identity(),
        PAYLOAD,
    )
    stranger = world.organisations[STRANGER]
    cases: list[tuple[str, Mapping[str, Any], str]] = [
        (good, {"payload": b'{"amount" : 1.5}'}, "payload differs"),
        (good, {"id": "m-2"}, "identity differs: it signs id 'm-1'"),
        (good, {"ordering_key": "k"}, "identity differs: it signs ordering_key"),
        (good, {"version": None}, "names none"),
        (
            sign_message(key, shared.identity(room=1), PAYLOAD),
            {},
            "identity differs: it signs room",
        ),
        (
            sign_message(key, shared.identity(publisher=stranger), PAYLOAD),
            {},
            "identity differs: it signs publisher",
        ),
        (sign_message(key, shared.identity(event_type="x"), PAYLOAD), {}, "signs event_type 'x'"),
        (sign_message(other, shared.identity(), PAYLOAD), {}, "unknown key"),
        (sign_message(theirs, shared.identity(), PAYLOAD), {}, "unknown key"),
        (forged, {}, "was not made by the key"),
        (good[:-4] + ("AAAA" if good[-4:] != "AAAA" else "BBBB"), {}, "was not made by the key"),
        (confused, {}, "its algorithm is 'ES256'"),
        (sign(b'{"room":1}', key, "rooms-message+jws"), {}, "does not sign"),
        (sign(b"{}", key, "JWT"), {}, "its typ is 'JWT'"),
        ("a.b.c", {}, "no compact JWS"),
        ("nothing", {}, "no compact JWS"),
        (sign(b'{"room":"\\ud800"}', key, "rooms-message+jws"), {}, "does not sign"),
    ]
    for signature, fields, reason in cases:
        with pytest.raises(InvalidError, match="signature: ") as caught:
            await shared.publish(signature, **fields)
        [problem] = caught.value.problems
        assert problem.field == "signature"
        assert reason in problem.message
    [(count,)] = await api.sql(
        "SELECT count(*) FROM messages WHERE caller_id LIKE ANY (%s)", OWN_IDS
    )
    assert count == 0
    await shared.publish(good)


async def test_a_batch_names_each_wrong_signature(api: Api, world: World, shared: Shared) -> None:
    key = await register(api, shared.key)
    messages = [
        {
            "event_type": EVENT_TYPE,
            "version": 1,
            "id": f"m-{number}",
            "payload": {},
            "signature": sign_message(key, shared.identity(id=f"m-{number}"), b"{}"),
        }
        for number in range(30)
    ]
    principal = await principal_of(api, shared.key)

    async def send() -> None:
        body = json.dumps({"messages": messages}).encode()
        await api.services.publisher.publish_batch(principal, RoomId(shared.room), body, None)

    messages[7]["payload"] = {"more": 1}
    with pytest.raises(InvalidError) as caught:
        await send()
    assert [one.field for one in caught.value.problems] == ["messages[7].signature"]
    messages[7]["payload"] = {}
    await send()
    [(count,)] = await api.sql(
        "SELECT count(*) FROM messages WHERE caller_id LIKE ANY (%s)", OWN_IDS
    )
    assert count == 30


async def test_a_revoked_key_signs_nothing_more_and_still_proves_what_it_signed(
    api: Api, world: World, shared: Shared
) -> None:
    key = await register(api, shared.key)
    signature = sign_message(key, shared.identity(), PAYLOAD)
    message = await shared.publish(signature)
    path = f"/signing-keys/{key.public.kid}"
    for _ in range(2):
        assert (await api.call("DELETE", path, shared.key)).status_code == 204
    api.services.publisher._signatures._cache.clear()
    late = sign_message(key, shared.identity(id="m-2"), PAYLOAD)
    with pytest.raises(InvalidError, match="revoked key"):
        await shared.publish(late, id="m-2")
    assert await shared.publish(signature) == message, "the first answer holds"

    listed = (await api.call("GET", path, shared.key)).json()
    assert listed["revoked_at"] is not None
    trusted = read_keys(json.dumps(listed))
    found = await proved(
        api, world.keys[SUBSCRIBER], message, payload=PAYLOAD, publisher_keys=trusted
    )
    assert found.statement is not None

    # What the installation would accept later, its receipts do not prove.
    await api.sql(
        "UPDATE signing_keys SET revoked_at = revoked_at - interval '1 hour', created_at = created_at - interval '2 hours'"
    )
    with pytest.raises(EvidenceError, match=r"after the key .* had ended"):
        await proved(api, world.keys[SUBSCRIBER], message)
    again = await api.call(
        "POST", "/signing-keys", shared.key, json={"name": "k", "jwk": key.public.to_jwk()}
    )
    assert again.status_code == 409


async def test_a_consumer_that_pulls_gets_the_signature(api: Api) -> None:
    room = await api.room("pulled")
    await api.made(f"/rooms/{room['id']}/event-types", {"name": EVENT_TYPE})
    queue = await api.subscription(room["id"], "queue", type="PULL")
    key = await register(api, "admin")
    identity = MessageIdentity(
        publisher=(await api.call("GET", "/whoami")).json()["organisation"]["id"],
        room=room["id"],
        event_type=EVENT_TYPE,
        version=1,
        id="m-1",
    )
    signature = sign_message(key, identity, PAYLOAD)
    await publish(api, "admin", room["id"], signature)
    principal = await principal_of(api, "admin")
    _, body = await api.services.pull_service.pull(principal, queue["id"], b"{}")
    [message] = json.loads(body)["messages"]
    assert message["headers"] == {SIGNATURE_HEADER: signature}


async def test_the_same_id_with_another_signature_is_other_content(
    api: Api, world: World, shared: Shared
) -> None:
    key = await register(api, shared.key)
    await shared.publish(sign_message(key, shared.identity(), PAYLOAD))
    with pytest.raises(ConflictError):
        await shared.publish(sign_message(key, shared.identity(), PAYLOAD, iat=1))


async def test_a_signature_that_is_null_counts_as_omitted(api: Api, world: World) -> None:
    room = await api.room("nulls")
    await api.made(f"/rooms/{room['id']}/event-types", {"name": "made"})
    first = await api.publish(room["id"], "made", {}, id="a")
    assert await api.publish(room["id"], "made", {}, id="a", signature=None) == first


async def test_what_ends_while_a_receipt_is_made_is_in_none_of_its_parts(
    api: Api, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outcome that is committed between two of its reads would contradict the counts."""
    message = world.paths["message_id"][OWNER]
    changed: list[Any] = []

    async def delivered_meanwhile(*given: Any, **named: Any) -> Any:
        changed.extend(
            await api.sql(
                "UPDATE deliveries SET state = 'delivered', updated_at = clock_timestamp() + interval '1 h'"
                " WHERE message_id = %s RETURNING 1",
                message,
            )
        )
        return await deliveries_of_message(*given, **named)

    monkeypatch.setattr(receipts, "deliveries_of_message", delivered_meanwhile)
    key = world.keys[OWNER]
    during = (await proved(api, key, message)).receipt
    assert len(changed) == during.fanout > 0
    assert "delivered" not in during.states
    assert during.states == Counter(one.state for one in during.deliveries)
    assert max(one.updated_at.timestamp() for one in during.deliveries) <= during.iat + 1
    after = (await proved(api, key, message)).receipt
    assert after.states == {"delivered": during.fanout}


async def test_an_installation_has_one_key_and_rotates_it(api: Api, world: World) -> None:
    message = world.paths["message_id"][OWNER]
    old = await receipt(api, world.keys[OWNER], message)
    [first] = (await installation_keys(api)).values()
    services = api.services
    with pytest.raises(ReceiptKeyError, match="replace-lost"):
        async with transaction(services.engine) as connection:
            await rotate_key(connection, Cipher(bytes(32)), services.random, replace_lost=False)
    async with transaction(services.engine) as connection:
        before = await current_key(connection, services.cipher, services.random)
        rotation = await rotate_key(
            connection, services.cipher, services.random, replace_lost=False
        )
    assert rotation.retired == first.kid != rotation.created
    keys = await installation_keys(api)
    assert keys.keys() == {first.kid, rotation.created}
    assert verify_receipt(old, keys).kid == first.kid
    new = await receipt(api, world.keys[OWNER], message)
    assert verify_receipt(new, keys).kid == rotation.created

    # A receipt by the old key that says it was signed after the key had ended.
    ended = keys[first.kid].valid_until
    assert ended is not None
    claims = json.loads(read_jws(new, TYPE).verify(keys[rotation.created]))
    late = sign(json.dumps(claims | {"iat": int(ended.timestamp()) + 1}).encode(), before, TYPE)
    with pytest.raises(EvidenceError, match=r"after the key .* had ended"):
        verify_receipt(late, keys)
    with pytest.raises(EvidenceError, match="not among the installation's keys"):
        verify_receipt(new, {first.kid: first})
    replaced = PublicKey(
        first.kid, first.algorithm, first.members, generate_key("EdDSA").public.key
    )
    with pytest.raises(EvidenceError, match="was not made by the key"):
        verify_receipt(old, {first.kid: replaced})


async def test_a_key_of_another_secret_key_gives_503(api: Api, world: World) -> None:
    await installation_keys(api)
    await api.sql("UPDATE receipt_keys SET encrypted_key = 'x'")
    message = world.paths["message_id"][OWNER]
    answer = await api.call("GET", f"/messages/{message}/receipt", world.keys[OWNER])
    assert answer.status_code == 503
    assert (await api.http.get("/.well-known/jwks.json")).status_code == 200


async def test_signing_keys_are_bounded_and_public(api: Api) -> None:
    def body(jwk: Mapping[str, Any]) -> dict[str, Any]:
        return {"name": "k", "jwk": jwk}

    private = generate_key("EdDSA").to_jwk()
    deep: Any = "x"
    for _ in range(900):
        deep = [deep]
    weak = {"kty": "OKP", "crv": "Ed25519", "x": "A" * 43}
    for jwk, reason in (
        (private, "private key"),
        (weak, "small order"),
        ({"kty": "RSA", "n": "x", "e": "AQAB"}, "no public key of kty OKP"),
        ({"kty": "OKP", "crv": "Ed448", "x": "A" * 43}, "no public key of kty OKP"),
        ({"kty": "oct", "k": "x"}, "no public key of kty OKP"),
        (generate_key("ES256").public.to_jwk() | {"y": "A" * 43}, "it is no key"),
        (generate_key("ES256").public.to_jwk() | {"kid": "mine"}, "its thumbprint"),
        (generate_key("ES256").public.to_jwk() | {"alg": "EdDSA"}, "is for ES256"),
        ({str(number): "x" for number in range(11)}, "10"),
        ({"kty": "OKP", "crv": "Ed25519", "x": "A" * 1000}, "128"),
        ({"kty": ["OKP"], "crv": {"a": 1}}, "jwk"),
        (generate_key("EdDSA").public.to_jwk() | {"alg": deep}, "jwk"),
    ):
        answer = await api.call("POST", "/signing-keys", json=body(jwk))
        assert answer.status_code == 422, (jwk, answer.text)
        assert reason in answer.text, (reason, answer.text)
    for kid in ("%00", "A" * 43, "A" * 5000, "%ff"):
        for method in ("GET", "DELETE"):
            assert (await api.call(method, f"/signing-keys/{kid}")).status_code in {400, 404}
    for _ in range(20):
        await register(api, "admin")
    more = body(generate_key("ES256").public.to_jwk())
    answer = await api.call("POST", "/signing-keys", json=more)
    assert answer.status_code == 409
    page = (await api.call("GET", "/signing-keys?limit=7")).json()
    assert len(page["items"]) == 7
    following = await api.call("GET", f"/signing-keys?cursor={page['next_cursor']}")
    assert len(following.json()["items"]) == 13
    entries = (
        await api.call("GET", "/journal?action=create_signing_key&outcome=succeeded&limit=1")
    ).json()["items"]
    assert entries[0]["after"]["jwk"]["crv"] == "Ed25519"
