"""Implement `rooms journal`: list, export and verify who changed what.

An exported file is verified without the service, and with `--compare` against it.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rooms.cli.context import CliSession, Group, pass_session
from rooms.cli.errors import CliError
from rooms.cli.input_files import open_input
from rooms.cli.options import Paging, find_organisation, paging_options, set_fields
from rooms.cli.output import write_export
from rooms.domain.ids import is_id
from rooms.domain.journal import (
    ChainBreak,
    ChainCheck,
    ChainedEntry,
    Outcome,
    from_document,
    to_document,
)
from rooms.safe_text import brief_repr

if TYPE_CHECKING:
    from rooms.cli.client import ApiClient

EXIT_BROKEN = 1
_MAX_LINE = 1 << 20
"""An entry with its two sides of 8 KiB is far shorter."""
_EVERY_ORGANISATION = "*"
_LAST_TIME = datetime.max.replace(tzinfo=UTC)
_COLUMNS = {
    "at": "at",
    "actor": "actor_name",
    "application": "application",
    "action": "action",
    "object": "object",
    "outcome": "outcome",
    "reason": "reason",
}
_organisation_option = click.option(
    "--organisation",
    help="Another organisation's journal, by id, name or member id; needs the scope platform.",
)


@click.group(cls=Group)
def journal() -> None:
    """Read who changed what, and prove that no entry was changed. Needs the scope audit."""


def _organisation_id(client: "ApiClient", reference: str | None) -> str | None:
    if reference is None or reference == _EVERY_ORGANISATION or is_id(reference):
        return reference
    return str(find_organisation(client, reference)["id"])


@journal.command("list")
@click.option("--since", help="At this time or later (RFC 3339).")
@click.option("--until", help="Before this time (RFC 3339).")
@click.option("--actor", help="Only of keys of this name.")
@click.option("--action", help="Only this action, such as approve_subscription.")
@click.option("--object", "object_path", help="Only objects whose path begins so.")
@click.option(
    "--outcome", type=click.Choice([one.value for one in Outcome]), help="Only this outcome."
)
@click.option(
    "--organisation",
    help="Another organisation's, by id, name or member id, or '*'; needs the scope platform.",
)
@paging_options
@pass_session
def list_entries(
    session: CliSession,
    /,
    *,
    object_path: str | None,
    organisation: str | None,
    paging: Paging,
    **filters: str | None,
) -> None:
    """List changes of the configuration and refused attempts, newest first.

    With --json each entry also shows what was there before and after.
    """
    with session.client() as client:
        params = {
            **set_fields(**filters, object=object_path),
            "organisation_id": _organisation_id(client, organisation),
        }
        page = client.page("/journal", params=params, **paging)
    session.output().listing(page, _COLUMNS, empty="no such entry")


@journal.command()
@click.option(
    "--format",
    "file_format",
    type=click.Choice(["ndjson", "csv"]),
    default="ndjson",
    show_default=True,
    help="CSV has no hashes to verify by `rooms journal verify`.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write to this file.  [default: standard output]",
)
@_organisation_option
@pass_session
def export(
    session: CliSession,
    /,
    *,
    file_format: str,
    out: Path | None,
    organisation: str | None,
) -> None:
    """Export the whole journal of one organisation, oldest entry first.

    A file appears under its name only when it is complete.
    """
    with session.client() as client:
        params = {
            "format": file_format,
            "organisation_id": _organisation_id(client, organisation),
        }
        chunks = client.stream_export("/journal/export", params)
        write_export(chunks, out)
    if out is not None:
        session.output().note(f"exported to {out}")


@dataclass(slots=True)
class _FileReport:
    """Hold what an exported file says, up to its first wrong entry."""

    entries: int = 0
    first: ChainedEntry | None = None
    last: ChainedEntry | None = None
    broken: ChainBreak | None = None

    def document(self) -> dict[str, Any]:
        return {
            "whole": self.broken is None,
            "entries": self.entries,
            "first": None if self.first is None else self.first.seq,
            "last": None if self.last is None else self.last.seq,
            "head_hash": None if self.last is None else self.last.hash.hex(),
            "broken_at": None if self.broken is None else self.broken.seq,
            "problem": None if self.broken is None else self.broken.problem,
        }


@journal.command()
@click.argument("file", required=False, type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--compare", is_flag=True, help="Also check that FILE is a part of the service's journal."
)
@_organisation_option
@click.pass_context
@pass_session
def verify(
    session: CliSession,
    ctx: click.Context,
    /,
    *,
    file: Path | None,
    compare: bool,
    organisation: str | None,
) -> None:
    """Verify the chain of hashes, in the service or of an exported NDJSON file.

    A file is verified without the service: each entry has its hash, and follows the one before.
    Exit code 1: an entry is missing, added, moved or changed.
    """
    if file is None and compare:
        raise click.UsageError("--compare: name the file to compare")
    if file is None:
        with session.client() as client:
            report = _verify_service(client, _organisation_id(client, organisation))
    else:
        checked = _verify_file(file)
        report = checked.document()
        if compare and checked.broken is None:
            with session.client() as client:
                report |= _compare(client, checked)
    out = session.output()
    if out.as_json:
        out.document(report)
    elif report["whole"]:
        span = f", {report['first']} to {report['last']}" if report["entries"] else ""
        out.line(f"whole: {report['entries']} entries{span}")
        if report["head_hash"]:
            out.line(f"hash of the last entry: {report['head_hash']}")
    else:
        out.line(f"broken: entry {report['broken_at']} {report['problem']}")
    if not report["whole"]:
        ctx.exit(EXIT_BROKEN)


def _verify_service(client: "ApiClient", organisation_id: str | None) -> dict[str, Any]:
    params = {"organisation_id": organisation_id}
    found: dict[str, Any] = client.call("GET", "/journal/verify", params=params)
    return found


def _verify_file(path: Path) -> _FileReport:
    """Check the chain of a file. Raise CliError if it is no export."""
    report, check = _FileReport(), ChainCheck()
    for number, line in _lines(path):
        try:
            chained = _parse(line)
            report.broken = check.add(chained)
        except (ValueError, RecursionError) as exc:
            raise CliError(
                f"{path}, line {number}: not an entry of an NDJSON export ({exc})"
            ) from exc
        if report.broken is not None:
            return report
        report.first = report.first or chained
        report.last = chained
        report.entries += 1
    if report.last is None:
        raise CliError(f"{path} has no entry")
    return report


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with open_input(path) as file:
            yield from enumerate(iter(lambda: file.readline(_MAX_LINE), b""), start=1)
    except OSError as exc:
        raise CliError(f"{path} cannot be read: {exc.strerror}") from exc


def _parse(line: bytes) -> ChainedEntry:
    """Return the entry of a line. What its hash does not cover is refused: ValueError."""
    document = json.loads(line, object_pairs_hook=_unique)
    if not isinstance(document, dict):
        raise ValueError("it is no JSON object")  # noqa: TRY004 - of the line, not of an argument
    chained = from_document(document)
    if more := sorted(document.keys() - to_document(chained).keys()):
        raise ValueError(f"unknown field {brief_repr(more[0])}")
    return chained


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a field is given twice")
    return found


def _compare(client: "ApiClient", report: _FileReport) -> dict[str, Any]:
    """Return what differs if the last entry of a file is not the service's, in a whole chain.

    A hash covers all entries before it, so equal hashes mean that the file is a part of the chain.
    """
    assert report.last is not None
    last, organisation_id = report.last, report.last.entry.organisation_id
    at = last.entry.at
    params = {"since": at.isoformat(), "organisation_id": organisation_id}
    if at < _LAST_TIME:  # nothing is later than that
        params["until"] = (at + timedelta(microseconds=1)).isoformat()
    for entry in client.iter_items("/journal", params):
        if entry["seq"] == last.seq and entry["hash"] == last.hash.hex():
            service = _verify_service(client, organisation_id)
            if service["whole"]:
                return {}
            return _broken(service["broken_at"], f"{service['problem']} (in the service)")
    service = _verify_service(client, organisation_id)
    if service["first"] is not None and last.seq < service["first"]:
        raise CliError(
            f"the service keeps entries from {service['first']} on, and the file ends at "
            f"{last.seq}: compare it with a later export"
        )
    return _broken(last.seq, "is not in the service's journal")


def _broken(seq: int, problem: str) -> dict[str, Any]:
    return {"whole": False, "broken_at": seq, "problem": problem}
