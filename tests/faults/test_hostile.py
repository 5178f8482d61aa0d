"""Every suite of attacks, a fixed number of cases each.

What must hold after each case: the process answers, nothing it holds has leaked, no answer is a 5xx, and the event loop was
never held up. Each suite's target says what it checks.
"""

import pytest

from tests.faults.hostile.suite import attack
from tests.faults.hostile.suites import SUITES

SEED = 20261122


@pytest.mark.parametrize("name", list(SUITES))
async def test_nothing_that_is_sent_breaks_a_promise(name: str, database: str) -> None:
    suite = SUITES[name]
    outcomes = await attack(suite, database, seed=SEED, cases=suite.cases)
    assert outcomes.total() == suite.cases
