"""Serve the protocol of the API with TLS, with a service behind it that is made up."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from rooms.api.server.connections import ConnectionLimits, ConnectionRegistry
from rooms.api.server.tls_files import LoadedTls, TlsFiles
from rooms.api.server.tls_listener import TlsListener
from rooms.api.server.uvicorn_server import BoundedServer, http_config
from rooms.domain.member_identity import DEFAULT_RULES, CertificateRules
from tests.support.certificates import Authority
from tests.support.client_certificates import (
    ClientCertificateAuthority,
    IssuedCertificate,
    client_context,
)
from tests.support.http_listener import Counting, Service
from tests.support.installation import PATIENCE_S
from tests.support.pull_service import until

RULES = CertificateRules.parse(DEFAULT_RULES)
CHECK_S = 0.02


@dataclass
class TlsPlace:
    """A listener with TLS, its files, and what came to it."""

    folder: Path
    files: TlsFiles
    service: Service
    members: ClientCertificateAuthority
    connections: ConnectionRegistry = field(init=False)
    server: BoundedServer = field(init=False)
    address: tuple[str, int] = ("", 0)
    closed: list[str] = field(default_factory=list)
    """Reasons for which connections were closed."""
    handshakes: list[str] = field(default_factory=list)
    """Outcomes of handshakes."""
    reports: list[LoadedTls | None] = field(default_factory=list)

    def context(self, certificate: IssuedCertificate | None = None) -> ssl.SSLContext:
        """Return the context of a client."""
        return client_context(self.folder / "authority.pem", self.folder, certificate)


@asynccontextmanager
async def tls_served(
    folder: Path,
    *,
    bounds: ConnectionLimits | None = None,
    required: bool = False,
    crl: bytes | None = None,
    members: ClientCertificateAuthority | None = None,
    is_plain: bool = False,
    check_s: float = CHECK_S,
) -> AsyncIterator[TlsPlace]:
    """Serve until the block ends."""
    members = members or ClientCertificateAuthority()
    Authority().write(folder)
    (folder / "members.pem").write_bytes(members.pem)
    if crl is not None:
        (folder / "crl.pem").write_bytes(crl)
    files = TlsFiles(
        cert=folder / "chain.pem",
        key=folder / "key.pem",
        client_ca=folder / "members.pem",
        client_crl=None if crl is None else folder / "crl.pem",
        required=required,
    )
    service = Service()
    place = TlsPlace(folder, files, service, members)
    place.connections = ConnectionRegistry(
        bounds or ConnectionLimits(), count_closed=place.closed.append
    )
    listener = TlsListener(
        files,
        RULES,
        place.connections,
        count=lambda outcome: place.handshakes.append(outcome.value),
        report=place.reports.append,
        check_s=check_s,
    )

    async def nothing() -> None:
        """End without waiting."""

    place.server = BoundedServer(
        http_config(Counting(service), registry=place.connections),
        place.connections,
        before_drain=nothing,
        tls=listener,
        tls_address=("127.0.0.1", 0),
        is_plain=is_plain,
    )
    task = asyncio.create_task(place.server.serve())
    await until(lambda: place.server.started)
    place.address = place.server.servers[-1].sockets[0].getsockname()
    try:
        yield place
    finally:
        service.opened.set()
        place.server.should_exit = True
        await task


@asynccontextmanager
async def tls_connected(
    place: TlsPlace, context: ssl.SSLContext
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect a client."""
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection(
            *place.address, ssl=context, server_hostname="localhost"
        )
        try:
            yield reader, writer
        finally:
            writer.close()
            with suppress(ConnectionError, ssl.SSLError):
                await writer.wait_closed()
