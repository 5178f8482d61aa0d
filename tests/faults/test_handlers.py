"""Kill processes that serve handler queues, with messages in their handlers.

Oracle: every accepted message is handled at least once. A message that was not in a handler when
the process died is handled exactly once. Both magazines are empty at the end.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rooms.domain.handler_queue import QueueSettings, ShovelSettings
from rooms.local.services import free_port
from tests.support.handler_queues import NAME, Desk, all_of, desk, messages
from tests.support.polling import PATIENCE_S, until
from tests.support.service import ROOT, environment_of

HANDLERS = """
import pathlib, threading
from delivery.handlers import Handlers, Message

handlers = Handlers()
folder = pathlib.Path(__file__).parent

@handlers.on("orders")
def order(message: Message) -> bool:
    with (folder / "begun").open("a") as file:
        file.write(message.id + "\\n")
    if (folder / "hang").exists():
        threading.Event().wait(600)
    with (folder / "done").open("a") as file:
        file.write(message.id + "\\n")
    return True
"""


def lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


@contextmanager
def serving(folder: Path, database_url: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run `rooms handlers shop` on this database."""
    environment = environment_of(folder, free_port()) | {
        "DATABASE_URL": database_url,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]),
    }
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "rooms", "handlers", "shop:handlers"],
            env=environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


async def test_messages_of_a_killed_process_are_handled_by_another(
    database: str, tmp_path: Path
) -> None:
    (tmp_path / "shop.py").write_text(HANDLERS)
    (tmp_path / "hang").touch()
    async with desk(database) as at:
        await at.queue(
            settings=QueueSettings(shards=2, concurrency=3, sweep_duration_s=1200, shovel=None)
        )
        pair = await at.pair()
        await pair.main.load(messages(*range(20)))
        with serving(tmp_path, database) as process:
            await asyncio.to_thread(
                until, lambda: len(lines(tmp_path / "begun")) == 3, "three handlers to hang"
            )
            process.send_signal(signal.SIGKILL)
            process.wait(PATIENCE_S)
        had = set(lines(tmp_path / "begun"))
        (tmp_path / "hang").unlink()
        await at.changed(sweep_duration_s=-3600, shovel=ShovelSettings(one_shot=True))
        await at.sweeper(first_s=0).run(lambda: True)
        assert {one.entry.id for one in await all_of(pair.sideline)} == had
        await at.shovel().run(lambda: True)
        await at.changed(sweep_duration_s=1200)
        with serving(tmp_path, database) as process:
            await asyncio.to_thread(
                until, lambda: len(lines(tmp_path / "done")) >= 20, "all to be handled"
            )
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0, (tmp_path / "log").read_text()
        assert Counter(lines(tmp_path / "done")) == Counter(f"m-{n}" for n in range(20))
        assert await _left(at) == []


async def test_stopping_process_finishes_its_messages(database: str, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(HANDLERS.replace("wait(600)", "wait(0.5)"))
    (tmp_path / "hang").touch()
    async with desk(database) as at:
        await at.queue()
        pair = await at.pair()
        await pair.main.load(messages(*range(5)))
        with serving(tmp_path, database) as process:
            await asyncio.to_thread(until, lambda: lines(tmp_path / "begun"), "a handler to begin")
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0, (tmp_path / "log").read_text()
        assert sorted(lines(tmp_path / "begun")) == sorted(lines(tmp_path / "done"))
        left = await all_of(pair.main)
        assert len(left) == 5 - len(lines(tmp_path / "done"))
        assert all(one.fire_ts is None for one in left)


async def _left(at: Desk) -> list[str]:
    pair = await at.pair(NAME)
    return [
        one.entry.id for magazine in (pair.main, pair.sideline) for one in await all_of(magazine)
    ]
