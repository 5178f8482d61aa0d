"""Every suite of attacks, by name."""

from collections.abc import Mapping
from typing import Final

from tests.faults.hostile import (
    aerospike_answers,
    answers,
    authorisation,
    bodies,
    dns_answers,
    filters,
    names,
    requests,
    schemas,
)
from tests.faults.hostile.suite import Suite

_ALL: Final[tuple[Suite, ...]] = (
    aerospike_answers.SUITE,
    answers.SUITE,
    authorisation.SUITE,
    bodies.SUITE,
    dns_answers.SUITE,
    filters.SUITE,
    names.SUITE,
    requests.SUITE,
    schemas.SUITE,
)
SUITES: Final[Mapping[str, Suite]] = {suite.name: suite for suite in _ALL}
