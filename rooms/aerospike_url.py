"""`aerospike://user:password@h1:3000,h2:3000/namespace?retries=3`: seeds of one cluster, and how to talk to it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, unquote

DEFAULT_PORT: Final = 3000
SCHEME: Final = "aerospike"
NUMBERS: Final[Mapping[str, tuple[int, int, int]]] = {
    "retries": (3, 0, 100),
    "sleep_ms": (100, 0, 60_000),
    "socket_timeout_ms": (3_000, 10, 300_000),
    "total_timeout_ms": (5_000, 10, 300_000),
    "connections": (100, 1, 10_000),
    "threads": (0, 0, 1_000),
    "mark_s": (3_600, 1_200, 604_800),
}
"""Parameters that are whole numbers: default, least, most. threads 0: four for each processor. mark_s: how long a slot that
is done, or that was passed while it was empty, is remembered as such."""
WORDS: Final = ("tls", "tls_name", "ca", "certificate", "key")
_ADDRESS: Final = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<name>[^\s:/@\[\],]+))(?::(?P<port>[0-9]{1,5}))?")
_NAMESPACE: Final = re.compile(r"[A-Za-z0-9_\-$]{1,31}")
_LAST_PORT: Final = 65_535


@dataclass(frozen=True, slots=True, kw_only=True)
class AerospikeUrl:
    """Where a cluster is. TLS and credentials are an Enterprise server's; with credentials TLS is on unless said otherwise."""

    hosts: tuple[tuple[str, int], ...]
    namespace: str
    user: str
    password: str
    tls: bool
    tls_name: str | None
    ca: str | None
    certificate: str | None
    key: str | None
    retries: int
    sleep_ms: int
    socket_timeout_ms: int
    total_timeout_ms: int
    connections: int
    threads: int
    mark_s: int


class AerospikeUrlError(ValueError):
    """`problems` says everything that is wrong with a URL, no password in it."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def _hosts(text: str, problems: list[str]) -> tuple[tuple[str, int], ...]:
    hosts = []
    for place in text.split(","):
        found = _ADDRESS.fullmatch(place)
        port = int(found["port"] or DEFAULT_PORT) if found else 0
        if found is None or not 0 < port <= _LAST_PORT:
            problems.append(f"has no HOST:PORT in {place!r}; nodes are listed as a:{DEFAULT_PORT},b:{DEFAULT_PORT}")
        else:
            hosts.append((found["six"] or found["name"], port))
    return tuple(hosts)


def _numbers(given: Mapping[str, str], problems: list[str]) -> dict[str, int]:
    numbers = {}
    for name, (default, low, high) in NUMBERS.items():
        text = given.get(name, str(default))
        numbers[name] = int(text) if re.fullmatch("[0-9]{1,9}", text) else -1
        if not low <= numbers[name] <= high:
            problems.append(f"has {name}={text!r}, which is not a whole number from {low} to {high}")
    return numbers


def parse_aerospike_url(url: str) -> AerospikeUrl:
    """The parts of `url`; AerospikeUrlError lists every problem."""
    problems: list[str] = []
    before, _, query = url.partition("://")[2].partition("?")
    login, at, rest = before.rpartition("@")
    places, _, namespace = rest.partition("/")
    user, _, password = login.partition(":")
    hosts = _hosts(places, problems)
    if not _NAMESPACE.fullmatch(namespace):
        problems.append(
            f"names no namespace: {SCHEME}://HOST:PORT/NAMESPACE, of up to 31 letters, digits, '_', '-', '$'"
        )
    pairs = parse_qsl(query, keep_blank_values=True)
    given = dict(pairs)
    known = (*NUMBERS, *WORDS)
    if unknown := sorted(set(given) - set(known)):
        problems.append(
            f"has the parameter {', '.join(unknown)}, which means nothing; valid here: {', '.join(sorted(known))}"
        )
    if len(given) != len(pairs):
        problems.append("has a parameter twice")
    numbers = _numbers(given, problems)
    if given.get("tls", "true") not in {"true", "false"}:
        problems.append("has a tls that is neither true nor false")
    if "key" in given and "certificate" not in given:
        problems.append("has a key without its certificate")
    problems += [
        f"names a {name} that is no file: {given[name]}"
        for name in ("ca", "certificate", "key")
        if name in given and not Path(given[name]).is_file()
    ]
    if problems:
        raise AerospikeUrlError(problems)
    return AerospikeUrl(
        hosts=hosts,
        namespace=namespace,
        user=unquote(user) if at else "",
        password=unquote(password),
        tls=given.get("tls", "true" if at else "false") == "true",
        tls_name=given.get("tls_name"),
        ca=given.get("ca"),
        certificate=given.get("certificate"),
        key=given.get("key"),
        **numbers,
    )
