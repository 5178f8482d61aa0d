"""Where a ZooKeeper is, and how it is to be talked to, as a URL says it."""

from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

STANDBY_SESSION_S: Final = 3.0
"""The session of a standby: ZooKeeper ends it within a tick more (500 ms where Rooms starts it)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """`zookeeper://user:password@h1:2181,h2:2181/root?session_s=10&refresh_s=30`.

    `root`: the path under which installations have theirs; `session_s`: the silence after which the server ends a
    session, as far as it agrees; `refresh_s`: between two refreshes of all assignments.
    """

    hosts: str
    root: str = ""
    user: str | None = None
    password: str = ""
    session_s: float = 10.0
    refresh_s: float = 30.0


def read_address(url: str) -> Address:
    """The address in a URL that the settings have let pass."""
    parts = urlsplit(url)
    login, _, hosts = parts.netloc.rpartition("@")
    user, _, password = login.partition(":")
    numbers = {key: float(value) for key, value in parse_qsl(parts.query)}
    return Address(
        hosts=hosts, root=parts.path.rstrip("/"), user=unquote(user) or None, password=unquote(password), **numbers
    )


def for_standby(url: str) -> str:
    """Return an election's URL whose session is short enough for a standby, unless the URL says how long it is."""
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    if parts.scheme != "zookeeper" or "session_s" in query:
        return url
    return parts._replace(query=urlencode({**query, "session_s": f"{STANDBY_SESSION_S:g}"})).geturl()
