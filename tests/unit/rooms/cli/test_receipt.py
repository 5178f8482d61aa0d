"""Test `rooms receipt` and `rooms signing-key`."""

import json
from pathlib import Path
from typing import Any

import pytest

from rooms.evidence.jose import public_key
from rooms.evidence.message_signature import (
    MessageIdentity,
    payload_hash,
    read_signature,
    read_statement,
)
from rooms.evidence.receipt import ReceiptPublisher, sign_receipt
from tests.support.cli_runner import Terminal
from tests.support.fake_api import Answer, FakeRooms, Seen
from tests.unit.rooms.evidence.scenarios.test_evidence import (
    IDENTITY,
    INSTALLATION,
    PAYLOAD,
    PUBLISHERS,
    a_receipt,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a receipt, the keys to verify it, and the payload."""
    place = tmp_path / "evidence"
    place.mkdir()
    (place / "receipt").write_text(sign_receipt(a_receipt(), INSTALLATION))
    (place / "jwks").write_text(json.dumps({"keys": [INSTALLATION.public.to_jwk()]}))
    (place / "publisher").write_text(json.dumps(PUBLISHERS[0].public.to_jwk()))
    (place / "other").write_text(json.dumps(PUBLISHERS[1].public.to_jwk()))
    (place / "payload").write_bytes(PAYLOAD)
    return place


def options(folder: Path, *names: str) -> list[str]:
    found = ["receipt", "verify", str(folder / "receipt"), "--jwks", str(folder / "jwks")]
    for name, value in zip(names[::2], names[1::2], strict=True):
        found += [name, str(folder / value)]
    return found


def test_a_receipt_is_verified_without_a_service(terminal: Terminal, folder: Path) -> None:
    shown = terminal.done(
        *options(folder, "--payload", "payload", "--publisher-key", "publisher"),
        ROOMS_URL="http://127.0.0.1:1",
    )
    assert "proved: signed by rooms:rooms/default 2026-11-23T08:00:10Z" in shown
    assert "from                   health, API key k\n" in shown
    assert "equal to" in shown
    assert "valid, of health, id o-1" in shown
    assert "found in" in shown
    assert "1 delivered" in shown
    assert "vouched for by the installation" in terminal.done(*options(folder))
    document = terminal.json(*options(folder))
    assert document["proved"] is True
    assert document["publisher_kid"] == PUBLISHERS[0].public.kid
    assert document["receipt"]["event_type"] == "order.made"


def test_the_answer_of_the_api_is_a_receipt_too(terminal: Terminal, folder: Path) -> None:
    file = folder / "receipt"
    file.write_text(json.dumps({"receipt": file.read_text()}))
    assert "proved" in terminal.done(*options(folder))
    text = file.read_text()
    assert "proved" in terminal.done("receipt", "verify", "-", *options(folder)[3:], stdin=text)


def test_what_is_not_proved_ends_with_1_and_the_reason(terminal: Terminal, folder: Path) -> None:
    (folder / "changed").write_bytes(PAYLOAD + b" ")
    receipt = (folder / "receipt").read_text()
    cases = [
        (options(folder, "--payload", "changed"), "payload differs"),
        (options(folder, "--publisher-key", "other"), "another key made it"),
        ([*options(folder)[:3], "--jwks", str(folder / "other")], "not among the installation's"),
        ([*options(folder)[:3], "--jwks", str(folder / "payload")], "payload: "),
        ([*options(folder)[:3], "--jwks", str(folder / "missing")], "cannot be read"),
    ]
    for arguments, reason in cases:
        result = terminal.run(*arguments)
        assert (result.exit_code, result.stdout) == (1, "")
        assert reason in result.stderr
    for text in (receipt[:-9], receipt.replace(".", ".A", 1), "", "{", "{}", "[1]"):
        (folder / "receipt").write_text(text)
        result = terminal.run(*options(folder))
        assert result.exit_code == 1
        assert "not proved" in result.stderr


def test_the_keys_come_from_the_service_without_an_api_key(
    terminal: Terminal, fake: FakeRooms, folder: Path
) -> None:
    def keys(seen: Seen) -> Answer | None:
        assert "authorization" not in seen.headers
        return 200, {"keys": [INSTALLATION.public.to_jwk()]}

    fake.interfere = keys
    assert "proved" in terminal.done("receipt", "verify", str(folder / "receipt"))
    assert fake.requests[-1].path == "/.well-known/jwks.json"
    fake.interfere = lambda _: (404, {})
    result = terminal.run("receipt", "verify", str(folder / "receipt"))
    assert result.exit_code == 1
    assert "answered 404" in result.stderr


def test_a_receipt_is_fetched(terminal: Terminal, fake: FakeRooms, tmp_path: Path) -> None:
    message = fake.identity(7)
    fake.interfere = lambda _: (200, {"receipt": "a.b.c"})
    assert terminal.done("receipt", "get", message) == "a.b.c\n"
    assert fake.requests[-1].path == f"/v1/messages/{message}/receipt"
    file = tmp_path / "receipt"
    terminal.done("receipt", "get", message, "--output", str(file))
    assert file.read_text() == "a.b.c\n"
    result = terminal.run("receipt", "get", message, "--output", str(tmp_path / "no" / "x"))
    assert (result.exit_code, "cannot be written" in result.stderr) == (1, True)


def test_a_key_is_generated_registered_and_signs(
    terminal: Terminal, fake: FakeRooms, tmp_path: Path
) -> None:
    fake.rooms.append({"id": 1000, "name": "orders"})
    file = str(tmp_path / "key.json")
    made = terminal.json("signing-key", "generate", file, "--algorithm", "ES256")
    assert Path(file).stat().st_mode & 0o777 == 0o600
    assert "exists" in terminal.run("signing-key", "generate", file).stderr

    def answer(seen: Seen) -> Answer | None:
        if seen.path == "/v1/whoami":
            return 200, {"organisation": {"id": "me"}}
        return (201, seen.body) if "signing-keys" in seen.path else None

    fake.interfere = answer
    terminal.done("signing-key", "register", "main", file)
    sent = fake.requests[-1].body
    assert (sent["name"], sent["jwk"]["kid"], "d" in sent["jwk"]) == ("main", made["kid"], False)

    terminal.done(
        *("publish", "orders", "paid", ' {"a" :1} ', "--version", "3", "--id", "x"),
        *("--ordering-key", "k", "--signing-key", file),
    )
    body = fake.sent("POST", "/v1/rooms/1000/messages")[-1]
    assert b'"payload":{"a" :1}' in body.raw
    statement = read_statement(read_signature(body.body["signature"]), public_key(sent["jwk"]))
    statement.check_identity(
        MessageIdentity(
            publisher="me", room=1000, event_type="paid", version=3, id="x", ordering_key="k"
        )
    )
    statement.check_payload(payload_hash(b'{"a" :1}'))

    unnamed = terminal.run("publish", "orders", "paid", "1", "--signing-key", file)
    assert (unnamed.exit_code, "--version and --id" in unnamed.stderr) == (2, True)
    Path(file).write_text("{}")
    named = ("publish", "orders", "paid", "1", "--id", "a", "--version", "1")
    wrong = terminal.run(*named, "--signing-key", file)
    assert (wrong.exit_code, "no public key" in wrong.stderr) == (1, True)
    for text in ("[]", "x"):
        Path(file).write_text(text)
        assert "is no JWK" in terminal.run("signing-key", "register", "x", file).stderr


def test_keys_are_listed_shown_and_revoked(terminal: Terminal, fake: FakeRooms) -> None:
    def answer(seen: Seen) -> Answer | None:
        listed: dict[str, Any] = {"name": "main", "kid": "k-1", "algorithm": "EdDSA"}
        if seen.method == "DELETE":
            return 204, b""
        if seen.path.endswith("/signing-keys"):
            return 200, {"items": [listed], "next_cursor": None}
        return 200, listed

    fake.interfere = answer
    assert "main" in terminal.done("signing-key", "list")
    assert terminal.json("signing-key", "show", "k-1")["kid"] == "k-1"
    assert "revoked k-1" in terminal.done("signing-key", "revoke", "k-1")
    assert terminal.json("signing-key", "revoke", "k-1") == {"revoked": ["k-1"]}
    assert fake.requests[-1].path == "/v1/signing-keys/k-1"


def test_rotating_needs_the_secret_key(terminal: Terminal) -> None:
    result = terminal.run("receipt-key", "rotate", DATABASE_URL="postgresql://127.0.0.1:1/none")
    assert result.exit_code == 1


def test_a_receipt_may_hide_the_payload(terminal: Terminal, folder: Path) -> None:
    hidden = a_receipt(signature=None, sha256=None, payload_bytes=None, more_deliveries=True)
    (folder / "receipt").write_text(sign_receipt(hidden, INSTALLATION))
    shown = terminal.done(*options(folder))
    assert "publisher's signature  none" in shown
    assert "SHA-256" not in shown


def test_a_receipt_of_a_subscriber_names_no_api_key(terminal: Terminal, folder: Path) -> None:
    publisher = ReceiptPublisher(
        organisation_id=IDENTITY.publisher, organisation="health", application="billing"
    )
    receipt = a_receipt(publisher=publisher, id=None)
    (folder / "receipt").write_text(sign_receipt(receipt, INSTALLATION))
    shown = terminal.done(*options(folder))
    assert "from                   health, application billing\n" in shown
