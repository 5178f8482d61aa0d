"""Elect a leader, and assign partitions to the members of an installation.

    member ─► leader? ── assigns partitions ─► assigned ── takes the hold ─► epoch(partition)
                          (assignment.py)                  (one holder)      asked before every act

A leader only proposes. A member acts on its **hold** of a partition: a record in the store that one
member can have at a time, with a number that grows with every holder (the epoch). A member trusts
its holds until a deadline of its own clock (`membership.py`), which is before the time at which the
store lets another member take them.

| failure | effect |
| --- | --- |
| a member dies | its holds are free when its lease ends; PostgreSQL: at once if seen dead |
| a member is suspended or cut off | its deadline passes before its lease; it joins again later |
| the leader fails | the next contender leads; the others' holds stay |
| the store restarts, or a connection breaks | terms end at once; members join again |
| the store is unavailable | no member acts; `leader_absent_seconds` grows |
| two members lead for a moment | the older proposal is refused; a hold still has one holder |

| | PostgreSQL (`postgres.py`) | ZooKeeper (`zookeeper.py`) |
| --- | --- | --- |
| leader | a session lock; a silent session is ended | the first ephemeral sequential node |
| lease | the member's row, by the server's clock | the session |
| hold | the partition's row | an ephemeral node |
| epoch (`epochs.py`) | the time of the hold, in `election_terms` | the same, in the parent node |
"""

from contextlib import AbstractAsyncContextManager

from rooms.backend_urls import scheme_of
from rooms.errors import SettingsError
from rooms.ports import Clock, Election
from rooms.settings import SCHEMES


def open_election(
    url: str, *, client: str, member: str, clock: Clock
) -> AbstractAsyncContextManager[Election]:
    """Open the election that `url` names.

    `client`: the installation's name in stores that serve several; `member`: a name for this
    process that no other process has, now or later; `clock`: to hold partitions, one that does not
    stop while the machine sleeps. SettingsError names the valid schemes.
    """
    match scheme_of(url):
        case "postgresql":
            from delivery.leadership.postgres import PostgresElection

            return PostgresElection(url, member=member, clock=clock)
        case "zookeeper":
            from delivery.leadership.zookeeper import ZooKeeperElection
            from rooms.backend_urls import parse_zookeeper_url

            return ZooKeeperElection(
                parse_zookeeper_url(url), client=client, member=member, clock=clock
            )
        case scheme:
            valid = ", ".join(f"{known}://" for known in SCHEMES["ELECTION_URL"])
            raise SettingsError([f"ELECTION_URL starts with {scheme}://; valid here: {valid}"])
