"""Java's clients for the broker, run as programs of their own."""

import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any, Final

from rooms.embedded.artemis import PACKAGE, VERSION
from rooms.embedded.cache import cache_folder, fetch
from rooms.embedded.errors import MissingError
from rooms.embedded.java import QUICK, find_java
from tests.servers import unavailable

_SOURCE: Final = Path(__file__).with_name("JmsReader.java")
_TIMEOUT_S: Final = 120.0
STORE_PASSWORD: Final = "changeit"


@cache
def _command() -> tuple[str, ...]:
    try:
        java = find_java()
    except MissingError as missing:
        unavailable(str(missing))
    modules = subprocess.run([java, "--list-modules"], check=True, capture_output=True, text=True).stdout
    if "jdk.compiler" not in modules:
        unavailable("this Java cannot run source files: it takes a JDK, for example apt install default-jdk-headless")
    # The broker's own package has both clients: Qpid JMS for AMQP, and that of Artemis.
    libraries = fetch(cache_folder(), PACKAGE) / f"apache-artemis-{VERSION}" / "lib"
    return str(java), *QUICK, "-Xmx128m", "-cp", f"{libraries}/*", str(_SOURCE)


def uri(protocol: str, host: str, port: int, *, trusted: Path | None = None) -> str:
    """Return the connection URI for a client; by TLS where it is given a PKCS12 file of trusted certificates."""
    if protocol == "amqp":
        options = (
            ""
            if trusted is None
            else f"transport.trustStoreLocation={trusted}&transport.trustStorePassword={STORE_PASSWORD}"
        )
        return f"amqp{'s' if trusted else ''}://{host}:{port}?{options}"
    options = "" if trusted is None else f"sslEnabled=true&trustStorePath={trusted}&trustStorePassword={STORE_PASSWORD}"
    return f"tcp://{host}:{port}?{options}"


def trust(authority: Path, store: Path) -> Path:
    """Make a PKCS12 file that trusts this certificate, as Java's clients read it."""
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
    protocol: str, at: str, *, user: str, password: str, queue: str, count: int, how: str = "ack", selector: str = ""
) -> list[dict[str, Any]]:
    """So many messages, acknowledged or rejected, and nothing after them; `at`: a URI. AssertionError with what it said."""
    command = [*_command(), protocol, at, user, password, queue, str(count), how]
    done = subprocess.run(
        [*command, *([selector] if selector else [])], check=False, capture_output=True, text=True, timeout=_TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
