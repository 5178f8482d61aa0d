"""Test `rooms receipt verify` with receipts and keys that attack the terminal, or are broken."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rooms.evidence.jose import sign
from rooms.evidence.receipt import TYPE, ReceiptDelivery, ReceiptPublisher, sign_receipt
from tests.support.cli_runner import Terminal
from tests.support.foreign_files import (
    CONTENTS,
    PLACES,
    assert_refused,
    bounded_memory,
    make_foreign_file,
)
from tests.unit.rooms.evidence.scenarios.test_evidence import (
    INSTALLATION,
    NOW,
    PUBLISHERS,
    a_receipt,
)
from tests.unit.rooms.test_safe_text import HOSTILE, assert_harmless

LONG = HOSTILE * 2_000


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rooms.cli.input_files.WRITER_S", 0.01)


@pytest.fixture
def keys(tmp_path: Path) -> str:
    path = tmp_path / "jwks"
    path.write_text(json.dumps({"keys": [INSTALLATION.public.to_jwk()]}))
    return str(path)


def written(folder: Path, text: str) -> str:
    path = folder / "receipt"
    path.write_text(text)
    return str(path)


def test_no_field_of_a_receipt_controls_the_terminal(
    terminal: Terminal, tmp_path: Path, keys: str
) -> None:
    organisation = {"organisation_id": HOSTILE, "organisation": HOSTILE}
    receipt = a_receipt(
        iss=HOSTILE,
        message_id=HOSTILE,
        event_type=HOSTILE,
        states={HOSTILE: 1},
        id=HOSTILE,
        ordering_key=HOSTILE,
        correlation_id=HOSTILE,
        publisher=ReceiptPublisher(**organisation, application=HOSTILE, key_id=HOSTILE),
        sha256=HOSTILE,
        signature=None,
        deliveries=[
            ReceiptDelivery(
                subscription_id=HOSTILE,
                subscription=HOSTILE,
                organisation_id=HOSTILE,
                state=HOSTILE,
                reason=HOSTILE,
                updated_at=NOW,
            )
        ],
    )
    path = written(tmp_path, sign_receipt(receipt, INSTALLATION))
    for options in ([], ["--json"]):
        result = terminal.run(*options, "receipt", "verify", path, "--jwks", keys)
        assert result.exit_code == 0, result.output
        assert "evil" in result.stdout
        assert_harmless(result.stdout)
        assert_harmless(result.stderr)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"event_type": LONG}, "identity differs"),
        ({"ordering_key": LONG}, "identity differs"),
        ({"publisher": ReceiptPublisher(organisation_id=LONG)}, "identity differs"),
        ({"sha256": LONG}, "payload differs"),
        ({"jws": LONG}, "longer than"),
        ({"jws": HOSTILE}, "no compact JWS"),
        ({"jwk": {"kty": LONG}}, "no public key"),
        ({"jwk": {**PUBLISHERS[0].public.to_jwk(), "alg": LONG}}, "its alg is"),
        ({"jwk": {**PUBLISHERS[0].public.to_jwk(), "kid": LONG}}, "its kid is not"),
        ({"jwk": {**PUBLISHERS[0].public.to_jwk(), "exp": LONG}}, "its member exp"),
        ({"jwk": {**PUBLISHERS[0].public.to_jwk(), "exp": 1e300}}, "its member exp"),
    ],
)
def test_a_reason_is_short_and_harmless(
    terminal: Terminal, tmp_path: Path, keys: str, fields: dict[str, Any], reason: str
) -> None:
    path = written(tmp_path, sign_receipt(a_receipt(**fields), INSTALLATION))
    for options in ([], ["--json"]):
        result = terminal.run(*options, "receipt", "verify", path, "--jwks", keys)
        assert_refused(result, "not proved", reason)


def deep(depth: int) -> bytes:
    return b'{"note":' + b"[" * depth + b"]" * depth + b"}"


def signed(**fields: Any) -> bytes:
    document = msgspec.to_builtins(a_receipt())
    return json.dumps({**document, **fields}).encode()


def _deep_alg() -> dict[str, Any]:
    nested: Any = "x"
    for _ in range(900):
        nested = [nested]
    return {**PUBLISHERS[0].public.to_jwk(), "alg": nested}


ENDED = {**PUBLISHERS[0].public.to_jwk(), "nbf": 1, "exp": 4_000_000_000}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"\xff\x1b[2J",
        deep(100_000),
        signed(iat=10**17),
        signed(iat=-(10**17)),
        signed(iat=10**40),
        signed(room="9" * 5_000),
        signed(accepted_at=HOSTILE),
        signed(accepted_at="2026-11-23T08:00:00", signature={**msgspec.to_builtins(a_receipt())["signature"], "key": ENDED}),
        signed(accepted_at="0001-01-01T00:00:00+14:00", signature={**msgspec.to_builtins(a_receipt())["signature"], "key": ENDED}),
        signed(accepted_at="9999-12-31T23:59:59-14:00", signature={**msgspec.to_builtins(a_receipt())["signature"], "key": ENDED}),
        signed(signature={**msgspec.to_builtins(a_receipt())["signature"], "key": _deep_alg()}),
        signed(states={"x": HOSTILE}),
    ],
    ids=range(14),
)  # fmt: skip
def test_what_is_signed_may_be_broken(
    terminal: Terminal, tmp_path: Path, keys: str, content: bytes
) -> None:
    """Check that a signature makes no content trusted: the keys may come with the receipt."""
    path = written(tmp_path, sign(content, INSTALLATION, TYPE))
    assert_refused(terminal.run("receipt", "verify", path, "--jwks", keys), "not proved")


@pytest.mark.parametrize("kind", [*CONTENTS, *PLACES])
def test_any_file_is_refused_as_a_receipt(
    terminal: Terminal, tmp_path: Path, keys: str, kind: str
) -> None:
    path = make_foreign_file(tmp_path, kind)
    with bounded_memory():
        result = terminal.run("receipt", "verify", str(path), "--jwks", keys)
    assert_refused(result, "not proved" if kind in CONTENTS else "evil\\x1b[2J")


@pytest.mark.parametrize("kind", [*CONTENTS, *PLACES])
def test_any_file_is_refused_as_keys(
    terminal: Terminal, tmp_path: Path, keys: str, kind: str
) -> None:
    receipt = written(tmp_path, sign_receipt(a_receipt(), INSTALLATION))
    path = make_foreign_file(tmp_path, kind)
    with bounded_memory():
        result = terminal.run("receipt", "verify", receipt, "--jwks", str(path))
    assert_refused(result, "evil\\x1b[2J")
    result = terminal.run(
        "receipt", "verify", receipt, "--jwks", keys, "--publisher-key", str(path)
    )
    assert_refused(result, "evil\\x1b[2J")


@pytest.mark.parametrize(
    "document",
    [
        {"keys": [{"kty": []}]},
        {"keys": [{"kty": "OKP", "crv": "Ed25519", "x": "\ud800"}]},
        {"keys": [{"kty": {HOSTILE: HOSTILE}}]},
        {"keys": [{"kty": "OKP", "crv": HOSTILE, "x": HOSTILE}]},
        {"keys": [{**INSTALLATION.public.to_jwk(), "alg": [HOSTILE]}]},
        {"keys": [{**INSTALLATION.public.to_jwk(), "alg": HOSTILE}]},
        {"keys": [_deep_alg()]},
        {"keys": [{**INSTALLATION.public.to_jwk(), "kid": HOSTILE}]},
        {"keys": [{**INSTALLATION.public.to_jwk(), "exp": HOSTILE}]},
        {"keys": [HOSTILE]},
        {"keys": HOSTILE},
        {"items": {HOSTILE: 1}},
        {HOSTILE: HOSTILE},
    ],
    ids=range(13),
)
def test_a_broken_key_is_refused_by_the_name_of_its_file(
    terminal: Terminal, tmp_path: Path, document: dict[str, Any]
) -> None:
    receipt = written(tmp_path, sign_receipt(a_receipt(), INSTALLATION))
    path = tmp_path / "evil"
    path.write_text(json.dumps(document))
    assert_refused(terminal.run("receipt", "verify", receipt, "--jwks", str(path)), f"{path}: ")


def test_a_payload_that_is_no_file_is_named(terminal: Terminal, tmp_path: Path, keys: str) -> None:
    receipt = written(tmp_path, sign_receipt(a_receipt(), INSTALLATION))
    for kind in ("nothing", "FIFO without a writer"):
        folder = tmp_path / kind
        folder.mkdir()
        path = make_foreign_file(folder, kind)
        arguments = ("receipt", "verify", receipt, "--jwks", keys, "--payload", str(path))
        assert_refused(terminal.run(*arguments), "evil\\x1b[2J")
