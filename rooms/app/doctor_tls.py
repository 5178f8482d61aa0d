"""Check the files of the TLS port, as the API would load them."""

from datetime import datetime, timedelta
from typing import Final

from delivery.doctor.checks import DoctorFinding
from rooms.api.server.tls_files import TlsFileError, TlsFiles, load_tls
from rooms.settings import Settings

PART: Final = "tls"
RENEW_WITHIN: Final = timedelta(days=14)
"""A certificate that ends sooner is a finding."""
_RENEW: Final = "replace the file; running processes read it within five seconds"


def check_tls(settings: Settings, now: datetime) -> list[DoctorFinding]:
    """Return what is wrong with the files, or will be soon."""
    files = TlsFiles.of(settings)
    if files is None:
        return []
    try:
        loaded = load_tls(files)
    except TlsFileError as exc:
        return [DoctorFinding(part=PART, description=str(exc), count=1, advice=_RENEW)]
    found = []
    if loaded.not_after - now < RENEW_WITHIN:
        found.append(_ending("the certificate of the TLS port", loaded.not_after))
    if loaded.lists_end is not None and loaded.lists_end <= now:
        found.append(_ending("a revocation list, whose clients are all refused,", loaded.lists_end))
    return found


def _ending(what: str, end: datetime) -> DoctorFinding:
    return DoctorFinding(
        part=PART, description=f"{what} ends at {end.isoformat()}", count=1, advice=_RENEW
    )
