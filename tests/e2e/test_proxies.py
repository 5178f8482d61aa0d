"""Test Rooms with TLS of its own, behind nginx as TLS terminator, and behind a security server.

nginx has the configuration that compose/ ships. Clients that come to Rooms directly have an address of loopback that is
no trusted proxy.
"""

import json
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from websockets.sync.client import connect

from rooms.local.services import free_port
from tests.conftest import in_memory
from tests.support.certificates import Authority
from tests.support.client_certificates import (
    DAY,
    ClientCertificateAuthority,
    IssuedCertificate,
    client_context,
)
from tests.support.nginx import nginx_before
from tests.support.polling import until
from tests.support.room import POLICY
from tests.support.service import Service, environment_of, running

OURS, THEIRS = "SE/GOV/1", "SE/COM/2"
UNTRUSTED = "127.0.0.66"
SECURITY_SERVER = "127.0.0.9"


@dataclass
class Place:
    """A service, its TLS port, the port of nginx, and who signs certificates."""

    service: Service
    tls: int
    nginx: int
    folder: Path
    members: ClientCertificateAuthority

    def context(self, certificate: IssuedCertificate | None) -> ssl.SSLContext:
        return client_context(self.folder / "authority.pem", self.folder, certificate)

    def get(
        self, port: int, certificate: IssuedCertificate | None = None, **headers: str
    ) -> httpx.Response:
        """Read the rooms on a port with TLS."""
        with self.client(port, certificate) as http:
            return http.get("/v1/rooms", headers=headers)

    def client(self, port: int, certificate: IssuedCertificate | None) -> httpx.Client:
        transport = httpx.HTTPTransport(
            verify=self.context(certificate), local_address=UNTRUSTED, trust_env=False
        )
        return httpx.Client(base_url=f"https://localhost:{port}", transport=transport, timeout=30)

    def plain(self, address: str, **headers: str) -> httpx.Response:
        """Read the rooms on the plain port, from an address."""
        with self.plain_client(address) as http:
            return http.get("/v1/rooms", headers=headers)

    def plain_client(self, address: str) -> httpx.Client:
        """Return a client of the plain port that has an address."""
        transport = httpx.HTTPTransport(local_address=address, trust_env=False)
        return httpx.Client(base_url=self.service.url, transport=transport, timeout=30)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("tls")
    members = ClientCertificateAuthority()
    Authority("localhost", "127.0.0.1").write(folder)
    for name, content in (
        ("server.pem", (folder / "chain.pem").read_bytes()),
        ("server-key.pem", (folder / "key.pem").read_bytes()),
        ("members.pem", members.pem),
        ("members-crl.pem", members.revocation_list()),
    ):
        (folder / name).write_bytes(content)
    tls = free_port()
    settings = {
        "ROOMS_TLS_LISTEN": f"127.0.0.1:{tls}",
        "ROOMS_TLS_CERT": str(folder / "server.pem"),
        "ROOMS_TLS_KEY": str(folder / "server-key.pem"),
        "ROOMS_TLS_CLIENT_CA": str(folder / "members.pem"),
        "ROOMS_TLS_CLIENT_CRL": str(folder / "members-crl.pem"),
        "ROOMS_TRUSTED_PROXIES": f"127.0.0.1/32,{SECURITY_SERVER}/32",
    }
    with (
        in_memory(tmp_path_factory.mktemp("proxied")) as data,
        running(data, settings=settings) as service,
        nginx_before(service.port, folder, tmp_path_factory.mktemp("nginx")) as nginx,
    ):
        place = Place(service, tls, nginx, folder, members)
        found = service.http.get("/v1/organisations").json()["items"]
        path = f"/v1/organisations/{found[0]['id']}"
        assert service.http.patch(path, json={"member_id": OURS}).is_success
        made = service.http.post(
            "/v1/organisations", json={"name": "theirs", "member_id": THEIRS}
        ).json()
        body = {"name": "client", "kind": "client", "scopes": ["admin"]}
        assert service.http.post("/v1/keys", json=body).is_success
        assert service.http.post(f"/v1/organisations/{made['id']}/keys", json=body).is_success
        until(lambda: place.get(nginx).status_code == 401, "nginx to answer")
        yield place


