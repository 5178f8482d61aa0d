"""Implement `rooms cluster`: members, leader, and the scheduling shards that members share."""

import click

from rooms.cli.context import CliSession, Group, pass_session, renamed


@click.group(cls=Group, invoke_without_command=True)
@click.pass_context
@pass_session
def cluster(session: CliSession, ctx: click.Context) -> None:
    """Show the members, the leader, the epoch, and the tasks of each member."""
    if ctx.invoked_subcommand is None:
        _show_members(session)


def _show_members(session: CliSession) -> None:
    with session.client() as client:
        found = client.call("GET", "/cluster")
    output = session.output()
    if output.as_json:
        output.document(found)
        return
    output.table(
        ["member", "host", "pid", "since", "leads", "does"],
        [
            [
                *(member[field] for field in ("name", "host", "pid", "since", "leads")),
                ", ".join(member["partitions"]),
            ]
            for member in found["members"]
        ],
        empty="no members: start `rooms upkeep`",
    )
    if found["leader"] is None:
        output.line(f"no leader for {found['leader_absent_seconds']:.0f} s")
    else:
        output.line(f"{found['leader']} leads, epoch {found['epoch']}")


@cluster.command()
@click.argument("count", required=False, type=click.IntRange(1, 256))
@pass_session
def shards(session: CliSession, /, *, count: int | None) -> None:
    """Show the number of scheduling shards; with COUNT, change it. Needs no restart.

    Scheduled deliveries are divided into shards, and the members of the cluster share the shards.
    """
    with session.client() as client:
        if count is None:
            found = client.call("GET", "/cluster/buckets")
        else:
            found = client.call("PUT", "/cluster/buckets", json={"count": count})
    session.output().resource(found)


buckets = renamed(shards, "buckets", "cluster shards")
