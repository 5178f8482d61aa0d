"""Open magazines by URL: sharded durable logs of entries.

The scheme names the store; the contract tests run over every scheme of `rooms.settings.SCHEMES`.

    slot:  empty ─► waiting ─► fired ─► gone          pointers of a shard:  sweep ≤ fire ≤ load
             └───────────────────────────► hole

| failure | effect |
| --- | --- |
| a loader dies before its entry is written | a hole, which a firer or sweeper marks and passes |
| a firer dies with entries | stuck: a sweeper hands them out after the sweep duration |
| a firer dies between pointer and stamp | stuck too: without a stamp an entry counts from load |
| firers, takers or sweepers overlap | one of them wins the stamp of each entry |
| a sweeper's term ends unnoticed | the shard refuses its epoch |
| the last node dies, and its client answers by itself | MagazineUnavailableError |
| the store is emptied | MagazineMissingError: the owner creates the magazine again and loads it |
"""

import secrets
from contextlib import AbstractAsyncContextManager

from delivery.magazines.aerospike_records import RecordKeys
from delivery.magazines.kv_magazines import AsyncKvMagazines
from delivery.magazines.kv_store import StoreRetryPolicy
from rooms.backend_urls import parse_aerospike_url, scheme_of
from rooms.clock import SystemClock
from rooms.domain.magazine import MAX_SHARDS
from rooms.errors import SettingsError
from rooms.ports import Magazines
from rooms.settings import SCHEMES


def open_magazines(url: str, *, farm: str, client: str) -> AbstractAsyncContextManager[Magazines]:
    """Open the magazines of installation (`farm`, `client`) in the store that `url` names.

    SettingsError names the valid schemes.
    """
    start = secrets.randbelow(MAX_SHARDS)
    match scheme_of(url):
        case "postgresql":
            from delivery.magazines.postgres import PostgresMagazines

            return PostgresMagazines(url, start=start)
        case "aerospike":
            from delivery.magazines.aerospike import AerospikeStore

            address = parse_aerospike_url(url)
            return AsyncKvMagazines(
                AerospikeStore(
                    address, RecordKeys(namespace=address.namespace, farm=farm, client=client)
                ),
                retry_policy=StoreRetryPolicy(
                    retries=address.retries, sleep_s=address.sleep_ms / 1000, mark_s=address.mark_s
                ),
                clock=SystemClock(),
                threads=address.threads,
                process=secrets.token_hex(6),
                start=start,
            )
        case scheme:
            valid = ", ".join(f"{known}://" for known in SCHEMES["MAGAZINE_URL"])
            raise SettingsError([f"MAGAZINE_URL starts with {scheme}://; valid here: {valid}"])
