"""What retention says it would do, beside what it does."""

import asyncio
from datetime import timedelta
from pathlib import Path

import pytest

from rooms.domain.states import State
from rooms.metrics import Metrics
from rooms.upkeep.outlook import Fate, outlook
from rooms.upkeep.retention import Retention, Rules
from tests.installation import Installation
from tests.past import DAY, NOW, At, left_over, make_days, partitions, write
from tests.terminal import Terminal

DAYS = [DAY + timedelta(days=ahead) for ahead in range(4)]
LABELS = [f"{day:%Y%m%d}" for day in DAYS]


@pytest.fixture
async def days(installation: Installation) -> None:
    """One that goes, one that shrinks, one that is left, one that is empty."""
    make_days(installation.url, *DAYS)
    subscription = await installation.subscribe()
    for day, states in zip(
        DAYS,
        (
            [State.DELIVERED, State.EXPIRED],
            [State.DELIVERED, State.CANCELLED, State.SIDELINED],
            [State.DELIVERED, State.SIDELINED, State.QUEUED],
            [],
        ),
        strict=True,
    ):
        for state in states:
            await write(installation, subscription, state, born=day)


async def told(
    installation: Installation, *, days: int = 30, destination: str | None = None
) -> dict[str, tuple[int, int, str]]:
    found = await outlook(installation.url, days=days, destination=destination)
    assert [one.label for one in found] == sorted(one.label for one in found)
    return {one.label: (one.deliveries, one.stay, one.fate) for one in found}


@pytest.mark.usefixtures("days")
async def test_it_says_what_is_done_then(installation: Installation) -> None:
    expected = [(2, 0, Fate.GOES), (3, 1, Fate.SHRINKS), (3, 2, Fate.STAYS), (0, 0, Fate.GOES)]
    assert await told(installation) == dict(zip(LABELS, expected, strict=True))
    assert await left_over(installation) == []
    await Retention(installation.url, Rules(days=30, pauses_s=()), At(NOW), Metrics()).run(lambda: True)
    assert await partitions(installation) == [f"deliveries_{LABELS[1]}_kept1", f"deliveries_{LABELS[2]}"]
    (remains,) = [one for one in await outlook(installation.url, days=30, destination=None) if one.kept]
    assert (remains.label, remains.deliveries, remains.stay, remains.fate) == (LABELS[1], 1, 1, Fate.STAYS)


@pytest.mark.usefixtures("days")
async def test_what_is_not_old_enough_and_what_has_not_left_is_told(installation: Installation) -> None:
    assert await told(installation, days=5000) == {}
    waiting = await told(installation, destination="nowhere yet")
    assert [waiting[label][2] for label in LABELS] == [Fate.WAITS, Fate.WAITS, Fate.STAYS, Fate.GOES]


@pytest.mark.usefixtures("days")
async def test_the_command_changes_nothing(installation: Installation, tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, {"DATABASE_URL": installation.url})
    shown = await asyncio.to_thread(terminal.json, "retention")
    assert shown["days"] == 30
    assert [(one["label"], one["fate"]) for one in shown["prospects"]] == list(
        zip(LABELS, ["goes", "shrinks", "stays", "goes"], strict=True)
    )
    assert (await asyncio.to_thread(terminal.json, "retention", "--days", "5000"))["prospects"] == []
    lines = (await asyncio.to_thread(terminal.done, "retention")).splitlines()
    assert [line.split() for line in lines if LABELS[1] in line] == [[LABELS[1], "3", "1", "2", "shrinks"]]
    assert "everything is kept" in await asyncio.to_thread(terminal.done, "retention", ROOMS_RETENTION_DAYS="0")
    assert len(await partitions(installation)) == len(DAYS)
