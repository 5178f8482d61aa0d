"""Distinguish addresses of this machine from others."""

import ipaddress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from rooms.settings import Settings


def local_url(settings: "Settings") -> str:
    """Return the address at which this machine reaches the service of these settings."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.listen_host, settings.listen_host)
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.listen_port}"


def is_loopback(url: str) -> bool:
    """Return True if the address is a loopback address."""
    host = _host(url)
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_local(url: str, settings: "Settings") -> bool:
    """Return True if the address is on loopback, or the address that the service listens on."""
    return is_loopback(url) or _host(url) == _host(local_url(settings))


def _host(url: str) -> str:
    """Return the host of an address; nothing if it is none, which its first use reports."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
