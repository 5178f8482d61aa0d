"""`rooms cluster`: the processes that share what must be done by one alone."""

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
