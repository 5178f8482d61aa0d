"""What a process ends with that could not start: one line where only a part was away, a traceback for anything else."""

import pytest

from rooms.composition.process import only_transient
from rooms.errors import BrokerUnavailableError, NotFoundError, StorageUnavailableError

AWAY = StorageUnavailableError("connection refused")


@pytest.mark.parametrize(
    "group",
    [
        BaseExceptionGroup("parts", [AWAY]),
        BaseExceptionGroup("parts", [BaseExceptionGroup("inner", [AWAY]), BrokerUnavailableError("reset")]),
    ],
)
def test_parts_that_were_away_are_one_error(group: BaseExceptionGroup[BaseException]) -> None:
    assert only_transient(group) is AWAY


@pytest.mark.parametrize("other", [ValueError("a bug"), NotFoundError("nothing"), KeyboardInterrupt()])
def test_whatever_else_there_is_keeps_the_whole(other: BaseException) -> None:
    assert only_transient(BaseExceptionGroup("parts", [AWAY, other])) is None
    assert only_transient(BaseExceptionGroup("parts", [other])) is None
