"""Magazines by URL: the scheme says which store, and `rooms.settings.SCHEMES` is what the contract suite runs over.

    slot:  empty ─► waiting ─► handed out ─► gone          pointers of a shard:  sweep ≤ fire ≤ load
             └────────────────────────────────► hole

| what fails | what becomes of it |
| --- | --- |
| a loader dies before its entry is written | a hole, which a firer or sweeper marks and passes; it was never promised |
| a firer dies with what it took | stuck: a sweeper hands it out again after the sweep duration |
| a firer dies between pointer and stamp | stuck too: what was never handed out counts from its load |
| two firers, a firer and a taker, two sweepers meet | the stamp of each entry is won by one |
| a sweeper's term ends unnoticed | the shard refuses its epoch |
| the last node dies, and its client answers by itself | doubt: MagazineUnavailableError, neither done nor empty |
| the store is emptied | MagazineMissingError: whoever knows what should be there makes it again and loads it |
"""

import secrets
from contextlib import AbstractAsyncContextManager
from urllib.parse import urlsplit

from delivery.magazines.records import Names
from delivery.magazines.repetition import Repetition
from delivery.magazines.shelves import ShelfMagazines
from rooms.aerospike_url import parse_aerospike_url
from rooms.clock import SystemClock
from rooms.domain.magazine import MAX_SHARDS
from rooms.errors import SettingsError
from rooms.magazines import Magazines
from rooms.ports import Clock
from rooms.settings import SCHEMES


def open_magazines(
    url: str, *, farm: str, client: str, clock: Clock | None = None
) -> AbstractAsyncContextManager[Magazines]:
    """The magazines of installation (`farm`, `client`) in the store that `url` names. SettingsError names the schemes."""
    start = secrets.randbelow(MAX_SHARDS)
    match urlsplit(url).scheme:
        case "postgresql":
            from delivery.magazines.postgres import PostgresMagazines

            return PostgresMagazines(url, start=start)
        case "aerospike":
            from delivery.magazines.aerospike import AerospikeStore

            address = parse_aerospike_url(url)
            return ShelfMagazines(
                AerospikeStore(address, Names(namespace=address.namespace, farm=farm, client=client)),
                repetition=Repetition(retries=address.retries, sleep_s=address.sleep_ms / 1000, mark_s=address.mark_s),
                clock=clock or SystemClock(),
                threads=address.threads,
                process=secrets.token_hex(6),
                start=start,
            )
        case scheme:
            valid = ", ".join(f"{known}://" for known in SCHEMES["MAGAZINE_URL"])
            raise SettingsError([f"MAGAZINE_URL starts with {scheme}://; valid here: {valid}"])
