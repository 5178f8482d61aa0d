"""Chain the entries of an organisation's journal by hash.

The hash of an entry covers the hash of the one before, its number, and its content in one canonical
form. So an entry that is changed, removed, added or moved breaks the chain at its place.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

from rooms.domain.ids import OrganisationId

FIRST_HASH: Final = bytes(32)
"""The hash before the first entry of a chain."""
_SEQ_BYTES: Final = 8


class ActorKind(StrEnum):
    """Name what kind of actor caused an entry."""

    KEY = "key"
    OPERATOR = "operator"
    """A person at the command line of the installation."""
    PERSON = "person"
    """A person who signed in to the console; the id is that of the session."""
    SERVICE = "service"


class Outcome(StrEnum):
    """Name what became of a change."""

    SUCCEEDED = "succeeded"
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """Hold what an entry says, without its place in the chain."""

    id: str
    organisation_id: OrganisationId
    at: datetime
    actor_kind: ActorKind
    actor_id: str | None
    actor_name: str
    actor_organisation_id: OrganisationId | None
    application: str | None
    source: str | None
    """The address of the client."""
    request_id: str | None
    action: str
    object: str
    before: Any
    after: Any
    outcome: Outcome
    reason: str | None

    def canonical(self) -> bytes:
        """Return the content as bytes: JSON with sorted keys, without spaces, times in UTC."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        fields["at"] = self.at.astimezone(UTC).isoformat(timespec="microseconds")
        return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode(
            "utf-8", "surrogatepass"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainedEntry:
    """Hold an entry at its place in the chain."""

    seq: int
    previous_hash: bytes
    hash: bytes
    entry: JournalEntry


def entry_hash(previous_hash: bytes, seq: int, content: bytes) -> bytes:
    """Return the hash of the entry `seq`."""
    return hashlib.sha256(
        previous_hash + seq.to_bytes(_SEQ_BYTES, "big", signed=True) + content
    ).digest()


def chain_entries(
    entries: Iterable[JournalEntry], last_seq: int, last_hash: bytes
) -> list[ChainedEntry]:
    """Return entries at their places in a chain, after its last number and hash."""
    chain = []
    for seq, entry in enumerate(entries, last_seq + 1):
        found = entry_hash(last_hash, seq, entry.canonical())
        chain.append(ChainedEntry(seq=seq, previous_hash=last_hash, hash=found, entry=entry))
        last_hash = found
    return chain


@dataclass(frozen=True, slots=True)
class ChainBreak:
    """Say where a chain is broken, and how."""

    seq: int
    problem: str


@dataclass(slots=True)
class ChainCheck:
    """Check entries in the order of their numbers, one after the other."""

    seq: int | None = None
    hash: bytes = FIRST_HASH

    def add(self, chained: ChainedEntry) -> ChainBreak | None:
        """Check the next entry; return what is wrong with it, if anything."""
        if self.seq is not None and chained.seq != self.seq + 1:
            return ChainBreak(self.seq + 1, f"is missing: the next entry is {chained.seq}")
        if self.seq is None and chained.seq == 1 and chained.previous_hash != FIRST_HASH:
            return ChainBreak(1, "is not the first entry of a chain")
        if self.seq is not None and chained.previous_hash != self.hash:
            return ChainBreak(chained.seq, "does not follow the entry before it")
        expected = entry_hash(chained.previous_hash, chained.seq, chained.entry.canonical())
        if chained.hash != expected:
            return ChainBreak(chained.seq, "was changed: its hash is another one")
        self.seq, self.hash = chained.seq, chained.hash
        return None


def to_document(chained: ChainedEntry) -> dict[str, Any]:
    """Return an entry as it is exported: everything that its verification needs."""
    entry = chained.entry
    fields = {name: getattr(entry, name) for name in entry.__slots__}
    return {
        "seq": chained.seq,
        **fields,
        "at": entry.at.astimezone(UTC).isoformat(timespec="microseconds"),
        "previous_hash": chained.previous_hash.hex(),
        "hash": chained.hash.hex(),
    }


def from_document(document: Mapping[str, Any]) -> ChainedEntry:
    """Return the inverse of `to_document`. ValueError names the field that is missing or wrong."""
    fields = {name: _read(document, name) for name in JournalEntry.__slots__}
    return ChainedEntry(
        seq=_read(document, "seq"),
        previous_hash=_read(document, "previous_hash"),
        hash=_read(document, "hash"),
        entry=JournalEntry(**fields),
    )


def _read(document: Mapping[str, Any], name: str) -> Any:
    if name not in document:
        raise ValueError(f"it has no field {name}")
    value = document[name]
    if (reader := _READERS.get(name)) is None:
        return value
    try:
        return reader(value)
    except (ValueError, TypeError, OverflowError) as exc:
        # Without the value, which may be long.
        raise ValueError(f"its field {name} has a wrong value") from exc


def _time(value: Any) -> datetime:
    at = datetime.fromisoformat(value)
    if at.tzinfo is None:
        raise ValueError("it has no offset from UTC")
    return at.astimezone(UTC)


def _seq(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError("it is no integer")
    value.to_bytes(_SEQ_BYTES, "big", signed=True)
    return value


_READERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "seq": _seq,
    "at": _time,
    "actor_kind": ActorKind,
    "outcome": Outcome,
    "previous_hash": bytes.fromhex,
    "hash": bytes.fromhex,
}