def test_a_certificate_identifies_directly_and_behind_nginx(place: Place) -> None:
    ours, stranger = place.members.issue(OURS), place.members.issue("SE/GOV/9")
    key = {"Authorization": f"Bearer {place.service.key}"}
    for port in (place.tls, place.nginx):
        assert place.get(port, ours).status_code == 200
        assert place.get(port, stranger).status_code == 401
        assert place.get(port, None).status_code == 401
        assert place.get(port, None, **key).status_code == 200
        assert place.get(port, place.members.issue(THEIRS), **key).status_code == 403


def test_certificates_that_are_not_valid_get_in_nowhere(place: Place) -> None:
    revoked = place.members.issue(OURS)
    (place.folder / "members-crl.pem").write_bytes(place.members.revocation_list(revoked))

    def is_refused() -> bool:
        try:
            return place.get(place.tls, revoked).status_code != 200
        except httpx.TransportError:
            return True

    until(is_refused, "the new revocation list")
    # The first one may have been closed after its handshake.
    with pytest.raises(httpx.TransportError):
        place.get(place.tls, revoked)
    others = ClientCertificateAuthority()
    for certificate in (
        others.issue(OURS),
        place.members.issue(OURS, starts=-2 * DAY, ends=-DAY),
        place.members.issue(OURS, starts=DAY, ends=2 * DAY),
    ):
        with pytest.raises(httpx.TransportError):
            place.get(place.tls, certificate)
        assert place.get(place.nginx, certificate).status_code == 400
    reported = place.service.http.get("/metrics").text.splitlines()
    metrics = "\n".join(line for line in reported if line.startswith("rooms_tls"))
    for outcome in ("revoked", "untrusted", "expired", "not_yet_valid", "done"):
        assert f'rooms_tls_handshakes_total{{outcome="{outcome}"}}' in metrics


def test_nginx_replaces_forged_headers(place: Place) -> None:
    forged = {"X-Forwarded-Client-Cert": 'Cert="x"', "X-Forwarded-For": "127.0.0.1"}
    assert place.get(place.nginx, place.members.issue(OURS), **forged).status_code == 200
    assert place.get(place.nginx, None, **forged).status_code == 401
    body = {"name": "near", "scopes": ["manage"], "networks": [f"{UNTRUSTED}/32"]}
    near = place.service.http.post("/v1/keys", json=body).json()["key"]
    headers = {"Authorization": f"Bearer {near}", "X-Forwarded-For": "192.0.2.1"}
    assert place.get(place.nginx, None, **headers).status_code == 200
    headers["X-Forwarded-For"] = UNTRUSTED
    assert place.plain("127.0.0.66", **headers).status_code == 200
    assert place.plain("127.0.0.67", **headers).status_code == 401


def test_a_security_server_names_its_clients_and_others_do_not(place: Place) -> None:
    named = {"X-GovStack-Client": f"{THEIRS}/payroll"}
    assert place.plain(SECURITY_SERVER, **named).status_code == 200
    assert place.plain(SECURITY_SERVER).status_code == 401
    answer = place.plain(UNTRUSTED, **named)
    assert (answer.status_code, "ROOMS_TRUSTED_PROXIES" in answer.text) == (401, True)


