"""Find variables that look like settings and are none: a misspelt one has no effect, unseen."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Final

from rooms.settings import read_settings

_PREFIX: Final = "ROOMS_"
_OTHERS: Final = frozenset(
    {"ROOMS_URL", "ROOMS_API_KEY", "ROOMS_CACHE", "ROOMS_SUPERVISED"}
    | {"ROOMS_PASSWORD", "ROOMS_TLS_FILES"}
)
"""Variables of the command line, of the supervisor, and of the compose files."""
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
    known = recorder.names | _OTHERS
    for name in sorted(environment):
        if name.startswith(_PREFIX) and name not in known:
            similar = get_close_matches(name, recorder.names, n=1, cutoff=_SIMILAR)
            meant = f"; is {similar[0]} meant?" if similar else ""
            yield f"{name} is no setting, and has no effect{meant}"
