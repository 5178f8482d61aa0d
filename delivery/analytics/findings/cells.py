"""Hold the counted attempts of a log at the driver: attempts alike within a time bin are one row.

Values of attributes are integers with a vocabulary each. The rows are sorted, so that the results
depend on the log only, and not on the order in which an engine returns its counts.
"""

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

_IPV4_PREFIX: Final = 24
_IPV6_PREFIX: Final = 48
_MIN_PARENT: Final = 2
_REGISTRY: Final = re.compile(r"(ac|co|com|edu|ne|net|or|org)\.[a-z]{2}", re.IGNORECASE)
"""Domains below which countries register names: those have nothing else in common."""


def network_of(host: str) -> str | None:
    """Return the network of a target: /24 or /48 of an address, the parent domain of a name.

    The log has the name of a webhook's host and not its address, so hosts with names are of one
    network only if their names show it. Names with two labels have none, nor have those that are
    registered below a country's `co`, `com` and the like.
    """
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        _, *parent = host.rstrip(".").split(".")
        is_of_all = len(parent) == _MIN_PARENT and _REGISTRY.fullmatch(".".join(parent))
        return None if len(parent) < _MIN_PARENT or is_of_all else ".".join(["*", *parent])
    prefix = _IPV4_PREFIX if address.version == 4 else _IPV6_PREFIX  # noqa: PLR2004 - of IP
    return str(ipaddress.ip_network((address, prefix), strict=False))


Ints = npt.NDArray[np.int64]
Codes = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]

CELL_S: Final = 5
"""Seconds of a bin."""
MAX_CELLS = 1_000_000
"""Rows in this process; of larger logs a sample is taken."""
LOGGED: Final = (
    "room_id",
    "target_host",
    "event_type",
    "event_version",
    "worker_host",
    "worker_version",
    "worker",
    "error_class",
    "http_status",
)
"""Attributes as they are logged; null is a value of its own that explains nothing."""
GROUPED_BY: Final = ("sub_key", "bin", "first", *LOGGED, "policy_version")
"""Each row counts attempts that agree in these columns.

A sample keeps one row in `sample_step`: in both engines those of which the first 32 bits of an MD5
of these columns are a multiple of it.
"""
SAMPLE_SEPARATOR: Final = "\x1f"
SAMPLE_DIGITS: Final = 8
FAILURE_ATTRIBUTES: Final = ("http_status", "error_class")
"""Attributes that only failures have, the one that says more first."""
_NETWORK, _TYPED_VERSION = "network", "typed_version"
STRUCTURAL: Final = (
    "target_host",
    _NETWORK,
    "worker_host",
    "worker_version",
    "worker",
    "event_version",
    _TYPED_VERSION,
    "event_type",
    "room_id",
)
"""Attributes that every attempt has, the one that says most first where all say the same."""
BROUGHT: Final = frozenset(
    {"worker_host", "worker_version", "worker", "event_version", _TYPED_VERSION}
)
"""Attributes of workers and publishers: a value does not exist before its first use."""
DISPLAYED: Final = {_TYPED_VERSION: "event_version"}
"""Names of attributes in results, where they differ: a version is of its event type."""


LOG_DAYS: Final = 731
"""Days before the newest row that are searched."""
DAY_S: Final = 86_400


