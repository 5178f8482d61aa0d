"""Elections: who of an installation's processes does what must be done by one alone.

    member ──► leader? ── shares partitions out ──► assigned ── hold taken in the store ──► epoch(partition)
                              (shares.py)                         (one holder at a time)     asked before every action

A leader only proposes. What a member acts on is its **hold** of a partition: a record in the store that one member can
have at a time, with a number that grows with every holder (the epoch). A member believes in its holds until a deadline
of its own clock (`tenure.py`) that lies before the moment when the store lets anybody else have them.

| what fails | what follows |
| --- | --- |
| a member dies | its holds are free when its lease is over; by PostgreSQL at once where others can see that it is dead |
| a member freezes, or is cut off | its deadline passes first, then its lease; awake again, it begins anew |
| the leader does | the next one in line leads; the others' holds stay as they are |
| the store restarts, or a connection breaks | every term ends at once; members come back and share anew |
| the store is away | nobody acts; `leader_absent_seconds` grows |
| two lead for a moment | two proposals, of which the older is refused; a hold has one holder all the same |

| | PostgreSQL (`postgres.py`) | ZooKeeper (`zookeeper.py`) |
| --- | --- | --- |
| leader | a session lock; `idle_session_timeout` ends a silent session | the first of the ephemeral sequential nodes |
| lease | the member's row, by the server's clock | the session |
| hold | the partition's row | an ephemeral node |
| epoch | one counter of the database | the node's czxid |
"""

from contextlib import AbstractAsyncContextManager
from urllib.parse import urlsplit

from rooms.errors import SettingsError
from rooms.ports import Clock, Election
from rooms.settings import SCHEMES


def open_election(url: str, *, client: str, member: str, clock: Clock) -> AbstractAsyncContextManager[Election]:
    """The election that `url` names. `client`: the installation's name in stores that serve several; `member`: this
    process's, which no other one may have, now or later; `clock`: one that does not stop while the machine sleeps, where
    partitions are to be held. SettingsError names the schemes.
    """
    match urlsplit(url).scheme:
        case "postgresql":
            from delivery.elections.postgres import PostgresElection

            return PostgresElection(url, member=member, clock=clock)
        case "zookeeper":
            from delivery.elections.address import read_address
            from delivery.elections.zookeeper import ZooKeeperElection

            return ZooKeeperElection(read_address(url), client=client, member=member, clock=clock)
        case scheme:
            valid = ", ".join(f"{known}://" for known in SCHEMES["ELECTION_URL"])
            raise SettingsError([f"ELECTION_URL starts with {scheme}://; valid here: {valid}"])
