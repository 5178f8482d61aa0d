"""Which member gets which partition."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TypeVar

M = TypeVar("M")


def share(partitions: Sequence[str], members: Sequence[M], current: Mapping[str, M]) -> dict[str, M]:
    """A member for each partition: in turn where nobody has any, and from then on with as few moves as possible, counts
    within one. Empty without members. `current` may name members and partitions that are no more.
    """
    if not members:
        return {}
    kept: dict[M, list[str]] = {member: [] for member in members}
    for partition in partitions:
        if (holder := current.get(partition)) in kept and holder is not None:
            kept[holder].append(partition)
    least, more = divmod(len(partitions), len(members))
    # Those who have most keep most: no other choice of who gets one more moves less.
    by_count = sorted(members, key=lambda member: -len(kept[member]))
    quota = {member: least + (place < more) for place, member in enumerate(by_count)}
    shares = {partition: member for member in members for partition in kept[member][: quota[member]]}
    room = {member: quota[member] - len(kept[member]) for member in members}
    turns = cycle(members)
    for partition in partitions:
        if partition not in shares:
            member = next(turn for turn in turns if room[turn] > 0)
            room[member] -= 1
            shares[partition] = member
    return shares
