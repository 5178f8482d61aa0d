"""Every command that README.md shows, in its order, in one shell, against a service of its own."""

import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import httpx
import pytest

from rooms.embedded.running import free_port
from tests.service import ROOT, Service, environment_of, running
from tests.waiting import PATIENCE_S, until

README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^```sh\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
MARK = "README-BLOCK-DONE"
# A command that fails is told with its text; the shell itself goes on, as a person's would.
STRICT = "set -o pipefail; trap 'echo FAILED: $BASH_COMMAND' ERR\n"


@dataclass
class Shell:
    """One bash, fed block by block as somebody who copies them would."""

    process: subprocess.Popen[str]
    said: list[str] = field(default_factory=list)

    def run(self, commands: str) -> str:
        """What the shell shows until the commands are done."""
        self._stdin.write(f"{commands}\necho {MARK}\n")
        self._stdin.flush()
        lines: list[str] = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            # What runs in the background may have left its own line open.
            if line.rstrip().endswith(MARK):
                break
            lines.append(line)
        shown = "".join(lines)
        self.said.append(shown)
        assert "FAILED:" not in shown, f"{commands}\n{''.join(self.said)}"
        return shown

    def value(self, name: str) -> str:
        """A variable that a block has set."""
        (line,) = re.findall(rf"^{name}=(.*)$", self.run(f'echo "{name}=${name}"'), re.MULTILINE)
        return str(line)

    def close(self) -> None:
        with suppress(BrokenPipeError):
            self._stdin.write("kill $(jobs -p); wait; exit 0\n")
            self._stdin.flush()
        self.process.communicate(timeout=PATIENCE_S)

    @property
    def _stdin(self) -> IO[str]:
        assert self.process.stdin is not None
        return self.process.stdin


@pytest.fixture
def own_service(memory: Path) -> Iterator[Service]:
    """A service that nobody else has made rooms in."""
    with running(memory) as service:
        yield service


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A folder like `.venv/bin`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, run in (("rooms", f'"{sys.executable}" -m rooms'), ("python3", f'"{sys.executable}"')):
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec {run} "$@"\n')
        script.chmod(0o755)
    return folder


@pytest.fixture
def shell(tmp_path: Path, own_service: Service) -> Iterator[Shell]:
    bash = shutil.which("bash")
    assert bash is not None
    process = subprocess.Popen(
        [bash, "--noprofile", "--norc"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env=environment_of(own_service.data, own_service.port),
    )
    shell = Shell(process)
    shell.run(STRICT)
    yield shell
    shell.close()


def answers(port: int) -> bool:
    with suppress(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
        return True
    return False


def test_the_two_commands_at_the_top_are_targets_of_the_makefile() -> None:
    shown = re.findall(r"^make ([a-z]+)\s", README, re.MULTILINE)
    assert shown[:2] == ["run", "test"]
    targets = re.findall(r"^([a-z0-9-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = set(re.findall(r"`make ([a-z-]+)`", README))
    assert {*shown, *named} <= set(targets)


def test_every_setting_in_the_table_is_read() -> None:
    shown = set(re.findall(r"`(ROOMS_[A-Z_]+|[A-Z]+_URL)`", README))
    read = set(re.findall(r'"(ROOMS_[A-Z_]+|[A-Z]+_URL)"', (ROOT / "rooms/settings.py").read_text()))
    assert read - shown == set()
    assert shown - read == set()


def test_the_five_minute_tour(own_service: Service, shell: Shell, commands: Path) -> None:
    """Each command succeeds, and what the text says of its outcome is so."""
    port = free_port()
    substitutes = {
        "$PWD/.venv/bin": str(commands),
        "127.0.0.1:8080": f"127.0.0.1:{own_service.port}",
        ".rooms/api-key": str(own_service.data / "api-key"),
        "9000": str(port),
    }
    assert len(COMMANDS) > 5
    message = ""
    for block in COMMANDS:
        # All at once: what is put in may look like what is to be replaced.
        said = shell.run(re.sub("|".join(map(re.escape, substitutes)), lambda found: substitutes[found[0]], block))
        if "rooms listen" in block:
            until(lambda: answers(port), "the receiver")
        if "rooms journey" in block:
            message = shell.value("MESSAGE")
            three_attempts(own_service, shell, message)
        if "/ack" in block:
            both_delivered(said)
        if "rooms room list" in block:
            assert re.search(r"\binvoices\b", said)
            assert re.search(r"\borders\b", said)
            assert "invoice.sent" in said
    assert message


def three_attempts(service: Service, shell: Shell, message: str) -> None:
    """Watch the webhook come three times: at once, after 500 ms and 1 s later."""

    def pushed() -> list[dict[str, object]]:
        items = service.get(f"/messages/{message}/journey")["items"]
        return items if any(step["kind"] == "delivered" for step in items) else []

    steps = until(pushed, "the webhook's success")
    tried = [(step["attempt"], step["delay_ms"], step["http_status"]) for step in steps if step["kind"] == "attempted"]
    assert tried == [(0, 0, 503), (1, 500, 503), (2, 1000, 200)]
    table = shell.run(f"rooms journey {message}")
    assert [table.count(word) for word in ("attempted", "retry_scheduled")] == [3, 2]


def both_delivered(said: str) -> None:
    deliveries = json.loads(said.strip().splitlines()[-1])["items"]
    assert [delivery["state"] for delivery in deliveries] == ["delivered", "delivered"]
    acked = json.loads(said.strip().splitlines()[-2])["results"]
    assert [result["status"] for result in acked] == ["acked"]


def test_the_api_that_the_table_lists_is_there(service: Service) -> None:
    document = service.http.get("/schema/openapi.json").json()
    paths = set(document["paths"])
    for path in ("/rooms", "/rooms/{id}", "/subscriptions/{id}", "/messages/{id}", "/deliveries/{id}/redeliver"):
        pattern = re.compile("/v1" + re.sub(r"\\\{id\\\}", r"\\{[a-z_]+\\}", re.escape(path)))
        assert any(pattern.fullmatch(known) for known in paths), path
    assert {"/health/live", "/health/ready", "/metrics"} <= paths
    assert service.http.get("/schema").status_code == httpx.codes.OK
