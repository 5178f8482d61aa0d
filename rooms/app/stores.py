"""Open the stores of a process, as its settings name them."""

import logging
from contextlib import AbstractAsyncContextManager

import psycopg

from delivery.brokers import open_broker
from delivery.magazines import open_magazines
from rooms.db.connection import open_connection
from rooms.db.processes import SCHEMA_MISSING
from rooms.db.sealing import prepare_sealing
from rooms.db.secrets import Cipher, open_cipher
from rooms.errors import StorageUnavailableError
from rooms.ports import Broker, Magazines
from rooms.settings import Settings

_log = logging.getLogger(__name__)


def open_own_broker(settings: Settings, url: str) -> AbstractAsyncContextManager[Broker]:
    """Open the broker at an address, with the names and the claims of these settings."""
    return open_broker(
        url, claim_s=settings.claim_ttl_s, farm=settings.farm, client=settings.client
    )


def open_own_magazines(
    settings: Settings, database_url: str
) -> AbstractAsyncContextManager[Magazines]:
    """Open the magazines: those in the database, unless the settings name another store."""
    return open_magazines(
        settings.magazine_url or database_url, farm=settings.farm, client=settings.client
    )


async def open_sealing(settings: Settings, database_url: str) -> Cipher:
    """Return the cipher, with nothing in the database left that should be sealed and is not.

    SettingsError: something was sealed with another key. StorageUnavailableError.
    """
    cipher = open_cipher(settings.secret_key, settings.data)
    try:
        async with open_connection(database_url, name="rooms sealing") as connection:
            refuse = settings.unknown_secret_keys == "refuse"  # noqa: S105 - no password
            await prepare_sealing(connection, cipher, refuse_unknown=refuse)
    except SCHEMA_MISSING:
        _log.warning("the database has an older schema: run `rooms migrate`, and restart this")
    except psycopg.Error as exc:
        raise StorageUnavailableError(str(exc)) from exc
    return cipher
