"""Run Java clients of the broker as programs."""

import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any, Final

from rooms.local.errors import MissingError
from rooms.local.java_servers import ARTEMIS, ARTEMIS_VERSION
from rooms.local.maven import FAST_START_OPTIONS, cache_dir, fetch_package, find_java
from tests.support.servers import unavailable

_SOURCE: Final = Path(__file__).with_name("JmsReader.java")
_TIMEOUT_S: Final = 120.0
STORE_PASSWORD: Final = "changeit"


@cache
def _command() -> tuple[str, ...]:
    try:
        java = find_java()
    except MissingError as missing:
        unavailable(str(missing))
    modules = subprocess.run(
        [java, "--list-modules"], check=True, capture_output=True, text=True
    ).stdout
    if "jdk.compiler" not in modules:
        unavailable(
            "this Java cannot run source files: install a JDK, for example default-jdk-headless"
        )
    # The broker's own package has both clients: Qpid JMS for AMQP, and that of Artemis.
    libraries = fetch_package(cache_dir(), ARTEMIS) / f"apache-artemis-{ARTEMIS_VERSION}" / "lib"
    return str(java), *FAST_START_OPTIONS, "-Xmx128m", "-cp", f"{libraries}/*", str(_SOURCE)


def uri(protocol: str, host: str, port: int, *, trusted: Path | None = None) -> str:
    """Return the connection URI of a client; with TLS if a PKCS12 file is given."""
    if protocol == "amqp":
        options = (
            ""
            if trusted is None
            else f"transport.trustStoreLocation={trusted}"
            f"&transport.trustStorePassword={STORE_PASSWORD}"
        )
        return f"amqp{'s' if trusted else ''}://{host}:{port}?{options}"
    options = (
        ""
        if trusted is None
        else f"sslEnabled=true&trustStorePath={trusted}&trustStorePassword={STORE_PASSWORD}"
    )
    return f"tcp://{host}:{port}?{options}"


def trust(authority: Path, store: Path) -> Path:
    """Create a PKCS12 file that trusts this certificate, as Java clients read it."""
    keytool = find_java().with_name("keytool")
    subprocess.run(
        [
            keytool, "-importcert", "-noprompt", "-alias", "broker", "-file", authority,
            "-keystore", store, "-storetype", "PKCS12", "-storepass", STORE_PASSWORD,
        ],
        check=True, capture_output=True, timeout=_TIMEOUT_S,
    )  # fmt: skip
    return store


def read_by_jms(
    protocol: str,
    at: str,
    *,
    user: str,
    password: str,
    queue: str,
    count: int,
    how: str = "ack",
    selector: str = "",
) -> list[dict[str, Any]]:
    """Receive this many messages, acknowledged or rejected, and none after them.

    `at` is a URI. Raises AssertionError with the client's output.
    """
    command = [*_command(), protocol, at, user, password, queue, str(count), how]
    done = subprocess.run(
        [*command, *([selector] if selector else [])],
        check=False,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
