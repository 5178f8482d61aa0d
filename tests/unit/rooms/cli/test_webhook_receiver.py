"""Test the webhook receiver: signatures, output, and planned failures."""

import hmac
import json
import os
import socket
import subprocess
import sys
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

import httpx
import pytest

from rooms.cli.webhook_receiver import (
    MAX_BODY_BYTES,
    TOLERANCE_S,
    FailurePlan,
    SignatureCheck,
    Webhook,
    WebhookReceiver,
    parse_secret,
    verify,
)
from tests.support.cli_runner import Terminal

SECRET = "whsec_" + b64encode(bytes(range(32))).decode()
OTHER = "whsec_" + b64encode(bytes(32)).decode()
BODY = b'{"n": 1}'


def signed(
    body: bytes = BODY, *, identity: str = "d1", secret: str = SECRET, at: int | None = None
) -> dict[str, str]:
    at = int(time.time()) if at is None else at
    digest = hmac.digest(
        b64decode(secret.removeprefix("whsec_")), f"{identity}.{at}.".encode() + body, "sha256"
    )
    signature = f"v1,{b64encode(digest).decode()}"
    return {"webhook-id": identity, "webhook-timestamp": str(at), "webhook-signature": signature}


@dataclass(slots=True)
class Listening:
    receiver: WebhookReceiver
    heard: SimpleQueue[Webhook] = field(default_factory=SimpleQueue)
    thread: threading.Thread | None = None

    def post(self, body: bytes = BODY, headers: dict[str, str] | None = None) -> int:
        with httpx.Client(trust_env=False, timeout=60) as client:
            return client.post(
                f"{self.receiver.url}/hook?x=1", content=body, headers=headers
            ).status_code


@contextmanager
def listening(
    behaviour: FailurePlan,
    *,
    most: int | None = None,
    hear: Callable[[Webhook], None] | None = None,
) -> Iterator[Listening]:
    heard: SimpleQueue[Webhook] = SimpleQueue()
    with WebhookReceiver(
        ("127.0.0.1", 0), behaviour, hear or heard.put, max_requests=most
    ) as receiver:
        thread = threading.Thread(target=receiver.serve)
        thread.start()
        try:
            yield Listening(receiver, heard, thread)
        finally:
            receiver.stop()
            thread.join(60)
            assert not thread.is_alive()


def test_a_signature_is_verified() -> None:
    keys = [parse_secret(OTHER), parse_secret(SECRET)]
    now = 1_800_000_000
    headers = signed(at=now)
    assert verify(keys, headers, BODY, now_s=now) == SignatureCheck(True)
    both = {**headers, "webhook-signature": f"v1a,xyz v1,AAAA {headers['webhook-signature']}"}
    assert verify(keys, both, BODY, now_s=now).valid
    for late in (-TOLERANCE_S, TOLERANCE_S):
        assert verify(keys, headers, BODY, now_s=now + late).valid


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"webhook-id": ""}, "no webhook-id"),
        ({"webhook-signature": ""}, "no webhook-signature"),
        ({"webhook-id": "d2"}, "no signature fits"),
        ({"webhook-timestamp": "1800000001"}, "no signature fits"),
        ({"webhook-timestamp": "soon"}, "not a number"),
        ({"webhook-timestamp": "1799999699"}, "more than 300 s"),
        ({"webhook-signature": "v1,\N{SNOWMAN}"}, "no signature fits"),
        ({"webhook-signature": "v2,AAAA"}, "no signature fits"),
        ({"webhook-signature": ","}, "no signature fits"),
    ],
)
def test_invalid_signature_has_a_reason(change: dict[str, str], reason: str) -> None:
    verdict = verify(
        [parse_secret(SECRET)], signed(at=1_800_000_000) | change, BODY, now_s=1_800_000_000
    )
    assert not verdict.valid
    assert reason in verdict.reason


def test_one_more_byte_invalidates_the_signature() -> None:
    headers = signed(at=1)
    assert not verify([parse_secret(SECRET)], headers, BODY + b" ", now_s=1).valid
    assert not verify([parse_secret(OTHER)], headers, BODY, now_s=1).valid


@pytest.mark.parametrize("text", ["", "hunter2", "whsec_%%%", "whsec_é"])
def test_invalid_secret_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a signing secret") as caught:
        parse_secret(text)
    assert text == "" or text.removeprefix("whsec_") not in str(caught.value)


def test_valid_webhook_is_reported_and_answered() -> None:
    with listening(FailurePlan(keys=(parse_secret(SECRET),))) as here:
        assert here.post(headers=signed()) == 200
        webhook = here.heard.get(timeout=30)
    assert (webhook.identity, webhook.body, webhook.path, webhook.attempt) == (
        "d1",
        BODY,
        "/hook?x=1",
        1,
    )
    assert webhook.signature_check == SignatureCheck(True)


def test_forged_webhook_gets_401() -> None:
    with listening(FailurePlan(keys=(parse_secret(SECRET),))) as here:
        assert here.post(headers=signed(secret=OTHER)) == 401
        assert here.post() == 401
        assert here.heard.get(timeout=30).signature_check == SignatureCheck(
            False, "no signature fits the secret"
        )


def test_the_first_attempts_of_each_webhook_fail() -> None:
    with listening(FailurePlan(failures=2, status=418)) as here:
        codes = [here.post(headers={"webhook-id": identity}) for identity in "aabaabb"]
    assert codes == [418, 418, 418, 200, 200, 418, 200]


