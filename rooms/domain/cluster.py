"""Describe the members of an installation, their leader and their assignments."""

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """Describe a process that takes part in the election."""

    name: str
    host: str
    pid: int
    since: datetime
    partitions: tuple[str, ...]
    """Partitions that are assigned to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """Hold the state of the election's store at one moment."""

    leader: str | None
    """Name of the leading member."""
    epoch: int
    """Higher for every new leader."""
    leader_absent_s: float
    """Seconds without a leader; 0 while there is one."""
    members: tuple[Member, ...]
