"""Keycloak as an OpenID Connect provider, fetched by Maven and run on this machine without a database."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

import httpx

from rooms.local.maven import (
    FAST_START_OPTIONS,
    MavenArtifact,
    MavenPackage,
    cache_dir,
    fetch_package,
    find_java,
)
from tests.support.polling import until

VERSION: Final = "26.4.0"
PACKAGE: Final = MavenPackage(
    folder=f"keycloak-{VERSION}",
    artifacts=(
        MavenArtifact(
            group="org.keycloak", name="keycloak-quarkus-dist", version=VERSION, type="zip"
        ),
    ),
    unpacked=True,
)
REALM: Final = "members"
CLIENT_ID: Final = "rooms"
CLIENT_SECRET: Final = "a secret/with+characters"
PASSWORD: Final = "correct horse"
_START_S: Final = 300
_ACTION: Final = re.compile(r'<form[^>]*action="([^"]+)"')
# Its own options name another collector.
_JAVA_OPTIONS: Final = " ".join(one for one in FAST_START_OPTIONS if "GC" not in one)


@dataclass(frozen=True, slots=True)
class Keycloak:
    """A running provider."""

    url: str

    @property
    def issuer(self) -> str:
        """Return the issuer of the realm."""
        return f"{self.url}/realms/{REALM}"

    def sign_in(self, address: str, user: str, password: str = PASSWORD) -> dict[str, str] | None:
        """Sign in as a browser does; return the query by which it comes back. None: refused."""
        with httpx.Client(timeout=30) as browser:
            page = browser.get(address)
            assert page.status_code == 200, page.text
            action = _ACTION.search(page.text)
            assert action is not None, page.text
            # Browsers send secure cookies to this machine without TLS, and httpx does not.
            cookies = "; ".join(
                one.partition(";")[0] for one in page.headers.get_list("set-cookie")
            )
            answer = browser.post(
                unescape(action[1]),
                data={"username": user, "password": password},
                headers={"Cookie": cookies},
            )
        if answer.status_code == 200:
            return None
        return dict(parse_qsl(urlsplit(answer.headers["location"]).query))


@contextmanager
def keycloak(
    folder: Path, *, redirect_uri: str, users: Mapping[str, Sequence[str]]
) -> Iterator[Keycloak]:
    """Run Keycloak with these users and their groups. MissingError, FetchError."""
    java = find_java()
    program = folder / "keycloak"
    # A start writes into the folder of the program.
    shutil.copytree(fetch_package(cache_dir(), PACKAGE) / f"keycloak-{VERSION}", program)
    (program / "data" / "import").mkdir(parents=True)
    realm = json.dumps(_realm(redirect_uri, users))
    (program / "data" / "import" / "realm.json").write_text(realm)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with (folder / "keycloak.log").open("wb") as log:
        process = subprocess.Popen(
            [
                *("bash", str(program / "bin" / "kc.sh"), "start-dev", "--import-realm"),
                *("--db=dev-mem", "--cache=local", "--http-host=127.0.0.1", f"--http-port={port}"),
                "--health-enabled=false",
            ],
            env={
                "PATH": os.environ.get("PATH", os.defpath),
                "JAVA_HOME": str(java.resolve().parent.parent),
                "JAVA_OPTS_APPEND": f"{_JAVA_OPTIONS} -Xmx512m",
            },
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            running = Keycloak(f"http://127.0.0.1:{port}")
            log_file = folder / "keycloak.log"
            until(
                lambda: _is_ready(running, process, log_file),
                lambda: f"Keycloak; its log: {log_file.read_text(errors='replace')[-5000:]}",
                within_s=_START_S,
                pause_s=0.25,
            )
            yield running
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _is_ready(running: Keycloak, process: subprocess.Popen[bytes], log: Path) -> bool:
    assert process.poll() is None, log.read_text(errors="replace")[-5000:]
    try:
        address = f"{running.issuer}/.well-known/openid-configuration"
        return httpx.get(address, timeout=10).status_code == 200
    except httpx.TransportError:
        return False


def _realm(redirect_uri: str, users: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    groups = sorted({group for listed in users.values() for group in listed})
    return {
        "realm": REALM,
        "enabled": True,
        "sslRequired": "none",
        "groups": [{"name": group} for group in groups],
        "users": [
            {
                "username": name,
                "enabled": True,
                "email": f"{name}@example.com",
                "emailVerified": True,
                "firstName": name,
                "lastName": name,
                "groups": list(listed),
                "credentials": [{"type": "password", "value": PASSWORD}],
            }
            for name, listed in users.items()
        ],
        "clients": [
            {
                "clientId": CLIENT_ID,
                "secret": CLIENT_SECRET,
                "enabled": True,
                "publicClient": False,
                "standardFlowEnabled": True,
                "redirectUris": [redirect_uri],
                "attributes": {"pkce.code.challenge.method": "S256"},
                "protocolMappers": [
                    {
                        "name": "groups",
                        "protocol": "openid-connect",
                        "protocolMapper": "oidc-group-membership-mapper",
                        "config": {
                            "claim.name": "groups",
                            "full.path": "false",
                            "id.token.claim": "true",
                        },
                    }
                ],
            }
        ],
    }
