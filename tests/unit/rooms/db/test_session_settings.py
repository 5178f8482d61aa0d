"""Test which settings of a session are made after connecting: those that the operator has not."""

import pytest

from rooms.db.session_settings import SERVER_TIMEOUTS, settings_statement

_OWN = {"lock_timeout": "5s", "statement_timeout": "7s"}
_ONE = "SELECT set_config('statement_timeout', '7s', false)"


@pytest.fixture(autouse=True)
def _no_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PGOPTIONS", raising=False)


def test_a_session_has_the_time_outs_of_a_client_that_vanished() -> None:
    assert settings_statement("postgresql://h/db", SERVER_TIMEOUTS) == (
        "SELECT set_config('tcp_keepalives_idle', '5', false),"
        " set_config('tcp_keepalives_interval', '3', false),"
        " set_config('tcp_keepalives_count', '3', false),"
        " set_config('tcp_user_timeout', '15000', false)"
    )


@pytest.mark.parametrize(
    "options",
    [
        "-c%20lock_timeout%3D1s",
        "-clock_timeout%3D1s",
        "--lock-timeout%3D1s",
        "-c%20LOCK_TIMEOUT%3D1s",
        "-c+search_path%3Da,%5C%20b+-c+lock_timeout%3D1s",
    ],
)
def test_options_of_the_operator_win(options: str) -> None:
    assert settings_statement(f"postgresql://h/db?options={options}", _OWN) == _ONE


def test_the_environment_wins_where_the_url_has_no_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGOPTIONS", "-c lock_timeout=1s")
    assert settings_statement("postgresql://h/db", _OWN) == _ONE
    both = settings_statement("postgresql://h/db?options=-c%20a%3Db", _OWN)
    assert both is not None
    assert both.count("set_config") == 2


def test_without_settings_left_there_is_no_statement() -> None:
    url = "postgresql://h/db?options=-c%20lock_timeout%3D1s"
    assert settings_statement(url, {"lock_timeout": "5s"}) is None


def test_a_name_within_a_value_is_none_of_the_operators() -> None:
    url = "postgresql://h/db?options=-c%20search_path%3Da,%5C%20--lock_timeout%3D1"
    assert settings_statement(url, {"lock_timeout": "5s"}) is not None
