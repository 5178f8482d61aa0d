"""The worked example of the guide to handler queues: what the text says becomes of the four messages, becomes of them."""

from pathlib import Path

import httpx

from tests.support.docs_shell import docs_shell, steps
from tests.support.polling import until
from tests.support.service import ROOT, Service, running

PAGE = ROOT / "docs/guides/handler-queues.md"


def depth(service: Service, magazine: str) -> int:
    found: int = service.get(f"/magazines/{magazine}")["depth"]
    return found


def test_the_worked_example(memory: Path, tmp_path: Path) -> None:
    """Two of the four messages end in the sideline; a one-shot shovel brings them back, and they fail again."""
    checked = set()
    with running(memory) as service, docs_shell(service, tmp_path) as shell:
        for step in steps(PAGE.read_text()):
            shell.do(step)
            if "queue send orders" in step.commands:
                until(
                    lambda: (
                        depth(service, "orders") == 0 and depth(service, "orders_SIDELINE") == 2
                    ),
                    "the four to end",
                )
                checked.add("sent")
            if "--one-shot" in step.commands:
                until(lambda: service.get("/queues/orders")["shovel"] is None, "the one pass")
                assert service.get("/magazines/orders_SIDELINE")["counters"]["deleted"] >= 2
                until(lambda: depth(service, "orders_SIDELINE") == 2, "both to have failed again")
                checked.add("shoveled")
        assert service.http.get("/queues/orders").status_code == httpx.codes.NOT_FOUND
    assert checked == {"sent", "shoveled"}