def searched_bins(bins: Ints, bin_s: int, now: datetime) -> Mask:
    """Return a mask of the bins that are searched: two years, and none a day after `now`.

    Times are those of PostgreSQL's clock. Rows of an hour in which it was wrong by years would make
    the log as long, and time and memory grow with its length.
    """
    past = bins < (now.timestamp() + DAY_S) / bin_s
    newest = bins[past].max(initial=0)
    found: Mask = past & (bins > newest - LOG_DAYS * DAY_S // bin_s)
    return found


def sample_step(rows: int, most: int | None = None) -> int:
    """Return the power of two of which one row in so many is kept; `most`: default MAX_CELLS."""
    step = 1
    while rows > step * (MAX_CELLS if most is None else most):
        step *= 2
    return step


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribute:
    """Hold the values of an attribute: a code for each row (-1: null), and the codes' texts."""

    codes: Codes
    texts: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptCells:
    """Hold rows by time and subscription; `bin` counts `bin_s` seconds since 1970."""

    bin_s: int
    weight: int
    """Number of rows that each row represents: more than 1 in a sample."""
    keys: Ints
    """Key of each subscription; `subscription` are places in it."""
    subscription: Codes
    bin: Ints
    attempts: Ints
    failed: Mask
    first: Mask
    """True for first attempts, each of another delivery; False for retries."""
    sidelined: Ints
    """Deliveries sidelined; such a row counts no attempt."""
    policy: Ints
    """Version of the subscription's settings, -1 if unknown."""
    attributes: dict[str, Attribute]

    @classmethod
    def from_arrow(cls, rows: pa.Table, *, weight: int = 1) -> "AttemptCells":
        """Encode rows with sub_key, bin, first, attempts, sidelined, policy_version, LOGGED.

        A state of an earlier version lacks later attributes, which are null then.
        """
        keys, subscription = np.unique(
            rows.column("sub_key").to_numpy().astype(np.int64), return_inverse=True
        )
        absent = pa.chunked_array([pa.nulls(rows.num_rows, pa.string())])
        attributes = {
            name: _encode(rows.column(name) if name in rows.column_names else absent)
            for name in LOGGED
        }
        columns = {
            "subscription": subscription.astype(np.int32),
            "bin": rows.column("bin").to_numpy().astype(np.int64),
            "first": rows.column("first").to_numpy(zero_copy_only=False).astype(np.bool_),
            "attempts": rows.column("attempts").to_numpy().astype(np.int64),
            "sidelined": rows.column("sidelined").to_numpy().astype(np.int64),
            "policy": pc.fill_null(rows.column("policy_version"), -1).to_numpy().astype(np.int64),
        }
        order = np.lexsort(
            (
                columns["attempts"],
                columns["policy"],
                *(attributes[name].codes for name in LOGGED),
                columns["first"],
                columns["subscription"],
                columns["bin"],
            )
        )
        attributes = {
            name: Attribute(codes=one.codes[order], texts=one.texts)
            for name, one in attributes.items()
        }
        attributes[_NETWORK] = _networks(attributes["target_host"])
        attributes[_TYPED_VERSION] = _typed_versions(
            attributes["event_type"], attributes["event_version"]
        )
        return cls(
            bin_s=CELL_S,
            weight=weight,
            keys=keys,
            failed=attributes["error_class"].codes >= 0,
            attributes=attributes,
            **{name: values[order] for name, values in columns.items()},
        )

    def rooms(self) -> Ints:
        """Return a number for the room of each of the `keys`: that of its first row."""
        rooms = np.full(len(self.keys), -1, dtype=np.int64)
        rooms[self.subscription[::-1]] = self.attributes["room_id"].codes[::-1]
        return rooms

    def chosen(self, mask: Mask) -> "AttemptCells":
        """Return only these rows."""
        return AttemptCells(
            bin_s=self.bin_s,
            weight=self.weight,
            keys=self.keys,
            subscription=self.subscription[mask],
            bin=self.bin[mask],
            attempts=self.attempts[mask],
            failed=self.failed[mask],
            first=self.first[mask],
            sidelined=self.sidelined[mask],
            policy=self.policy[mask],
            attributes={
                name: Attribute(codes=one.codes[mask], texts=one.texts)
                for name, one in self.attributes.items()
            },
        )


def _encode(column: pa.ChunkedArray) -> Attribute:
    texts = column.cast(pa.string())
    known = sorted(one for one in pc.unique(texts).to_pylist() if one is not None)
    codes = pc.index_in(texts, value_set=pa.array(known, pa.string()))
    return Attribute(codes=pc.fill_null(codes, -1).to_numpy().astype(np.int32), texts=known)


def _networks(hosts: Attribute) -> Attribute:
    found = [network_of(host) for host in hosts.texts]
    texts = sorted({one for one in found if one is not None})
    places = {text: place for place, text in enumerate(texts)}
    # The last entry is that of code -1.
    of_host = np.array([-1 if one is None else places[one] for one in found] + [-1], dtype=np.int32)
    return Attribute(codes=of_host[hosts.codes], texts=texts)


def _typed_versions(types: Attribute, versions: Attribute) -> Attribute:
    width = len(versions.texts)
    joined = types.codes.astype(np.int64) * width + versions.codes
    joined[(types.codes < 0) | (versions.codes < 0)] = -1
    used, codes = np.unique(joined, return_inverse=True)
    missing = int(len(used) > 0 and used[0] < 0)
    texts = [
        f"{types.texts[one // width]} {versions.texts[one % width]}"
        for one in used[missing:].tolist()
    ]
    return Attribute(codes=(codes - missing).astype(np.int32), texts=texts)
