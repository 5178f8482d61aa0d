"""Assign partitions to members."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TypeVar

M = TypeVar("M")


def assign(
    partitions: Sequence[str], members: Sequence[M], current: Mapping[str, M]
) -> dict[str, M]:
    """Return a member for each partition, with as few moves from `current` as possible.

    Counts of members differ by one at most, for each kind (the part before the `/`) and in total.
    Unassigned partitions are assigned in turn. Empty without members. `current` may name members
    and partitions that do not exist any more.
    """
    if not members:
        return {}
    assigned: dict[str, M] = {}
    totals = dict.fromkeys(members, 0)
    turns = cycle(members)
    kinds: dict[str, list[str]] = {}
    for partition in partitions:
        kinds.setdefault(partition.rpartition("/")[0], []).append(partition)
    for group in kinds.values():
        kept: dict[M, list[str]] = {member: [] for member in members}
        for partition in group:
            if (holder := current.get(partition)) in kept and holder is not None:
                kept[holder].append(partition)
        least, more = divmod(len(group), len(members))
        # Members with the fewest in total get one more; among these the one with the most of the
        # kind, so that few are moved.
        first = sorted(members, key=lambda member: (totals[member], -len(kept[member])))
        quota = {member: least + (place < more) for place, member in enumerate(first)}
        assigned |= {
            partition: member for member in members for partition in kept[member][: quota[member]]
        }
        free = {member: quota[member] - len(kept[member]) for member in members}
        for partition in group:
            if partition not in assigned:
                member = next(turn for turn in turns if free[turn] > 0)
                free[member] -= 1
                assigned[partition] = member
        totals = {member: totals[member] + quota[member] for member in members}
    return assigned
