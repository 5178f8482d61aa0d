"""Which member gets which partition."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TypeVar

M = TypeVar("M")


def share(partitions: Sequence[str], members: Sequence[M], current: Mapping[str, M]) -> dict[str, M]:
    """A member for each partition: in turn where nobody has any, and from then on with as few moves as possible, counts
    within one, of each kind (what stands before the `/`) and of all together. Empty without members. `current` may name
    members and partitions that are no more.
    """
    if not members:
        return {}
    shares: dict[str, M] = {}
    totals = dict.fromkeys(members, 0)
    turns = cycle(members)
    kinds: dict[str, list[str]] = {}
    for partition in partitions:
        kinds.setdefault(partition.rpartition("/")[0], []).append(partition)
    for some in kinds.values():
        kept: dict[M, list[str]] = {member: [] for member in members}
        for partition in some:
            if (holder := current.get(partition)) in kept and holder is not None:
                kept[holder].append(partition)
        least, more = divmod(len(some), len(members))
        # Who has fewest in all gets one more; among these who has most of the kind keeps most, so that least is moved.
        first = sorted(members, key=lambda member: (totals[member], -len(kept[member])))
        quota = {member: least + (place < more) for place, member in enumerate(first)}
        shares |= {partition: member for member in members for partition in kept[member][: quota[member]]}
        room = {member: quota[member] - len(kept[member]) for member in members}
        for partition in some:
            if partition not in shares:
                member = next(turn for turn in turns if room[turn] > 0)
                room[member] -= 1
                shares[partition] = member
        totals = {member: totals[member] + quota[member] for member in members}
    return shares
