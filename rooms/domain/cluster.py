"""What an installation's processes are to each other: members, a leader, and who does what."""

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A process that takes part."""

    name: str
    host: str
    pid: int
    since: datetime
    partitions: tuple[str, ...]
    """What is assigned to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """The whole, as the election's store has it at one moment."""

    leader: str | None
    """The leading member's name."""
    epoch: int
    """Grows with every leader."""
    leader_absent_s: float
    """How long there has been no leader; 0 while there is one."""
    members: tuple[Member, ...]
