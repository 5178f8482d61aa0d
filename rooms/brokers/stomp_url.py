"""`stomp://user:password@a:61613,b:61613?heartbeat_ms=5000`: one broker and its backups; `stomps://` is the same by TLS."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, unquote

DEFAULT_PORT: Final = 61613
NUMBERS: Final[Mapping[str, tuple[int, int, int]]] = {
    "connect_timeout_ms": (5_000, 100, 60_000),
    "heartbeat_ms": (5_000, 250, 30_000),
    "receipt_timeout_ms": (30_000, 1_000, 300_000),
}
"""Parameters that are whole numbers: default, least, most."""
TLS: Final = ("ca", "certificate", "key", "verify")
_ADDRESS: Final = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<name>[^\s:/@\[\],]+))(?::(?P<port>[0-9]{1,5}))?")
_CONTROL: Final = re.compile(r"[\x00-\x1f]")
_LAST_PORT: Final = 65_535
_WHOLE: Final = re.compile("[0-9]{1,9}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StompUrl:
    """Where a broker is and how to talk to it. `hosts` are tried in their order."""

    hosts: tuple[tuple[str, int], ...]
    user: str
    password: str
    tls: bool
    ca: str | None
    """PEM file of the authorities to trust; None: the system's."""
    certificate: str | None
    key: str | None
    verify: bool
    connect_timeout_ms: int
    heartbeat_ms: int
    """How often each side shows that it lives; a side that is silent for twice as long is given up."""
    receipt_timeout_ms: int
    """How long a broker that lives may leave a request unanswered."""


def valid_parameters(scheme: str) -> tuple[str, ...]:
    """The query parameters that a scheme knows."""
    return (*NUMBERS, *TLS) if scheme == "stomps" else tuple(NUMBERS)


class StompUrlError(ValueError):
    """`problems` says everything that is wrong with a URL, no password in it."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def _address(text: str) -> tuple[str, int] | None:
    found = _ADDRESS.fullmatch(text)
    if found is None:
        return None
    port = int(found["port"] or DEFAULT_PORT)
    return (found["six"] or found["name"], port) if 0 < port <= _LAST_PORT else None


def _hosts(places: str, problems: list[str]) -> tuple[tuple[str, int], ...]:
    found = [(place, _address(place)) for place in places.removesuffix("/").split(",")]
    problems += [
        f"has no HOST:PORT in {place!r}; brokers are listed as a:{DEFAULT_PORT},b:{DEFAULT_PORT}"
        for place, host in found
        if host is None
    ]
    return tuple(host for _, host in found if host is not None)


def _parameters(query: str, known: tuple[str, ...], problems: list[str]) -> dict[str, str]:
    pairs = parse_qsl(query, keep_blank_values=True)
    given = dict(pairs)
    if len(given) != len(pairs):
        problems.append("has a parameter twice")
    if unknown := sorted(set(given) - set(known)):
        problems.append(
            f"has the parameter {', '.join(unknown)}, which means nothing; valid here: {', '.join(sorted(known))}"
        )
    return {name: value for name, value in given.items() if name in known}


def _numbers(given: Mapping[str, str], problems: list[str]) -> dict[str, int]:
    found = {}
    for name, (default, low, high) in NUMBERS.items():
        text = given.get(name, str(default))
        found[name] = int(text) if _WHOLE.fullmatch(text) else -1
        if not low <= found[name] <= high:
            problems.append(f"has {name}={text!r}, which is not a whole number from {low} to {high}")
    return found


def _tls_problems(given: Mapping[str, str]) -> Iterator[str]:
    if given.get("verify", "true") not in {"true", "false"}:
        yield "has a verify that is neither true nor false"
    if "key" in given and "certificate" not in given:
        yield "has a key without its certificate"
    for name in ("ca", "certificate", "key"):
        if name in given and not Path(given[name]).is_file():
            yield f"names a {name} that is no file: {given[name]}"


def parse_stomp_url(url: str) -> StompUrl:
    """The parts of `url`; StompUrlError lists every problem."""
    problems: list[str] = []
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    before, _, query = rest.partition("?")
    login, _, places = before.rpartition("@")
    user, _, password = (unquote(part) for part in login.partition(":"))
    hosts = _hosts(places, problems)
    if _CONTROL.search(user + password):
        problems.append("has a control character in its user or password")
    given = _parameters(query, valid_parameters(scheme), problems)
    numbers = _numbers(given, problems)
    problems += _tls_problems(given)
    if problems:
        raise StompUrlError(problems)
    return StompUrl(
        hosts=hosts,
        user=user,
        password=password,
        tls=scheme == "stomps",
        ca=given.get("ca"),
        certificate=given.get("certificate"),
        key=given.get("key"),
        verify=given.get("verify", "true") == "true",
        **numbers,
    )
