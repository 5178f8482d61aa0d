"""Open brokers by URL: the scheme names the adapter.

The contract suite runs over the schemes in `rooms.settings.SCHEMES`.
"""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from rooms.backend_urls import scheme_of
from rooms.errors import SettingsError
from rooms.ports import Broker
from rooms.settings import SCHEMES


def open_broker(
    url: str,
    *,
    claim_s: float,
    farm: str,
    client: str,
    on_rest: Callable[[float], object] | None = None,
) -> AbstractAsyncContextManager[Broker]:
    """Open the broker that `url` names. SettingsError names the valid schemes.

    A broker that claims lets a frozen worker keep its claims for `claim_s`, and reports rests of
    its bulk claims, in seconds, to `on_rest`. `farm` and `client` name the installation.
    """
    match scheme_of(url):
        case "postgresql":
            from delivery.brokers.postgres import PostgresBroker

            return PostgresBroker(url, claim_s=claim_s, on_rest=on_rest)
        case "stomp" | "stomps":
            from delivery.brokers.artemis.broker import ArtemisBroker

            return ArtemisBroker(url, farm=farm, client=client)
        case scheme:
            valid = ", ".join(f"{known}://" for known in SCHEMES["BROKER_URL"])
            raise SettingsError([f"BROKER_URL starts with {scheme}://; valid here: {valid}"])
