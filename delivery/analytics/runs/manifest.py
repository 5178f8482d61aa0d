"""Store the state between runs: partial results of partitions, and the manifest of runs.

    state/manifest.json              written last; a run that died before it left no state
    state/run=7/deliveries/*.parquet rows of the partitions that run 7 processed, with `part`

A partition is an hour of sealed segments. One with changed files is processed again, and its rows
of older runs are ignored. Nothing is rewritten in place, so no rename is needed. When there are
many runs, their rows are compacted into one.

Each engine has tables of its own, so the manifest names the engine. The other one starts over; it
reads only which segments were counted, so that those which are gone are named. So does a run over
a state whose keys were made without a salt.

The salt of the keys of names is secret and random. Organisations choose names of event types and
hosts: without it they could choose two with the same key, and every run would fail.
"""

import hashlib
import json
import re
import secrets
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from delivery.analytics.runs.conformance import TRANSITIONS, order_base
from delivery.analytics.runs.errors import StateError
from delivery.analytics.runs.files import OutputFiles
from delivery.analytics.sealing.check import KnownSegment, SoundSegment
from delivery.analytics.sealing.layout import SEGMENT_VERSION
from delivery.analytics.sealing.manifest import SegmentManifest
from rooms.domain.state_machine import LogKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Hold an hour of the log. `part` counts hours from 1970; `files`: its segments by path.

    `manifests`: those of the segments that no earlier run has read.
    """

    part: int
    root: str
    files: Mapping[str, KnownSegment]
    manifests: Mapping[str, SegmentManifest]

    @property
    def paths(self) -> tuple[str, ...]:
        """Return the addresses of its segments."""
        return tuple(f"{self.root}/{path}" for path in sorted(self.files))

    def without(self, paths: Collection[str]) -> "Partition":
        """Return the partition without these segments."""
        return Partition(
            part=self.part,
            root=self.root,
            files={path: one for path, one in self.files.items() if path not in paths},
            manifests={path: one for path, one in self.manifests.items() if path not in paths},
        )


def partitions_of(root: str, segments: Iterable[SoundSegment]) -> Mapping[int, Partition]:
    """Return the partitions of these segments below an address."""
    found: dict[int, list[SoundSegment]] = {}
    for one in segments:
        found.setdefault(one.part, []).append(one)
    return {
        part: Partition(
            part=part,
            root=root,
            files={one.path: one.known for one in of_part},
            manifests={one.path: one.manifest for one in of_part if one.manifest is not None},
        )
        for part, of_part in sorted(found.items())
    }


_MANIFEST: Final = "state/manifest.json"
_LAYOUT: Final = 4
_SALT_BYTES: Final = 16
_START_OVER: Final = "run once with --full"
SPARK: Final = "spark"
LOCAL: Final = "local"
ENGINES: Final = (LOCAL, SPARK)
"""Names of the engines that have a state."""
COMPACT_AFTER_RUNS: Final = 24
"""Runs after which their rows are compacted."""


_RUN_FOLDER: Final = re.compile("run=[0-9]+")


def state_folder(run: int) -> str:
    """Return the folder of a run's partial results below the output."""
    return f"state/run={run}"


def new_salt() -> str:
    """Return a secret salt for the keys of names."""
    return secrets.token_hex(_SALT_BYTES)


