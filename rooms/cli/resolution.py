"""The decision which stores a command works with: what the environment says against what processes have on record."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from rooms.backends import (
    DATABASE,
    STORES,
    VARIABLES,
    ProcessRecord,
    address_of,
    backends_of,
    is_secret,
    running,
    same_address,
)
from rooms.settings import Settings

_EXAMPLES: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """`overrides`: variables to add to the environment; `problems`: why the command must not run; `mixed`: stores that the
    running processes disagree about; `notes`: what the operator should know.
    """

    overrides: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    mixed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def resolve(
    settings: Settings, given: frozenset[str], processes: Sequence[ProcessRecord], local: Mapping[str, str]
) -> Resolution:
    """Compare `settings`, of which the variables `given` stand in the environment, with the processes on record. `local`:
    the variables of ROOMS_DATA/full.env, where the database is the one that it names.
    """
    live = running(processes)
    sources = live or processes
    if not sources:
        return Resolution(
            overrides={one: local[one] for one in VARIABLES.values() if one in local and one not in given}
        )
    ours = backends_of(settings)
    shared = ours.shared or any(one.backends.shared for one in sources)
    found = Resolution()
    for name, variable in VARIABLES.items():
        if not shared and name not in STORES:
            continue
        theirs = _distinct([getattr(one.backends, name) for one in sources])
        mine: str = getattr(ours, name)
        if len(theirs) > 1:
            mixture = f"{variable}: the running processes have {_mixture(sources, name, theirs)}"
            found.mixed.append(mixture)
            if variable not in given or not any(same_address(mine, one) for one in theirs):
                found.problems.append(f"{mixture}. Restart those with the former setting")
        elif same_address(mine, theirs[0]):
            continue
        elif variable in given:
            _contradict(found, variable, mine, theirs[0], live=bool(live), labels=_labels(sources))
        elif variable in local and same_address(address_of(local[variable]), theirs[0]):
            found.overrides[variable] = local[variable]
        elif name not in STORES or (live and not is_secret(theirs[0])):
            found.overrides[variable] = theirs[0]
        else:
            found.problems.append(_missing(variable, theirs[0], sources, live=bool(live)))
    return found


def _missing(variable: str, theirs: str, sources: Sequence[ProcessRecord], *, live: bool) -> str:
    users = "the running processes" if live else "nothing runs now; the last process on record"
    verb = "use" if live else "used"
    return f"{variable} is not set, and {users} ({_labels(sources)}) {verb} {theirs}: set {_wanted(variable, theirs)}"


def _contradict(found: Resolution, variable: str, mine: str, theirs: str, *, live: bool, labels: str) -> None:
    if live:
        found.problems.append(
            f"{variable} is {mine} here, and {theirs} in the running processes ({labels}): set {_wanted(variable, theirs)}, "
            "or restart those with yours"
        )
    else:
        found.notes.append(
            f"nothing runs; the last process ({labels}) had {variable}={theirs}, this command has {mine}"
        )


def _wanted(variable: str, address: str) -> str:
    if address == DATABASE:
        return f"{variable} to nothing"
    login = ", with the user, password or files that stand for ***" if is_secret(address) else ""
    return f"{variable}={address}{login}"


def _distinct(addresses: Sequence[str]) -> list[str]:
    found: list[str] = []
    for address in addresses:
        if not any(same_address(address, one) for one in found):
            found.append(address)
    return found


def _mixture(processes: Sequence[ProcessRecord], name: str, addresses: Sequence[str]) -> str:
    return " and ".join(
        f"{address} ({_labels([one for one in processes if same_address(getattr(one.backends, name), address)])})"
        for address in addresses
    )


def _labels(processes: Sequence[ProcessRecord]) -> str:
    more = len(processes) - _EXAMPLES
    return ", ".join(one.label for one in processes[:_EXAMPLES]) + (f" and {more} more" if more > 0 else "")
