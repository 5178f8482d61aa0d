"""Every suite of attacks, by name."""

from collections.abc import Mapping
from typing import Final

from tests.faults.hostile.suite import Suite

_ALL: Final[tuple[Suite, ...]] = ()
SUITES: Final[Mapping[str, Suite]] = {suite.name: suite for suite in _ALL}