def _layout_fingerprint(engine: str) -> str:
    """Hash the meaning of all stored numbers; a state with another hash is useless."""
    meanings: list[object] = [
        _LAYOUT,
        SEGMENT_VERSION,
        [(kind.value, order_base(kind)) for kind in LogKind],
        TRANSITIONS,
        # That of Spark is older than the other engine, and has no name.
        *([] if engine == SPARK else [engine]),
    ]
    return hashlib.sha256(json.dumps(meanings).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class DonePartition:
    """Hold a processed partition: its run, and its segments by path."""

    run: int
    files: Mapping[str, KnownSegment]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Run of each partition; `next_run` grows with every run, `published` is complete.

    `gone`: segments that an earlier run has read, and that no partition has any more.
    """

    done_partitions: Mapping[int, DonePartition] = field(default_factory=dict)
    next_run: int = 1
    published: int | None = None
    schemas: Mapping[str, str] = field(default_factory=dict)
    """Spark schema of each table as JSON, which saves opening files."""
    gone: Mapping[str, KnownSegment] = field(default_factory=dict)
    accepted: frozenset[str] = frozenset()
    """Segments that the operator has removed after their analysis."""
    salt: str = field(default_factory=lambda: new_salt())  # noqa: PLW0108 - looked up when called
    """Salt of the keys of names, the same in all tables of the state."""

    @property
    def known(self) -> Mapping[str, KnownSegment]:
        """Return every segment that was ever read, by path."""
        found = dict(self.gone)
        for done in self.done_partitions.values():
            found.update(done.files)
        return found

    def pending(self, found: Mapping[int, Partition]) -> list[Partition]:
        """Return the partitions with segments that are new or have changed.

        One that only lacks segments keeps its rows.
        """
        return [partition for partition in found.values() if self._has_news(partition)]

    def _has_news(self, partition: Partition) -> bool:
        done = self.done_partitions.get(partition.part)
        return done is None or any(
            path not in done.files or done.files[path].sha256 != one.sha256
            for path, one in partition.files.items()
        )

    def counts(self, path: str, part: int | None) -> bool:
        """Return True if the rows of this segment are in the state."""
        done = None if part is None else self.done_partitions.get(part)
        return done is not None and path in done.files

    def with_done(
        self,
        worked_on: Collection[Partition],
        schemas: Mapping[str, str],
        known: Mapping[str, KnownSegment],
    ) -> "Manifest":
        """Return the manifest after the next run has processed these partitions.

        `known`: segments of all earlier runs, also if this one starts over.
        """
        run = self.next_run
        worked = {one.part: DonePartition(run=run, files=dict(one.files)) for one in worked_on}
        done = {**self.done_partitions, **worked}
        held = {path for one in done.values() for path in one.files}
        return Manifest(
            done_partitions=done,
            next_run=run + 1,
            published=run,
            schemas={**self.schemas, **schemas},
            gone={path: one for path, one in known.items() if path not in held},
            accepted=self.accepted,
            salt=self.salt,
        )

    def distrusting(self, paths: Collection[str]) -> "Manifest":
        """Return the manifest such that the next run reads these segments again."""
        return replace(
            self,
            done_partitions={
                part: replace(
                    done,
                    files={
                        path: replace(one, modified_ms=-1) if path in paths else one
                        for path, one in done.files.items()
                    },
                )
                for part, done in self.done_partitions.items()
            },
        ) if paths else self  # fmt: skip

    def compacted(self, into_run: int) -> "Manifest":
        """Return the manifest after the rows of all runs were merged into one."""
        done = {part: replace(one, run=into_run) for part, one in self.done_partitions.items()}
        return replace(self, done_partitions=done, next_run=into_run + 1)

    def parts_by_run(self) -> dict[int, list[int]]:
        """Return the current partitions of each run."""
        found: dict[int, list[int]] = {}
        for part, done in sorted(self.done_partitions.items()):
            found.setdefault(done.run, []).append(part)
        return found


def load_manifest(files: OutputFiles, engine: str) -> Manifest:
    """Load the manifest of this engine's state, empty if there is none.

    Raise StateError if it is damaged, or has another meaning.
    """
    document = _read_document(files)
    return Manifest() if document is None else _manifest_of(files, document, engine)


def load_known(files: OutputFiles) -> Mapping[str, KnownSegment]:
    """Return the segments of earlier runs, also of the other engine or of another version.

    Their names and checksums mean the same in all of them. Empty if the state cannot be read.
    """
    try:
        document = _read_document(files)
        return {} if document is None else _known_of(document)
    except (StateError, KeyError, TypeError, ValueError, AttributeError):
        return {}


def state_engine(files: OutputFiles) -> str | None:
    """Return the engine that wrote the state; None: there is no state that can be used."""
    try:
        document = _read_document(files)
    except StateError:
        return None
    meaning = None if document is None or not document.get("done") else document.get("meaning")
    return next((one for one in ENGINES if _layout_fingerprint(one) == meaning), None)


def has_unsalted_keys(files: OutputFiles) -> bool:
    """Return True if the state is of a version whose keys had no salt."""
    try:
        document = _read_document(files)
    except StateError:
        return False
    # By its shape: the meaning of such a state depends on the transitions that its version knew.
    # One without `gone` is older, and its segments are not sealed.
    return (
        document is not None
        and "gone" in document
        and "salt" not in document
        and document.get("meaning") not in {_layout_fingerprint(one) for one in ENGINES}
    )


def _manifest_of(files: OutputFiles, document: Mapping[str, Any], engine: str) -> Manifest:
    where = f"{files.root}/{_MANIFEST}"
    if document.get("meaning") != _layout_fingerprint(engine):
        raise StateError(
            "the state was written by another version of Rooms", where=where, remedy=_START_OVER
        )
    try:
        return Manifest(
            done_partitions={
                int(part): DonePartition(run=run, files=_known_from(found))
                for part, (run, found) in document["done"].items()
            },
            next_run=document["next_run"],
            published=document["published"],
            schemas=document["schemas"],
            gone=_known_from(document["gone"]),
            accepted=frozenset(document["accepted"]),
            salt=_salt_of(document),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise StateError("the state is damaged", where=where, remedy=_START_OVER) from exc


def empty_manifest(files: OutputFiles) -> Manifest:
    """Return a manifest without partitions that continues the run numbers and keeps the salt.

    With the same salt, whatever the order of keys decides stays as it was.
    """
    runs = [int(folder) for folder in files.folders("runs") if folder.isdecimal()]
    try:
        document = _read_document(files) or {}
    except StateError:
        document = {}
    found = document.get("next_run")
    next_run = max([found if isinstance(found, int) else 1, *(n + 1 for n in runs)])
    try:
        return Manifest(next_run=next_run, salt=_salt_of(document))
    except (KeyError, ValueError):
        return Manifest(next_run=next_run)


def _salt_of(document: Mapping[str, Any]) -> str:
    """Return the salt. Raise KeyError or ValueError if there is none, or another text."""
    salt = document["salt"]
    if not isinstance(salt, str) or len(salt) != 2 * _SALT_BYTES:
        raise ValueError("salt")
    return salt


def reserve_run(files: OutputFiles, run: int, engine: str) -> None:
    """Reserve the run number, even if the run fails: readers may open its tables early."""
    try:
        document = _read_document(files)
    except StateError:
        # Only a run that starts over gets here.
        document = None
    document = _manifest_document(Manifest(), engine) if document is None else document
    files.write(_MANIFEST, json.dumps({**document, "next_run": run + 1}))


def _read_document(files: OutputFiles) -> dict[str, Any] | None:
    try:
        text = files.read(_MANIFEST)
        if text is None:
            return None
        document = json.loads(text)
    except ValueError as exc:
        raise StateError(
            "the state is damaged", where=f"{files.root}/{_MANIFEST}", remedy=_START_OVER
        ) from exc
    if not isinstance(document, dict):
        raise StateError(
            "the state is damaged", where=f"{files.root}/{_MANIFEST}", remedy=_START_OVER
        )
    return document


def _known_from(found: Mapping[str, Any]) -> dict[str, KnownSegment]:
    return {
        path: KnownSegment(size=size, modified_ms=modified_ms, sha256=sha256)
        for path, (size, modified_ms, sha256) in found.items()
    }


def _known_of(document: Mapping[str, Any]) -> Mapping[str, KnownSegment]:
    found = _known_from(document["gone"])
    for _, files in document["done"].values():
        found.update(_known_from(files))
    return found


def _known_document(files: Mapping[str, KnownSegment]) -> dict[str, list[int | str]]:
    return {path: [one.size, one.modified_ms, one.sha256] for path, one in sorted(files.items())}


def _manifest_document(manifest: Manifest, engine: str) -> dict[str, Any]:
    return {
        "meaning": _layout_fingerprint(engine),
        "next_run": manifest.next_run,
        "published": manifest.published,
        "schemas": dict(manifest.schemas),
        "done": {
            str(part): [done.run, _known_document(done.files)]
            for part, done in manifest.done_partitions.items()
        },
        "gone": _known_document(manifest.gone),
        "accepted": sorted(manifest.accepted),
        "salt": manifest.salt,
    }


def save_manifest(files: OutputFiles, manifest: Manifest, engine: str) -> None:
    """Save the manifest and delete the state of runs that it no longer names."""
    files.write(_MANIFEST, json.dumps(_manifest_document(manifest, engine)))
    live = {f"run={run}" for run in manifest.parts_by_run()}
    # Others may keep folders there, such as snapshots of a file system.
    found = {name for name in files.folders("state") if _RUN_FOLDER.fullmatch(name)}
    for folder in found - live:
        files.delete(f"state/{folder}")
