"""Check the configuration of an Aerospike namespace for settings that lose records.

Rooms writes each record with its own time to live, so `default-ttl` does not matter. Two settings
are refused, because they lose acknowledged records although nothing failed:

* Eviction deletes records that have a time to live early and without an error. Those are messages
  with an expiry, and tombstones. Without its tombstone a late write would be stored where no worker
  reads any more.
* With a single copy on several nodes, the records of a node that is down or restarts are missing:
  the other nodes answer that they do not exist, and accept tombstones for them.

A namespace that loses records when a node dies is allowed, with a warning: an operator may have
chosen that.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_EVICTIONS: Final = (
    "storage-engine.evict-used-pct",
    "evict-sys-memory-pct",
    "evict-indexes-memory-pct",
    "index-type.evict-mounts-pct",
    "sindex-type.evict-mounts-pct",
)
_MIN_REPLICAS: Final = 2
_PREFIXES: Final = ("storage-engine.", "index-type.", "sindex-type.")


@dataclass(frozen=True, slots=True)
class NamespaceReport:
    """Report to the operator in sentences, each with its fix."""

    refusals: tuple[str, ...]
    warnings: tuple[str, ...]


def parse_settings(text: str) -> dict[str, str]:
    """Return the settings in a node's answer to `get-config`, by name."""
    pairs = (one.partition("=") for one in text.strip().split(";"))
    return {name: value for name, equals, value in pairs if equals}


def check_namespace(namespace: str, settings: Mapping[str, str], *, nodes: int) -> NamespaceReport:
    """Check the settings of one of so many nodes; a missing setting counts as off."""
    if not settings:
        return NamespaceReport(
            (),
            ("a node did not return its configuration: allow the user to read it (get-config)",),
        )
    return NamespaceReport(
        refusals=tuple(_refusals(namespace, settings, nodes)),
        warnings=tuple(_warnings(settings, nodes)),
    )


def _number(settings: Mapping[str, str], name: str) -> int:
    text = settings.get(name, "0")
    return int(text) if text.isdecimal() else 0


def _is_true(settings: Mapping[str, str], name: str) -> bool:
    return settings.get(name) == "true"


def _refusals(namespace: str, settings: Mapping[str, str], nodes: int) -> list[str]:
    found = []
    expires = _number(settings, "nsup-period") > 0
    if expires and (evicting := [name for name in _EVICTIONS if _number(settings, name)]):
        fix = ", ".join(f"{_strip_prefix(name)} 0" for name in evicting)
        found.append(f"the namespace {namespace} evicts records before they expire: set {fix}")
    if not expires and not _is_true(settings, "allow-ttl-without-nsup"):
        found.append(
            f"the namespace {namespace} refuses records with a time to live: set nsup-period 60"
        )
    if nodes >= _MIN_REPLICAS > _number(settings, "replication-factor"):
        found.append(
            f"the namespace {namespace} reports the records of a node that is away as missing:"
            " set replication-factor 2"
        )
    return found


def _warnings(settings: Mapping[str, str], nodes: int) -> list[str]:
    found = []
    kept = settings.get("storage-engine") != "memory" or _has_setting(
        settings, "storage-engine.file[", "storage-engine.device["
    )
    if not kept:
        found.append("it is in memory only and empty after a restart: set storage-engine device")
    elif not _is_true(settings, "storage-engine.commit-to-device"):
        found += _flush_warnings(settings)
    if _is_true(settings, "storage-engine.cold-start-empty"):
        found.append("a node that restarts begins empty: set cold-start-empty false")
    if nodes < _MIN_REPLICAS:
        found.append(
            "each record has one copy, which is lost with its node:"
            " set replication-factor 2, run two nodes"
        )
    if not _number(settings, "nsup-period"):
        found.append("expired records are never removed, and the disk fills: set nsup-period 60")
    if settings.get("apply-ttl-reductions") == "false":
        found.append(
            "deleted slots are kept for ever, and the disk fills: set apply-ttl-reductions true"
        )
    return found


def _flush_warnings(settings: Mapping[str, str]) -> list[str]:
    flush_ms = _number(settings, "storage-engine.flush-max-ms")
    window = (
        f"in its last {flush_ms} ms"
        if flush_ms
        else "since its last full write buffer, however long ago"
    )
    fix = "set flush-max-ms 10, or, on an Enterprise server, commit-to-device true"
    found = [f"a node that is killed loses what it acknowledged {window}: {fix}"]
    if _has_setting(settings, "storage-engine.file[") and not _is_true(
        settings, "storage-engine.direct-files"
    ):
        found.append(
            "a machine that loses power loses what its page cache held, too: set direct-files true"
        )
    elif _is_true(settings, "storage-engine.disable-odsync"):
        found.append(
            "a machine that loses power loses what its disk's cache held, too:"
            " set disable-odsync false"
        )
    return found


def _has_setting(settings: Mapping[str, str], *prefixes: str) -> bool:
    return any(name.startswith(prefixes) and value for name, value in settings.items())


def _strip_prefix(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name
