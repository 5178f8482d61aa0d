"""The API with TLS on a port of its own, in this process."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from websockets.asyncio.client import connect

from rooms.api.server.connections import ConnectionLimits, ConnectionRegistry
from rooms.api.server.tls_files import TlsFiles
from rooms.api.server.tls_listener import TlsListener
from rooms.api.server.uvicorn_server import BoundedServer, http_config
from rooms.app.api import make_asgi
from tests.integration.rooms.api.conftest import Api
from tests.support.certificates import Authority
from tests.support.client_certificates import (
    ClientCertificateAuthority,
    IssuedCertificate,
    client_context,
)
from tests.support.pull_service import PATIENCE_S


@dataclass
class TlsApi:
    """Where the API listens."""

    api: Api
    port: int
    folder: Path
    members: ClientCertificateAuthority

    def context(self, certificate: IssuedCertificate | None) -> ssl.SSLContext:
        """Return the context of a client."""
        return client_context(self.folder / "authority.pem", self.folder, certificate)

    @asynccontextmanager
    async def client(
        self, certificate: IssuedCertificate | None = None
    ) -> AsyncIterator[httpx.AsyncClient]:
        """Yield a client with a certificate."""
        async with httpx.AsyncClient(
            base_url=f"https://localhost:{self.port}",
            verify=self.context(certificate),
            timeout=PATIENCE_S,
            trust_env=False,
        ) as http:
            yield http

    def socket(self, path: str, certificate: IssuedCertificate | None) -> connect:
        """Return a WebSocket that opens when it is awaited or entered."""
        return connect(
            f"wss://localhost:{self.port}/v1{path}",
            ssl=self.context(certificate),
            proxy=None,
            open_timeout=PATIENCE_S,
            close_timeout=5,
        )


@asynccontextmanager
async def tls_serving(api: Api, folder: Path) -> AsyncIterator[TlsApi]:
    """Serve until the block ends, with client certificates of the authority `members`."""
    members = ClientCertificateAuthority()
    Authority().write(folder)
    (folder / "members.pem").write_bytes(members.pem)
    files = TlsFiles(
        cert=folder / "chain.pem", key=folder / "key.pem", client_ca=folder / "members.pem"
    )
    connections = ConnectionRegistry(ConnectionLimits(), count_closed=lambda _: None)
    rules = api.services.settings.certificate_identity
    config = http_config(make_asgi(api.services), registry=connections)
    config.load()
    server = BoundedServer(
        config,
        connections,
        before_drain=api.services.pull_service.end_polls,
        tls=TlsListener(files, rules, connections),
        tls_address=("127.0.0.1", 0),
        is_plain=False,
    )
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    try:
        yield TlsApi(api, server.servers[0].sockets[0].getsockname()[1], folder, members)
    finally:
        await server.shutdown()
