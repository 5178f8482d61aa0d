"""Read the URLs of PostgreSQL, once for both of its drivers, which disagree about some of them.

    postgresql://user:password@h1:5432,h2:5433/database?sslmode=verify-full

The result holds libpq's parameters as plain text. SQLAlchemy would read a plus in a parameter as a
space, and know one host only.
"""

import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote, unquote

from rooms.backend_urls import BackendUrlError

_FORM: Final = "postgresql://USER:PASSWORD@HOST:5432/DATABASE"
_ENCODE: Final = "in user and password, @ is written as %40, / as %2F and % as %25"
_URL: Final = re.compile(r"(?P<scheme>[A-Za-z+]+)://(?P<rest>.*)", re.DOTALL)
_LOGIN: Final = re.compile(r"(?P<user>[^:/@]*)(?::(?P<password>[^@]*))?@(?P<rest>.*)", re.DOTALL)
_NODE: Final = re.compile(r"(?:\[(?P<six>[^\]/?]*)\]|(?P<name>[^:,\[\]@]*))(?::(?P<port>[^:,@]*))?")
_NAME: Final = re.compile(r"[A-Za-z0-9.\-]+")
_PORT: Final = re.compile("[0-9]{1,5}")
_MAX_PORT: Final = 65_535
_OPTIONS: Final = "options"
_SEVERAL: Final = {"host": ",", "hostaddr": ",", "port": ",", _OPTIONS: " "}
"""Parameters that may be given several times, and what joins their values."""

_BEFORE_SPACE: Final = re.compile(r"(?:(?:^|\s)(?:-c)?|\\)$")
_AFTER_SPACE: Final = re.compile(r"-[-A-Za-z]|$")


def parse_postgres_url(url: str) -> dict[str, str]:
    """Return libpq's parameters by keyword. BackendUrlError lists problems, without any secret."""
    found = _URL.fullmatch(url)
    if found is None:
        raise BackendUrlError([f"is no URL: it has the form {_FORM}"])
    login, address, query = _split(found["rest"])
    parameters = dict(login)
    authority, slash, path = address.partition("/")
    parameters |= _read_nodes(authority)
    if slash and path:
        parameters["dbname"] = unquote(path)
    parameters |= _read_query(query)
    _check_ports(parameters.get("port", ""))
    if any("\0" in value for value in parameters.values()):
        raise BackendUrlError(["has a %00, which PostgreSQL allows nowhere"])
    return parameters


def format_postgres_url(parameters: Mapping[str, str]) -> str:
    """Return a URL that every parser reads as these parameters."""
    others = dict(parameters)
    user, password = others.pop("user", ""), others.pop("password", None)
    login = quote(user, safe="") + ("" if password is None else f":{quote(password, safe='')}")
    node = ""
    if _NAME.fullmatch(others.get("host", "")) and _PORT.fullmatch(others.get("port", "0")):
        port = others.pop("port", None)
        node = others.pop("host") + ("" if port is None else f":{port}")
    path = quote(others.pop("dbname", ""), safe="")
    query = "&".join(f"{key}={quote(value, safe='')}" for key, value in others.items())
    address = f"{f'{login}@' if login else ''}{node}/{path}"
    return f"postgresql://{address}{f'?{query}' if query else ''}"


def _split(rest: str) -> tuple[dict[str, str], str, str]:
    """Return the login, the address, and the query."""
    address, _, query = rest.partition("?")
    nodes = address.partition("/")[0].split(",")
    found = _LOGIN.fullmatch(rest)
    if found is None or ("@" not in address and all(map(_is_node, nodes))):
        return {}, address, query
    login = {
        name: unquote(value) for name in ("user", "password") if (value := found[name] or None)
    }
    address, _, query = found["rest"].partition("?")
    return login, address, query


def _is_node(text: str) -> bool:
    node = _NODE.fullmatch(text)
    return node is not None and (not node["port"] or _PORT.fullmatch(node["port"]) is not None)


def _read_nodes(authority: str) -> dict[str, str]:
    hosts, ports = [], []
    for text in authority.split(","):
        node = _NODE.fullmatch(text)
        if node is None:
            raise BackendUrlError([f"is no URL: its login is followed by no HOST:PORT; {_ENCODE}"])
        hosts.append(unquote(node["six"] or node["name"] or ""))
        ports.append(node["port"] or "")
    return {
        name: ",".join(values) for name, values in (("host", hosts), ("port", ports)) if any(values)
    }


def _read_query(query: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in filter(None, query.split("&")):
        key, _, value = part.partition("=")
        name = unquote(key)
        text = _read_options(value) if name == _OPTIONS else unquote(value)
        joint = _SEVERAL.get(name)
        found[name] = text if joint is None or name not in found else found[name] + joint + text
    return found


def _read_options(text: str) -> str:
    """Return the server's options, with a space for each plus that separates them.

    libpq would read those as a plus, and the server knows no parameter that begins with one. A plus
    within a value stays, as in `timezone=UTC+3`.
    """
    first, *others = map(unquote, text.split("+"))
    found = first
    for place, part in enumerate(others):
        rest = "+".join(others[place:]).lstrip("+")
        is_space = _BEFORE_SPACE.search(found) or _AFTER_SPACE.match(rest)
        found += (" " if is_space else "+") + part
    return found


def _check_ports(ports: str) -> None:
    for port in filter(None, ports.split(",")):
        if not _PORT.fullmatch(port) or not 0 < int(port) <= _MAX_PORT:
            raise BackendUrlError(
                [f"has a port that is no number from 1 to {_MAX_PORT}; {_ENCODE}"]
            )
