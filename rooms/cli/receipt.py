"""Implement `rooms receipt`: get the signed receipt of a message, and verify one without Rooms."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from rooms.cli.context import CliSession, Command, Group, pass_session
from rooms.cli.errors import CliError, UnreachableError
from rooms.cli.input_files import check_size, read_input
from rooms.cli.options import find_message

if TYPE_CHECKING:
    from rooms.cli.output import Output
    from rooms.evidence.jose import PublicKey
    from rooms.evidence.receipt import VerifiedReceipt

_JWKS: Final = "/.well-known/jwks.json"
_MAX_KEYS_BYTES: Final = 1 << 20
_MAX_PAYLOAD_BYTES: Final = 1 << 30
_TIMEOUT_S: Final = 30.0


@click.group(cls=Group)
def receipt() -> None:
    """Get signed receipts of messages, and verify them."""


@receipt.command()
@click.argument("message")
@click.option("--output", "path", metavar="FILE", help="Write it to a file.  [standard output]")
@pass_session
def get(session: CliSession, /, *, message: str, path: str | None) -> None:
    """Get the receipt of a message: what was accepted, and what became of it.

    MESSAGE is the id that publishing returned, or ROOM/ID with the publisher's own id.
    """
    with session.client() as client:
        found = client.call("GET", f"/messages/{find_message(client, message)}/receipt")
    out = session.output()
    if path is not None:
        try:
            Path(path).write_text(found["receipt"] + "\n", encoding="ascii")
        except OSError as exc:
            raise CliError(f"{path} cannot be written: {exc.strerror}") from exc
        out.note(f"wrote {path}")
    elif out.as_json:
        out.document(found)
    else:
        out.line(found["receipt"])


@receipt.command()
@click.argument("path", metavar="FILE")
@click.option(
    "--jwks",
    metavar="FILE|URL",
    help=f"The installation's public keys.  [{_JWKS} of the service]",
)
@click.option("--payload", "payload_path", metavar="FILE", help="Compare the payload's bytes.")
@click.option(
    "--publisher-key",
    metavar="FILE",
    help="Public keys that you trust for the publisher: a JWK, or a JWK Set.",
)
@pass_session
def verify(
    session: CliSession,
    /,
    *,
    path: str,
    jwks: str | None,
    payload_path: str | None,
    publisher_key: str | None,
) -> None:
    """Verify a receipt, and say what it proves; '-' is standard input.

    With --jwks FILE no network is used. Without --publisher-key, the installation vouches for the
    key of the publisher. The exit code is 1 where the receipt is not proved.
    """
    from rooms.evidence.jose import EvidenceError
    from rooms.evidence.receipt import MAX_RECEIPT_BYTES, verify_receipt

    text = _receipt_text(_read(path, MAX_RECEIPT_BYTES))
    payload = None if payload_path is None else _read(payload_path, _MAX_PAYLOAD_BYTES)
    source = jwks or _service_url(session) + _JWKS
    keys = _keys(source)
    trusted = None if publisher_key is None else _keys(publisher_key)
    try:
        found = verify_receipt(text, keys, payload=payload, publisher_keys=trusted)
    except EvidenceError as exc:
        raise CliError(f"not proved: {exc}") from exc
    out = session.output()
    if out.as_json:
        out.document(_document(found))
    else:
        _show(out, found, payload=payload_path, trusted=publisher_key)


def _show(
    out: "Output", found: "VerifiedReceipt", *, payload: str | None, trusted: str | None
) -> None:
    receipt = found.receipt
    out.heading(f"proved: signed by {receipt.iss} {receipt.signed_at:%Y-%m-%dT%H:%M:%SZ}")
    out.line(f"  key                    {found.kid}")
    out.line(f"  message                {receipt.message_id}")
    out.line(f"  event type             {receipt.event_type}, version {receipt.version}")
    out.line(f"  room                   {receipt.room}")
    out.line(f"  accepted               {receipt.accepted_at.isoformat()}")
    if receipt.publisher is not None:
        publisher = receipt.publisher
        named = publisher.organisation or publisher.organisation_id
        application = f", application {publisher.application}" if publisher.application else ""
        key = f", API key {publisher.key_id}" if publisher.key_id else ""
        out.line(f"  from                   {named}{application}{key}")
    if receipt.sha256 is not None:
        compared = f"equal to {payload}" if payload is not None else "not compared: --payload FILE"
        out.line(f"  payload                {receipt.payload_bytes} bytes, {compared}")
        out.line(f"  payload's SHA-256      {receipt.sha256}")
    if found.statement is None or receipt.signature is None:
        out.line("  publisher's signature  none")
    else:
        whose = receipt.signature.organisation or receipt.signature.organisation_id
        by = f"found in {trusted}" if trusted is not None else "vouched for by the installation"
        out.line(f"  publisher's signature  valid, of {whose}, id {found.statement.id}")
        out.line(f"  publisher's key        {found.publisher_kid}, {by}")
    states = ", ".join(f"{count} {state}" for state, count in receipt.states.items()) or "none"
    out.line(f"  deliveries             {receipt.fanout}: {states}")
    for one in receipt.deliveries:
        named = one.subscription or one.subscription_id
        out.line(f"    {named}: {one.state} {one.updated_at.isoformat()}")
    if receipt.more_deliveries:
        out.line("    and more")


def _document(found: "VerifiedReceipt") -> dict[str, Any]:
    import msgspec

    return {
        "proved": True,
        "kid": found.kid,
        "publisher_kid": found.publisher_kid,
        "receipt": msgspec.to_builtins(found.receipt),
    }


def _receipt_text(content: bytes) -> str:
    """Return the JWS, also from the answer of the API."""
    text = content.decode("utf-8", "replace").strip()
    if not text.startswith("{"):
        return text
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise CliError(f"not proved: the receipt is no JSON: {exc}") from exc
    named = found.get("receipt") if isinstance(found, dict) else None
    return named if isinstance(named, str) else ""


def _keys(source: str) -> Mapping[str, "PublicKey"]:
    from rooms.evidence.jose import EvidenceError
    from rooms.evidence.receipt import read_keys

    is_url = source.lower().startswith(("http://", "https://"))
    content = _fetch(source) if is_url else _read(source, _MAX_KEYS_BYTES)
    try:
        return read_keys(content)
    except EvidenceError as exc:
        raise CliError(f"{source}: {exc}") from exc


def _service_url(session: CliSession) -> str:
    from rooms.cli.address import local_url

    return (session.url or local_url(session.settings())).rstrip("/")


def _fetch(url: str) -> bytes:
    from rooms.cli.address import is_loopback
    from rooms.cli.http_library import httpx

    found = b""
    try:
        with (
            httpx.Client(timeout=_TIMEOUT_S, trust_env=not is_loopback(url)) as client,
            client.stream("GET", url) as answer,
        ):
            if answer.status_code != httpx.codes.OK:
                raise CliError(f"{url} answered {answer.status_code}, and no keys")
            for chunk in answer.iter_bytes():
                found += chunk
                if len(found) > _MAX_KEYS_BYTES:
                    raise CliError(f"{url} answered more than {_MAX_KEYS_BYTES} bytes")
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        raise UnreachableError(f"{url} did not answer: {exc}; name a file by --jwks") from exc
    return found


def _read(path: str, limit: int) -> bytes:
    if path != "-":
        return read_input(path, limit)
    try:
        found = sys.stdin.buffer.read(limit + 1)
    except OSError as exc:
        raise CliError(f"{path} cannot be read: {exc.strerror}") from exc
    return check_size(path, found, limit)


@click.group(cls=Group)
def receipt_key() -> None:
    """Rotate the key by which the installation signs receipts."""


@receipt_key.command(cls=Command)
@click.option(
    "--replace-lost",
    is_flag=True,
    help="Also where the current key cannot be decrypted, because ROOMS_SECRET_KEY was lost.",
)
@pass_session
def rotate(session: CliSession, /, *, replace_lost: bool) -> None:
    """Sign with a new key from now on, in the database and with the secret key of this machine.

    The old public key stays published, and proves the receipts that it signed; it ends after a
    minute.
    """
    from rooms.cli import database

    settings = session.settings()
    found = database.rotate_receipt_key(
        session.wait_for_database_url(),
        settings.secret_key,
        settings.data,
        replace_lost=replace_lost,
    )
    session.output().resource({"retired": found.retired, "created": found.created})
