"""Implement `rooms signing-key`: keys by which an organisation signs its messages."""

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import click

from rooms.cli.context import CliSession, Group, pass_session
from rooms.cli.errors import CliError
from rooms.cli.input_files import read_input
from rooms.cli.options import Paging, paging_options, path_segment

if TYPE_CHECKING:
    from rooms.evidence.jose import PublicKey, SigningKey

_ALGORITHMS: Final = ("EdDSA", "ES256")
_MAX_BYTES: Final = 1 << 16
_COLUMNS: Final = {
    "name": "name",
    "algorithm": "algorithm",
    "created": "created_at",
    "revoked": "revoked_at",
    "kid": "kid",
}


@click.group(cls=Group)
def signing_key() -> None:
    """Create, register and revoke keys that sign your messages.

    `rooms publish --signing-key FILE` signs with one.
    """


@signing_key.command()
@click.argument("path", metavar="FILE")
@click.option("--algorithm", type=click.Choice(_ALGORITHMS), default="EdDSA", show_default=True)
@pass_session
def generate(session: CliSession, /, *, path: str, algorithm: str) -> None:
    """Write a new private key to FILE, which only you may read. It stays on this machine."""
    from rooms.evidence.jose import generate_key

    made = generate_key(algorithm)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(json.dumps(made.to_jwk()) + "\n")
    except FileExistsError as exc:
        raise CliError(f"{path} exists: name another file") from exc
    except OSError as exc:
        raise CliError(f"{path} cannot be written: {exc.strerror}") from exc
    session.output().resource({"kid": made.public.kid, "algorithm": algorithm, "file": path})


@signing_key.command()
@click.argument("name")
@click.argument("path", metavar="FILE")
@pass_session
def register(session: CliSession, /, *, name: str, path: str) -> None:
    """Register the public part of the key in FILE, a JWK, for your organisation."""
    jwk = _read_public_key(path).to_jwk()
    with session.client() as client:
        made = client.call("POST", "/signing-keys", json={"name": name, "jwk": jwk})
    session.output().resource(made)


@signing_key.command("list")
@paging_options
@pass_session
def list_keys(session: CliSession, /, *, paging: Paging) -> None:
    """List your organisation's public keys, with revoked ones."""
    with session.client() as client:
        page = client.page("/signing-keys", **paging)
    empty = "no signing keys: `rooms signing-key generate FILE`"
    session.output().listing(page, _COLUMNS, empty=empty)


@signing_key.command()
@click.argument("kid")
@pass_session
def show(session: CliSession, /, *, kid: str) -> None:
    """Show one public key; with --json, others can verify with it by --publisher-key."""
    with session.client() as client:
        found = client.call("GET", f"/signing-keys/{path_segment(kid)}")
    session.output().resource(found)


@signing_key.command()
@click.argument("kid")
@pass_session
def revoke(session: CliSession, /, *, kid: str) -> None:
    """Revoke a key for good: later messages that it signs are refused."""
    with session.client() as client:
        client.call("DELETE", f"/signing-keys/{path_segment(kid)}")
    out = session.output()
    if out.as_json:
        out.document({"revoked": [kid]})
    else:
        out.line(f"revoked {kid}")


def read_private_key(path: str) -> "SigningKey":
    """Return the private key in a file. CliError: it cannot be read, or is none."""
    from rooms.evidence.jose import EvidenceError
    from rooms.evidence.jose import signing_key as parse

    try:
        return parse(_read_jwk(path))
    except EvidenceError as exc:
        raise CliError(f"{path}: {exc}") from exc


def _read_public_key(path: str) -> "PublicKey":
    """Return the public part of the key in a file, without any secret or unknown member."""
    from rooms.evidence.jose import EvidenceError, public_key

    jwk = {member: value for member, value in _read_jwk(path).items() if member != "d"}
    try:
        return public_key(jwk)
    except EvidenceError as exc:
        raise CliError(f"{path}: {exc}") from exc


def _read_jwk(path: str) -> Mapping[str, Any]:
    content = read_input(path, _MAX_BYTES)
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as exc:
        raise CliError(f"{path} is no JWK: {exc}") from exc
    if not isinstance(found, dict):
        raise CliError(f"{path} is no JWK: it must be a JSON object")
    return found
