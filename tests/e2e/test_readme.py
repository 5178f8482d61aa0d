"""Every command that README.md shows, in its order, in one shell, against a service of its own; and what it says of them."""

import importlib.util
import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from standardwebhooks.webhooks import Webhook

from rooms.settings import RENAMED
from tests.support.docs_shell import DocsShell, docs_shell, steps
from tests.support.polling import until
from tests.support.service import ROOT, Service, running

README = (ROOT / "README.md").read_text()


def test_the_two_commands_at_the_top_are_targets_of_the_makefile() -> None:
    shown = re.findall(r"^make ([a-z]+)\s", README, re.MULTILINE)
    assert shown == ["run", "test"]
    targets = re.findall(r"^([a-z0-9-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {*shown, *re.findall(r"`make ([a-z-]+)`", README)} <= set(targets)


def test_the_tour(memory: Path, tmp_path: Path) -> None:
    """Each command succeeds, and what the text says of its outcome is so."""
    with running(memory) as service, docs_shell(service, tmp_path) as shell:
        for step in steps(README):
            shown = shell.do(step)
            if "rooms publish" in step.commands:
                three_attempts(service)
            if "rooms pull" in step.commands:
                assert "order.created" in shown
                both_delivered(service)
        verifies(shell)


def three_attempts(service: Service) -> None:
    """The webhook comes at once, after 500 ms, and 1 s later."""
    room = service.get("/rooms?name=orders")["items"][0]["id"]
    message = service.get(f"/rooms/{room}/messages?id=order-17")["items"][0]["id"]

    def pushed() -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = service.get(f"/messages/{message}/journey")["items"]
        return items if any(step["kind"] == "delivered" for step in items) else []

    attempts = [
        step for step in until(pushed, "the webhook's success") if step["kind"] == "attempted"
    ]
    tried = [(step["attempt"], step["delay_ms"], step["http_status"]) for step in attempts]
    assert tried == [(0, 0, 503), (1, 500, 503), (2, 1000, 200)]


def both_delivered(service: Service) -> None:
    room = service.get("/rooms?name=orders")["items"][0]["id"]
    message = service.get(f"/rooms/{room}/messages?id=order-17")["items"][0]["id"]
    deliveries = service.get(f"/messages/{message}/deliveries")["items"]
    assert [delivery["state"] for delivery in deliveries] == ["delivered", "delivered"]


def verifies(shell: DocsShell) -> None:
    """The ten lines accept what a library of Standard Webhooks signs, and nothing else."""
    spec = importlib.util.spec_from_file_location(
        "webhooks_of_readme", shell.folder / "webhooks.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    secret, body = "whsec_" + "QUJD" * 10 + "QUI=", b'{"id": 17}'

    def headers(at: float) -> dict[str, str]:
        when = datetime.fromtimestamp(int(at), UTC)
        signature = Webhook(secret).sign("msg_1", when, body.decode())
        return {
            "webhook-id": "msg_1",
            "webhook-timestamp": str(int(at)),
            "webhook-signature": f"v1,AAAA {signature}",
        }

    module.verify(secret, headers(time.time()), body)
    for wrong, sent in ((headers(time.time()), b'{"id": 18}'), (headers(time.time() - 600), body)):
        with pytest.raises(ValueError, match=r"the (signature is wrong|timestamp is too old)"):
            module.verify(secret, wrong, sent)


def test_the_settings_page_lists_every_setting() -> None:
    shown = set(
        re.findall(
            r"^\| `((?:ROOMS_[A-Z_]+|[A-Z]+_URL))` \|",
            (ROOT / "docs/reference/settings.md").read_text(),
            re.MULTILINE,
        )
    )
    read = set(
        re.findall(r'"(ROOMS_[A-Z_]*[A-Z]|[A-Z]+_URL)"', (ROOT / "rooms/settings.py").read_text())
    )
    assert read - shown == set(RENAMED)


def test_the_api_that_the_pages_describe_is_there(service: Service) -> None:
    paths = set(service.http.get("/schema/openapi.json").json()["paths"])
    for path in (
        "/rooms",
        "/rooms/{id}",
        "/subscriptions/{id}",
        "/messages/{id}",
        "/deliveries/{id}/redeliver",
    ):
        pattern = re.compile("/v1" + re.sub(r"\\\{id\\\}", r"\\{[a-z_]+\\}", re.escape(path)))
        assert any(pattern.fullmatch(known) for known in paths), path
    assert {"/health/live", "/health/ready", "/metrics"} <= paths
    assert service.http.get("/schema").status_code == 200
