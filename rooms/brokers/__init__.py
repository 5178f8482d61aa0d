"""Brokers by URL: the scheme says which adapter, and `rooms.settings.SCHEMES` is what the contract suite runs over."""

from contextlib import AbstractAsyncContextManager
from urllib.parse import urlsplit

from rooms.errors import SettingsError
from rooms.ports import Broker
from rooms.settings import SCHEMES


def open_broker(url: str, *, claim_s: float, farm: str, client: str) -> AbstractAsyncContextManager[Broker]:
    """The broker that `url` names. SettingsError names the schemes.

    `claim_s`: how long a frozen worker keeps what it took, where the broker claims; `farm`, `client`: whose queues.
    """
    match urlsplit(url).scheme:
        case "postgresql":
            from rooms.brokers.postgres import PostgresBroker

            return PostgresBroker(url, claim_s=claim_s)
        case "stomp" | "stomps":
            from rooms.brokers.stomp import StompBroker

            return StompBroker(url, farm=farm, client=client)
        case scheme:
            valid = ", ".join(f"{known}://" for known in SCHEMES["BROKER_URL"])
            raise SettingsError([f"BROKER_URL starts with {scheme}://; valid here: {valid}"])
