"""The worked example of docs/handlers.md, in its order, against a running service."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.test_readme import STRICT, Shell
from tests.service import ROOT, Service, environment_of
from tests.waiting import until

PAGE = (ROOT / "docs/handlers.md").read_text()
BLOCKS = re.findall(r"^```(sh|python)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture
def shell(tmp_path: Path, service: Service) -> Iterator[Shell]:
    bash = shutil.which("bash")
    assert bash is not None
    script = tmp_path / "rooms"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m rooms "$@"\n')
    script.chmod(0o755)
    environment = environment_of(service.data, service.port)
    process = subprocess.Popen(
        [bash, "--noprofile", "--norc"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env=environment | {"PATH": f"{tmp_path}:{environment['PATH']}"},
    )
    shell = Shell(process)
    shell.run(STRICT)
    yield shell
    shell.close()


def depth(service: Service, magazine: str) -> int:
    found: int = service.get(f"/magazines/{magazine}")["depth"]
    return found


@pytest.mark.row("B2")
@pytest.mark.row("B5")
def test_the_worked_example(service: Service, shell: Shell, tmp_path: Path) -> None:
    """What the text says becomes of the four messages, becomes of them."""
    assert len(BLOCKS) == 6
    for kind, block in BLOCKS:
        if kind == "python":
            (tmp_path / "shop.py").write_text(block)
            continue
        shell.run(block)
        if "queue send" in block:
            until(lambda: depth(service, "orders") == 0 and depth(service, "orders_SIDELINE") == 2, "the four to end")
        if "--one-shot" in block:
            until(lambda: service.get("/queues/orders")["shovel"] is None, "the one pass")
            shards = service.get("/magazines/orders_SIDELINE")["counters"]
            assert shards["deleted"] >= 2
            until(lambda: depth(service, "orders_SIDELINE") == 2, "both to have failed again")
    assert service.http.get("/queues/orders").status_code == httpx.codes.NOT_FOUND
