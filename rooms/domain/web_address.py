"""Check addresses of the web that an operator configures: HTTPS, or HTTP on this machine."""

from ipaddress import ip_address
from typing import Final
from urllib.parse import SplitResult, urlsplit

MAX_ADDRESS: Final = 2000
_UNSAFE: Final = frozenset(" ;,*'\"")
"""Characters that mean something else in a header, and in no address that is used here."""


def check_origin(text: str) -> str:
    """Return `scheme://host[:port]`, without a slash at its end. ValueError says what is wrong."""
    parts = _check(text)
    if parts.path not in {"", "/"} or parts.query:
        raise ValueError("it must end after the host or port: https://rooms.example.com")
    return f"{parts.scheme}://{parts.netloc}"


def check_address(text: str) -> str:
    """Return an address without query and fragment as it is. ValueError says what is wrong."""
    if _check(text).query:
        raise ValueError("it must have no query")
    return text


def is_protected(text: str) -> bool:
    """Return whether an address is HTTPS, or on this machine."""
    try:
        _check(text)
    except ValueError:
        return False
    return True


def _check(text: str) -> SplitResult:
    if len(text) > MAX_ADDRESS or not text.isascii() or not text.isprintable() or _UNSAFE & {*text}:
        raise ValueError(
            f"it must be an address of at most {MAX_ADDRESS} ASCII characters, without spaces,"
            " quotes, commas, semicolons and asterisks"
        )
    parts = urlsplit(text)
    _ = parts.port  # raises ValueError
    if parts.scheme not in {"https", "http"} or not parts.hostname:
        raise ValueError("it must begin with https://")
    if parts.username is not None or parts.password is not None or parts.fragment:
        raise ValueError("it must have neither a user nor a fragment")
    if parts.scheme == "http" and not _is_loopback(parts.hostname):
        raise ValueError("it must begin with https://; http:// is for this machine only")
    return parts


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
