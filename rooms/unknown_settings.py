"""Find variables that look like settings and are none: a misspelt one has no effect, unseen."""

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Final

from rooms.settings import RENAMED, read_settings

_PREFIX: Final = "ROOMS_"
_OTHERS: Final = frozenset(
    {"ROOMS_URL", "ROOMS_API_KEY", "ROOMS_CACHE", "ROOMS_SUPERVISED"}
    | {"ROOMS_PASSWORD", "ROOMS_TLS_FILES"}
)
"""Variables of the command line, of the supervisor, and of the compose files."""
_OF_TESTS: Final = frozenset({"ROOMS_NGINX", "ROOMS_PROMTOOL"})
_OF_KUBERNETES: Final = re.compile(
    r"ROOMS_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)"
)
"""It sets these, and a `…_PORT` that is an address, where a service is named `rooms…`."""
_ADDRESS: Final = re.compile(r"(tcp|udp|sctp)://")
_SIMILAR: Final = 0.7


class _Recorder(Mapping[str, str]):
    """Record which variables are asked for; none is set."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> str:
        self.names.add(name)
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def unknown_settings(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each variable `ROOMS_…` that nothing reads, in their order."""
    recorder = _Recorder()
    read_settings(recorder)
    known = (recorder.names - RENAMED.keys()) | _OTHERS
    for name, value in sorted(environment.items()):
        if (
            not name.startswith(_PREFIX)
            or name in known | _OF_TESTS
            or _OF_KUBERNETES.fullmatch(name)
            or (name.endswith("_PORT") and _ADDRESS.match(value))
        ):
            continue
        similar = get_close_matches(name, known, n=1, cutoff=_SIMILAR)
        meant = f"; is {similar[0]} meant?" if similar else ""
        yield f"{name} is no setting, and has no effect{meant}"
