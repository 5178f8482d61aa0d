"""Test how the parts of one process share the files that the system allows it."""

import subprocess
import sys
from typing import Final

import pytest

from rooms.app.api import file_need, queue_file_need
from rooms.app.file_limit import allot_connections
from rooms.app.worker import FILE_NEED
from rooms.settings import read_settings

SPARE = 256 + 128


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [(1 << 20, [8192, 8192]), (8448, [4032, 4032]), (1024, [320, 320]), (100, [2, 2])],
)
def test_api_and_worker_of_one_process_have_no_more_connections_than_files(
    monkeypatch: pytest.MonkeyPatch, allowed: int, expected: list[int]
) -> None:
    asked: list[int] = []

    def raised(wanted: int) -> int:
        asked.append(wanted)
        return min(wanted, allowed)

    monkeypatch.setattr("rooms.app.file_limit.raise_file_limit", raised)
    found = allot_connections(file_need(read_settings({})), FILE_NEED)
    assert found == expected
    assert asked == [2 * 8192 + SPARE], "the limit is raised for both"


def test_each_part_gets_as_large_a_fraction_of_what_it_wants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rooms.app.file_limit.raise_file_limit", lambda _wanted: SPARE + 5096)
    settings = read_settings({"ROOMS_MAX_CONNECTIONS": "2000"})
    assert allot_connections(file_need(settings), FILE_NEED) == [1000, 4096]


@pytest.mark.parametrize(("allowed", "warned"), [(1024, False), (384, True)])
def test_few_files_are_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    allowed: int,
    warned: bool,
) -> None:
    monkeypatch.setattr("rooms.app.file_limit.raise_file_limit", lambda _wanted: allowed)
    allot_connections(file_need(read_settings({})), FILE_NEED)
    found = [record.getMessage() for record in caplog.records]
    assert len(found) == warned
    if warned:
        assert "have 2 and 2 connections each" in found[0]
        assert f"raise the limit (`ulimit -Hn`) to {2 * 8192 + SPARE}" in found[0]


@pytest.mark.parametrize(
    ("allowed", "expected"), [(1 << 20, [8192, 2000, 8192]), (8448, [3593, 877, 3593])]
)
def test_open_queues_of_an_external_broker_share_the_files(
    monkeypatch: pytest.MonkeyPatch, allowed: int, expected: list[int]
) -> None:
    """Each is a connection. With PostgreSQL as broker there are none."""
    monkeypatch.setattr(
        "rooms.app.file_limit.raise_file_limit", lambda wanted: min(wanted, allowed)
    )
    settings = read_settings({"BROKER_URL": "stomp://u:p@127.0.0.1:61613"})
    assert allot_connections(file_need(settings), queue_file_need(settings), FILE_NEED) == expected
    embedded = read_settings({})
    assert allot_connections(file_need(embedded), queue_file_need(embedded), FILE_NEED)[1] == 0


RAISED: Final = """
import resource
from rooms.app.file_limit import raise_file_limit

_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, min(hard, 1000)))
print(raise_file_limit(500), *resource.getrlimit(resource.RLIMIT_NOFILE))
print(raise_file_limit(5000), *resource.getrlimit(resource.RLIMIT_NOFILE))
print(raise_file_limit(10), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_the_limit_of_the_process_is_raised_as_far_as_the_system_allows() -> None:
    """Check it in a process of its own: a lowered hard limit cannot be raised again."""
    done = subprocess.run(
        [sys.executable, "-c", RAISED], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["500 500 1000", "1000 1000 1000", "1000 1000 1000"]
