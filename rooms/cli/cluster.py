"""`rooms cluster` and `rooms buckets`: the processes that share what must be done by one alone, and what they share."""

import click

from rooms.cli.session import Command, Session, pass_session


@click.command(cls=Command)
@pass_session
def cluster(session: Session) -> None:
    """Members, leader, epoch, and who does what."""
    with session.client() as client:
        found = client.call("GET", "/cluster")
    output = session.output()
    if output.as_json:
        output.document(found)
        return
    output.table(
        ["member", "host", "pid", "since", "leads", "does"],
        [
            [*(member[field] for field in ("name", "host", "pid", "since", "leads")), ", ".join(member["partitions"])]
            for member in found["members"]
        ],
        empty="nobody takes part: start `rooms upkeep`",
    )
    if found["leader"] is None:
        output.line(f"nobody has led for {found['leader_absent_seconds']:.0f} s")
    else:
        output.line(f"{found['leader']} leads, epoch {found['epoch']}")


@click.command(cls=Command)
@click.argument("count", required=False, type=click.IntRange(1, 256))
@pass_session
def buckets(session: Session, /, *, count: int | None) -> None:
    """In how many buckets later deliveries lie that the members share; with COUNT, change it. Nothing is restarted."""
    with session.client() as client:
        if count is None:
            found = client.call("GET", "/cluster/buckets")
        else:
            found = client.call("PUT", "/cluster/buckets", json={"count": count})
    session.output().resource(found)
