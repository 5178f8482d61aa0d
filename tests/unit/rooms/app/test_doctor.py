"""Test what the doctor says about the files of TLS."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from rooms.app.doctor import check_tls
from rooms.settings import Settings, read_settings
from tests.support.certificates import Authority
from tests.support.client_certificates import DAY, ClientCertificateAuthority

NOW = datetime.now(UTC)


def settings(folder: Path) -> Settings:
    return read_settings(
        {
            "ROOMS_TLS_LISTEN": "127.0.0.1:8443",
            "ROOMS_TLS_CERT": str(folder / "chain.pem"),
            "ROOMS_TLS_KEY": str(folder / "key.pem"),
            "ROOMS_TLS_CLIENT_CA": str(folder / "members.pem"),
            "ROOMS_TLS_CLIENT_CRL": str(folder / "crl.pem"),
        }
    )


def test_files_that_end_are_named(tmp_path: Path) -> None:
    members = ClientCertificateAuthority()
    Authority().write(tmp_path)
    (tmp_path / "members.pem").write_bytes(members.pem)
    (tmp_path / "crl.pem").write_bytes(members.revocation_list(ends=-DAY))
    found = check_tls(settings(tmp_path), NOW)  # the certificate is valid for a day
    assert [one.open_count for one in found] == [1, 1]
    assert "certificate" in found[0].description
    assert "revocation list" in found[1].description
    assert not check_tls(settings(tmp_path), NOW - timedelta(days=30))


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (finding,) = check_tls(settings(tmp_path), NOW)
    assert "ROOMS_TLS_CERT" in finding.description
    Authority().write(tmp_path)
    (tmp_path / "key.pem").write_text("no key")
    (finding,) = check_tls(settings(tmp_path), NOW)
    assert "ROOMS_TLS_KEY" in finding.description


def test_without_tls_there_is_nothing_to_check() -> None:
    assert check_tls(read_settings({}), NOW) == []
