"""Open the cipher of a process, once its keys fit what is in the database."""

import logging

import psycopg

from rooms.db.connection import open_connection
from rooms.db.processes import SCHEMA_MISSING
from rooms.db.sealing import prepare_sealing
from rooms.db.secrets import Cipher, open_cipher
from rooms.errors import StorageUnavailableError
from rooms.settings import Settings

_log = logging.getLogger(__name__)


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
