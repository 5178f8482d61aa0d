"""Group sealed segments by the hour of their rows."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from delivery.analytics.sealing.check import KnownSegment, SoundSegment
from delivery.analytics.sealing.manifest import SegmentManifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """An hour of the log. `part` counts hours from 1970; `files`: its segments by path.

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
