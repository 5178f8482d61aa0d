"""Test the source of a test's server: the environment, a local start, a container, or none."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from rooms.local import MissingError
from tests.support import servers


@contextmanager
def started() -> Iterator[str]:
    yield "here"


@contextmanager
def contained() -> Iterator[str]:
    yield "contained"


def lacking() -> AbstractContextManager[str]:
    raise MissingError("no Java")


@pytest.fixture(autouse=True)
def no_docker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("THING_URL", raising=False)
    monkeypatch.setattr(servers, "docker_answers", lambda: False)


def offer(local: servers.Opener) -> str:
    return next(servers.offered("THING_URL", local=local, container=contained))


def test_the_environments_server_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THING_URL", "there")
    assert offer(lacking) == "there"


def test_then_one_that_is_started_here() -> None:
    assert offer(started) == "here"


def test_then_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "docker_answers", lambda: True)
    assert offer(lacking) == "contained"


def test_without_any_the_test_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(
        pytest.skip.Exception, match=r"no Java\. Or name a server in THING_URL, or start Docker"
    ):
        offer(lacking)


def test_in_ci_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no Java"):
        offer(lacking)
