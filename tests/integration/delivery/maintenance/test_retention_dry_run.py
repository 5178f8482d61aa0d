"""The preview of retention, compared with retention."""

import asyncio
from datetime import timedelta
from pathlib import Path

import pytest

from delivery.maintenance.retention import Disposition, RetentionRules, RetentionTask, preview
from rooms.domain.state_machine import State
from rooms.metrics import Metrics
from tests.support.cli_runner import Terminal
from tests.support.installation import Installation
from tests.support.old_messages import DAY, NOW, At, left_over, make_days, partitions, write

DAYS = [DAY + timedelta(days=ahead) for ahead in range(4)]
LABELS = [f"{day:%Y%m%d}" for day in DAYS]


@pytest.fixture
async def days(installation: Installation) -> None:
    """Create days that are dropped, shrunk, kept and empty."""
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


async def reported(
    installation: Installation, *, days: int = 30, destination: str | None = None
) -> dict[str, tuple[int, int, str]]:
    found = await preview(installation.url, days=days, destination=destination)
    assert [one.label for one in found] == sorted(one.label for one in found)
    return {one.label: (one.deliveries, one.stay, one.fate) for one in found}


@pytest.mark.usefixtures("days")
async def test_the_preview_matches_retention(installation: Installation) -> None:
    expected = [
        (2, 0, Disposition.DROP),
        (3, 1, Disposition.SHRINK),
        (3, 2, Disposition.KEEP),
        (0, 0, Disposition.DROP),
    ]
    assert await reported(installation) == dict(zip(LABELS, expected, strict=True))
    assert await left_over(installation) == []
    await RetentionTask(
        installation.url, RetentionRules(days=30, pauses_s=()), At(NOW), Metrics()
    ).run(lambda: True)
    assert await partitions(installation) == [
        f"deliveries_{LABELS[1]}_kept1",
        f"deliveries_{LABELS[2]}",
    ]
    (remains,) = [
        one for one in await preview(installation.url, days=30, destination=None) if one.kept
    ]
    assert (remains.label, remains.deliveries, remains.stay, remains.fate) == (
        LABELS[1],
        1,
        1,
        Disposition.KEEP,
    )


@pytest.mark.usefixtures("days")
async def test_the_preview_shows_ranges_that_stay_or_wait(
    installation: Installation,
) -> None:
    assert await reported(installation, days=5000) == {}
    waiting = await reported(installation, destination="nowhere yet")
    assert [waiting[label][2] for label in LABELS] == [
        Disposition.WAIT,
        Disposition.WAIT,
        Disposition.KEEP,
        Disposition.DROP,
    ]


@pytest.mark.usefixtures("days")
async def test_the_command_changes_nothing(installation: Installation, tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, {"DATABASE_URL": installation.url})
    shown = await asyncio.to_thread(terminal.json, "retention")
    assert shown["days"] == 30
    assert [(one["label"], one["fate"]) for one in shown["prospects"]] == list(
        zip(LABELS, ["goes", "shrinks", "stays", "goes"], strict=True)
    )
    assert (await asyncio.to_thread(terminal.json, "retention", "--days", "5000"))[
        "prospects"
    ] == []
    lines = (await asyncio.to_thread(terminal.done, "retention")).splitlines()
    assert [line.split() for line in lines if LABELS[1] in line] == [
        [LABELS[1], "3", "1", "2", "shrinks"]
    ]
    assert "retention is off" in await asyncio.to_thread(
        terminal.done, "retention", ROOMS_RETENTION_DAYS="0"
    )
    assert len(await partitions(installation)) == len(DAYS)
