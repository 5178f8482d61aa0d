"""Test signatures with the public library of Standard Webhooks."""

import base64
import hmac
import time
from datetime import UTC, datetime
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from delivery.push.http.signing import Signer, new_secret, parse_secret

SECRET = "whsec_" + base64.b64encode(bytes(range(32))).decode()
OTHER = "whsec_" + base64.b64encode(bytes(range(1, 33))).decode()
BODY = b'{"a": 1}'


def headers(signature: str, timestamp: int) -> dict[str, str]:
    return {
        "webhook-id": "msg_1",
        "webhook-timestamp": str(timestamp),
        "webhook-signature": signature,
    }


def test_the_public_library_verifies_the_signature() -> None:
    now = int(time.time())
    signature = Signer((parse_secret(SECRET),)).sign("msg_1", now, BODY)
    assert signature.startswith("v1,")
    assert Webhook(SECRET).verify(BODY, headers(signature, now)) == {"a": 1}
    assert signature == Webhook(SECRET).sign("msg_1", _moment(now), BODY.decode())


def test_either_secret_verifies_during_a_rotation() -> None:
    now = int(time.time())
    signature = Signer((parse_secret(SECRET), parse_secret(OTHER))).sign("msg_1", now, BODY)
    assert len(signature.split(" ")) == 2
    for secret in (SECRET, OTHER):
        assert Webhook(secret).verify(BODY, headers(signature, now)) == {"a": 1}


@pytest.mark.parametrize(
    ("webhook_id", "later_s", "body"),
    [("msg_2", 0, BODY), ("msg_1", 1, BODY), ("msg_1", 0, BODY + b" ")],
)
def test_id_time_and_body_are_all_signed(webhook_id: str, later_s: int, body: bytes) -> None:
    now = int(time.time())
    signature = Signer((parse_secret(SECRET),)).sign("msg_1", now, BODY)
    given_headers = headers(signature, now + later_s) | {"webhook-id": webhook_id}
    with pytest.raises(WebhookVerificationError):
        Webhook(SECRET).verify(body, given_headers)


@given(
    secrets=st.lists(st.binary(min_size=1, max_size=200), min_size=1, max_size=3),
    webhook_id=st.text(max_size=50),
    timestamp=st.integers(min_value=0, max_value=2**40),
    body=st.binary(max_size=4000),
)
def test_signatures_are_hmac_for_keys_of_any_length(
    secrets: list[bytes], webhook_id: str, timestamp: int, body: bytes
) -> None:
    content = b"%b.%d.%b" % (webhook_id.encode("utf-8", "surrogatepass"), timestamp, body)
    expected = [
        base64.b64encode(hmac.new(secret, content, sha256).digest()).decode() for secret in secrets
    ]
    assert Signer(tuple(secrets)).sign(webhook_id, timestamp, body) == " ".join(
        f"v1,{one}" for one in expected
    )


def test_new_secret_holds_what_random_gave() -> None:
    asked: list[int] = []

    def random(size: int) -> bytes:
        asked.append(size)
        return bytes(range(size))

    assert new_secret(random) == SECRET
    assert asked == [32]
    assert parse_secret(SECRET) == bytes(range(32))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "whsec_",
        base64.b64encode(bytes(32)).decode(),
        "whsec_***",
        "whsec_" + base64.b64encode(bytes(23)).decode(),
        "whsec_" + base64.b64encode(bytes(65)).decode(),
        SECRET[:-1],
        SECRET + "\n",
        "whsec_\u00e4" + SECRET[7:],
    ],
)
def test_a_bad_secret_is_refused_without_appearing_in_the_error(text: str) -> None:
    with pytest.raises(ValueError, match="a signing secret") as caught:
        parse_secret(text)
    assert len(text) < 10 or text[6:] not in str(caught.value)


def test_signing_needs_a_secret() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Signer(())


def _moment(timestamp: int) -> datetime:
    return datetime.fromtimestamp(timestamp, UTC)
