"""Test how a process fails to start: one line for an outage, a traceback for a bug."""

import pytest

from rooms.app.process import first_transient
from rooms.errors import BrokerUnavailableError, NotFoundError, StorageUnavailableError

AWAY = StorageUnavailableError("connection refused")


@pytest.mark.parametrize(
    "group",
    [
        BaseExceptionGroup("parts", [AWAY]),
        BaseExceptionGroup(
            "parts", [BaseExceptionGroup("inner", [AWAY]), BrokerUnavailableError("reset")]
        ),
    ],
)
def test_outages_of_parts_are_one_error(group: BaseExceptionGroup[BaseException]) -> None:
    assert first_transient(group) is AWAY


@pytest.mark.parametrize(
    "other", [ValueError("a bug"), NotFoundError("nothing"), KeyboardInterrupt()]
)
def test_other_errors_keep_the_whole_group(other: BaseException) -> None:
    assert first_transient(BaseExceptionGroup("parts", [AWAY, other])) is None
    assert first_transient(BaseExceptionGroup("parts", [other])) is None