def test_govstack_goes_through_every_door(place: Place) -> None:
    """Publish with the application that the caller names, directly, by nginx and by a security server."""
    room = {"name": "doors", "govstack": True, **POLICY}
    made = place.service.post("/rooms", room)
    place.service.post(f"/rooms/{made['id']}/event-types", {"name": "made"})
    publish, body = f"/r1/{OURS}/doors/pub/v1/made", {"eventType": "made", "event": 1}
    types = f"/rooms/{quote(OURS, safe='')}/doors/event-types"
    ours, theirs = place.members.issue(OURS), place.members.issue(THEIRS)
    with (
        place.client(place.tls, ours) as direct,
        place.client(place.nginx, ours) as proxied,
        place.plain_client(SECURITY_SERVER) as forwarded,
    ):
        for application, http in (("tls", direct), ("nginx", proxied), ("server", forwarded)):
            named = {"X-GovStack-Client": f"{OURS}/{application}"}
            answer = http.post(publish, json=body, headers=named)
            assert answer.status_code == 201, (application, answer.text)
            assert http.get(types, headers=named).json()["items"][0]["name"] == "made"
    listed = place.service.get(f"/rooms/{made['id']}/messages")["items"]
    assert [one["application"] for one in listed] == ["server", "nginx", "tls"]
    named = {"X-GovStack-Client": f"{OURS}/app"}
    with place.client(place.nginx, theirs) as other, place.plain_client(UNTRUSTED) as forging:
        assert other.post(publish, json=body, headers=named).status_code == 403
        assert forging.post(publish, json=body, headers=named).status_code == 401


def test_streams_go_through_tls_and_nginx(place: Place) -> None:
    certificate = place.members.issue(OURS)
    http = place.service.http
    for port in (place.tls, place.nginx):
        policy = {"delivery_delay_ms": 1000, "delivery_delay_multiplier": 2, "delivery_attempts": 3}
        room = http.post("/v1/rooms", json={"name": f"stream-{port}", **policy}).json()["id"]
        assert http.post(f"/v1/rooms/{room}/event-types", json={"name": "made"}).is_success
        subscription = http.post(
            f"/v1/rooms/{room}/subscriptions", json={"name": "s", "type": "PULL"}
        ).json()["id"]
        path = f"/v1/subscriptions/{subscription}/stream"
        with place.client(port, certificate) as client:
            with client.stream("GET", path) as events:
                assert events.status_code == 200
                publish(client, room)
                assert any(line.startswith("event: message") for line in events.iter_lines())
            with connect(
                f"wss://localhost:{port}{path}",
                ssl=place.context(certificate),
                proxy=None,
                source_address=(UNTRUSTED, 0),
            ) as socket:
                socket.send(json.dumps({"credit": 10}))
                publish(client, room)
                while json.loads(socket.recv(30))["type"] != "message":
                    pass


def publish(client: httpx.Client, room: int) -> None:
    body = {"event_type": "made", "payload": 1}
    answer = client.post(f"/v1/rooms/{room}/messages", json=body)
    assert answer.status_code == 202, answer.text


def test_a_process_with_its_plain_port_closed(place: Place) -> None:
    plain, tls = free_port(), free_port()
    settings = {
        "DATABASE_URL": place.service.database_url,
        "ROOMS_PLAIN_PORT": "closed",
        "ROOMS_TLS_LISTEN": f"127.0.0.1:{tls}",
        "ROOMS_TLS_CERT": str(place.folder / "server.pem"),
        "ROOMS_TLS_KEY": str(place.folder / "server-key.pem"),
    }
    environment = environment_of(place.service.data, plain) | settings
    command = [sys.executable, "-m", "rooms", "serve"]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
    try:

        def is_ready() -> bool:
            try:
                with place.client(tls, None) as http:
                    return http.get("/health/ready").status_code == 200
            except httpx.TransportError:
                return False

        until(is_ready, "the API on its TLS port")
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{plain}/health/live", trust_env=False)
    finally:
        process.terminate()
        assert process.wait(60) == 0
    for broken, named in (("members.pem", "ROOMS_TLS_KEY"), ("nothing.pem", "ROOMS_TLS_CERT")):
        environment["ROOMS_TLS_CERT"] = str(place.folder / broken)
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=60
        )
        assert ended.returncode != 0
        assert named in ended.stderr
        assert "Traceback" not in ended.stderr


def test_metrics_do_not_pass_nginx(place: Place) -> None:
    with place.client(place.nginx, None) as http:
        assert http.get("/metrics").status_code == 404
