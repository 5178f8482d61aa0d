"""Seal segments with manifests, and check segments against them before anything is read.

    dt=2026-05-01/hr=13/NAME.parquet             a segment
    dt=2026-05-01/hr=13/_NAME.parquet.manifest   rows, writers, kinds, versions, SHA-256

The manifest appears before its segment, so no segment is visible without one. A reader trusts
nothing else: a segment that is not what its manifest says is set aside and named.

| module | content |
| --- | --- |
| `layout` | columns, versions and folders of segments |
| `manifest` | the manifest, and its text |
| `files` | the files below one address, local or remote |
| `contents` | what a Parquet file contains, read with bounded memory |
| `check` | which segments may be read, and why others may not |
| `seal` | `rooms segments seal`: manifests for segments that come from elsewhere |
| `lock` | one run at a time in a folder |
"""
