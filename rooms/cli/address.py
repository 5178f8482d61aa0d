"""Addresses of a service: which is this machine's own."""

import ipaddress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from rooms.settings import Settings


def local_url(settings: "Settings") -> str:
    """Where the service of these settings is reached from this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.listen_host, settings.listen_host)
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.listen_port}"


def is_loopback(url: str) -> bool:
    """Whether the address names this machine by loopback."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_local(url: str, settings: "Settings") -> bool:
    """Whether the address is this machine's: by loopback, or the very one that the service listens on."""
    return is_loopback(url) or urlsplit(url).hostname == urlsplit(local_url(settings)).hostname
