"""The verification that users copy refuses what any stranger may send, and never fails at it."""

import http.client
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import pytest
from standardwebhooks.webhooks import Webhook

from rooms.local.services import free_port
from tests.support.docs_shell import steps
from tests.support.polling import until
from tests.support.service import ROOT

SECRET = "whsec_" + "QUJD" * 10 + "QUI="
BODY = b'{"id": 17}'
NAMES = ("webhook-id", "webhook-timestamp", "webhook-signature")
STRANGE: Mapping[str, Mapping[str, str | None]] = {
    **{f"no {name}": {name: None} for name in NAMES},
    **{f"empty {name}": {name: ""} for name in NAMES},
    "no header": dict.fromkeys(NAMES),
    "timestamp x": {"webhook-timestamp": "x"},
    "timestamp of another script": {"webhook-timestamp": "²"},
    "timestamp as long as a header may be": {"webhook-timestamp": "9" * 4000},
    "signature of another script": {"webhook-signature": "v1,é"},
    "id of another script": {"webhook-id": "é"},
}
"""Changes of a genuine request's headers; None: absent."""

Verify = Callable[[Mapping[str, str], bytes], bool]


def signed(changes: Mapping[str, str | None] = {}) -> dict[str, str]:
    now = datetime.fromtimestamp(int(time.time()), UTC)
    headers = {
        "webhook-id": "msg_1",
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": "v1,AAAA " + Webhook(SECRET).sign("msg_1", now, BODY.decode()),
    }
    return {name: value for name, value in {**headers, **changes}.items() if value is not None}


def shown(page: str, file: str) -> str:
    """Return the text of a file that a page shows."""
    (text,) = (step.text for step in steps((ROOT / page).read_text()) if step.file == file)
    return text


def defined(page: str, file: str) -> Callable[..., Any]:
    names: dict[str, Any] = {}
    exec(compile(shown(page, file), file, "exec"), names)
    found: Callable[..., Any] = names["verify"]
    return found


@pytest.fixture(params=["docs/guides/webhooks.md", "README.md"])
def verify(request: pytest.FixtureRequest) -> Verify:
    """The function of the guide, and that of README.md, which promises a ValueError instead of False."""
    if request.param != "README.md":
        of_guide = defined("docs/guides/webhooks.md", "verify.py")
        return lambda headers, body: bool(of_guide(SECRET, headers, body))
    of_readme = defined("README.md", "webhooks.py")

    def raises_nothing(headers: Mapping[str, str], body: bytes) -> bool:
        try:
            of_readme(SECRET, headers, body)
        except ValueError:
            return False
        return True

    return raises_nothing


def test_a_genuine_request_is_accepted(verify: Verify) -> None:
    assert verify(signed(), BODY)
    assert not verify(signed(), b'{"id": 18}')


@pytest.mark.parametrize("strange", STRANGE)
def test_strange_headers_are_refused(verify: Verify, strange: str) -> None:
    assert not verify(signed(STRANGE[strange]), BODY)


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of the guide's receiver."""
    folder, port = tmp_path_factory.mktemp("receiver"), free_port()
    for file in ("verify.py", "receiver.py"):
        text = shown("docs/guides/webhooks.md", file).replace("9000", str(port))
        (folder / file).write_text(text)
    secrets = folder / ".rooms"
    secrets.mkdir()
    (secrets / "billing.json").write_text(json.dumps({"secret": SECRET}))
    process = subprocess.Popen([sys.executable, "receiver.py"], cwd=folder)
    try:
        until(lambda: listens(port), "the receiver")
        yield port
    finally:
        process.kill()
        process.wait()


def listens(port: int) -> bool:
    with suppress(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
        return True
    return False


def status(port: int, headers: Mapping[str, str], body: bytes, length: str | None = "") -> int:
    """Send a request and return the status; `length` in place of the body's own, None: none."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.putrequest("POST", "/hook")
        for name, value in headers.items():
            connection.putheader(name, value.encode("latin-1"))
        if length is not None:
            connection.putheader("content-length", length or str(len(body)))
        connection.endheaders(body)
        return connection.getresponse().status
    finally:
        connection.close()


def test_the_receiver_accepts_a_genuine_request(port: int) -> None:
    assert status(port, signed(), BODY) == 204


@pytest.mark.parametrize("strange", STRANGE)
def test_the_receiver_answers_401_to_strange_headers(port: int, strange: str) -> None:
    assert status(port, signed(STRANGE[strange]), BODY) == 401


@pytest.mark.parametrize(
    ("length", "expected"),
    [(None, 411), ("-1", 411), ("x", 411), ("²", 411), ("9" * 5000, 413), ("20000000", 413)],
)
def test_the_receiver_reads_no_body_of_unknown_or_great_length(
    port: int, length: str | None, expected: int
) -> None:
    assert status(port, signed(), b"", length) == expected