def test_every_attempt_fails_where_no_number_is_given() -> None:
    with listening(FailurePlan(failures=None, status=599)) as here:
        assert [here.post() for _ in range(3)] == [599] * 3


def test_a_hanging_webhook_gets_no_answer_until_the_end() -> None:
    with listening(FailurePlan(failures=1, hang=True)) as here:
        answers: list[object] = []

        def hang() -> None:
            try:
                answers.append(here.post(headers={"webhook-id": "a"}))
            except httpx.RemoteProtocolError as exc:
                answers.append(exc)

        thread = threading.Thread(target=hang)
        thread.start()
        assert here.heard.get(timeout=30).answered is None
        assert here.post(headers={"webhook-id": "a"}) == 200
        assert answers == []
    thread.join(60)
    assert isinstance(answers[0], httpx.RemoteProtocolError)


def test_the_last_answer_goes_out_before_the_end() -> None:
    with listening(FailurePlan(delay_ms=30), most=2) as here:
        assert [here.post(), here.post()] == [200, 200]
        assert here.thread is not None
        here.thread.join(60)
        assert not here.thread.is_alive()


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"Content-Length: %d\r\n" % (MAX_BODY_BYTES + 1), b"413"),
        (b"Content-Length: x\r\n", b"411"),
        (b"Content-Length: -1\r\n", b"411"),
        (b"Transfer-Encoding: chunked\r\n", b"411"),
        (b"X: " + b"y" * 70_000 + b"\r\n", b"431"),
    ],
)
def test_body_without_length_is_refused_unread(head: bytes, status: bytes) -> None:
    with listening(FailurePlan()) as here:
        port = here.receiver.server_address[1]
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.sendall(b"POST / HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n")
            assert connection.recv(1000).split()[1] == status
        assert here.heard.empty()
        assert here.post() == 200


def test_connections_are_kept() -> None:
    with listening(FailurePlan()) as here, httpx.Client(trust_env=False, timeout=60) as client:
        answers = [client.post(here.receiver.url, content=BODY) for _ in range(3)]
    streams = {id(answer.extensions["network_stream"]) for answer in answers}
    assert ([answer.status_code for answer in answers], len(streams)) == ([200] * 3, 1)


def test_error_of_the_callback_stops_the_receiver() -> None:
    def hear(_: Webhook) -> None:
        raise BrokenPipeError

    failures: list[Exception] = []
    with WebhookReceiver(("127.0.0.1", 0), FailurePlan(), hear) as receiver:

        def serve() -> None:
            try:
                receiver.serve()
            except BrokenPipeError as exc:
                failures.append(exc)

        thread = threading.Thread(target=serve)
        thread.start()
        Listening(receiver).post()
        thread.join(60)
    assert len(failures) == 1


@contextmanager
def rooms_listen(data: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "rooms", "listen", "--port", "0", *options],
        env={**os.environ, "ROOMS_DATA": str(data)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        yield process, process.stderr.readline().removeprefix("listening on ").strip()
    finally:
        process.kill()
        process.communicate()


def test_the_command_writes_json_and_ends_by_itself(tmp_path: Path) -> None:
    with rooms_listen(tmp_path, "--json", "--secret", SECRET, "--fail", "1", "--max", "3") as (
        process,
        url,
    ):
        with httpx.Client(trust_env=False, timeout=60) as client:
            codes = [
                client.post(url, content=body, headers=headers).status_code
                for body, headers in (
                    (BODY, signed()),
                    (BODY, signed()),
                    (b"\xff", {"webhook-id": "d9"}),
                )
            ]
        stdout, stderr = process.communicate(timeout=60)
    assert codes == [503, 200, 401]
    assert (process.returncode, stderr) == (0, "")
    first, second, third = (json.loads(line) for line in stdout.splitlines())
    assert (first["status"], first["attempt"], first["verified"], first["body"]) == (
        503,
        1,
        True,
        '{"n": 1}',
    )
    assert (second["status"], second["attempt"]) == (200, 2)
    assert third["headers"]["webhook-id"] == "d9"
    assert (third["verified"], third["body_base64"]) == (False, "/w==")


def test_the_command_shows_webhooks_to_people(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    given = ("--secret-file", str(tmp_path / "secret"))
    with rooms_listen(tmp_path, *given, "--max", "1") as (process, url):
        headers = {**signed(b"\x1b[2J"), "rooms-event-type": "paid"}
        assert (
            httpx.post(
                url, content=b"\x1b[2J", headers=headers, trust_env=False, timeout=60
            ).status_code
            == 200
        )
        stdout, _ = process.communicate(timeout=60)
    lines = [line.strip() for line in stdout.splitlines()]
    assert "d1  call 1  → 200" in lines[0]
    assert lines[1] == "signature valid"
    assert "rooms-event-type: paid" in lines
    assert lines[-1] == r"\x1b[2J"


def test_port_in_use_is_reported(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = Terminal(tmp_path).run("listen", "--port", str(taken.getsockname()[1]))
    assert result.exit_code == 1
    assert "choose another --port" in result.stderr


def test_options_that_contradict(tmp_path: Path) -> None:
    assert Terminal(tmp_path).run("listen", "--hang", "--status", "500").exit_code == 2
    assert Terminal(tmp_path).run("listen", "--secret", "no").exit_code == 2
    (tmp_path / "secret").write_text(f"{SECRET}\nno\n")
    given = ("--secret-file", str(tmp_path / "secret"))
    answer = Terminal(tmp_path).run("listen", *given)
    assert answer.exit_code == 2
    assert SECRET not in answer.output
