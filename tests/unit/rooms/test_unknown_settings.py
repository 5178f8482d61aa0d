"""Test that a misspelt setting is named, with the one that is meant."""

import re
from pathlib import Path

import pytest

from rooms import settings
from rooms.unknown_settings import unknown_settings


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("ROOMS_LISTN", "ROOMS_LISTEN"),
        ("ROOMS_RETENTON_DAYS", "ROOMS_RETENTION_DAYS"),
        ("ROOMS_MAX_PAYLOAD", "ROOMS_MAX_PAYLOAD_BYTES"),
        ("ROOMS_OIDC_CLIENTID", "ROOMS_OIDC_CLIENT_ID"),
        ("ROOMS_CLAIM_SS", "ROOMS_CLAIM_TTL_S"),
        ("ROOMS_API_KY", "ROOMS_API_KEY"),
        ("ROOMS_ULR", "ROOMS_URL"),
        ("ROOMS_PLAN_PORT", "ROOMS_PLAIN_PORT"),
    ],
)
def test_a_misspelt_setting_is_named_with_the_one_that_is_meant(name: str, meant: str) -> None:
    assert list(unknown_settings({name: "1", "ROOMS_DATA": "x", "PATH": "/bin"})) == [
        f"{name} is no setting, and has no effect; is {meant} meant?"
    ]


def test_what_resembles_no_setting_is_named_too() -> None:
    assert list(unknown_settings({"ROOMS_ZZZZ": ""})) == [
        "ROOMS_ZZZZ is no setting, and has no effect"
    ]


def test_every_setting_and_every_variable_of_a_client_is_known() -> None:
    names = set(re.findall(r'"(ROOMS_[A-Z_]+[A-Z])"', Path(settings.__file__).read_text()))
    names -= set(settings.RENAMED)
    assert len(names) > 50
    others = ("ROOMS_URL", "ROOMS_API_KEY", "ROOMS_CACHE", "ROOMS_SUPERVISED", "ROOMS_PASSWORD")
    assert not list(unknown_settings(dict.fromkeys([*names, *others], "1")))


def test_names_of_other_programs_are_left_alone() -> None:
    assert not list(unknown_settings({"CHATROOMS_LISTN": "1", "rooms_listn": "1"}))


def test_what_kubernetes_sets_beside_a_service_is_left_alone() -> None:
    address = "tcp://10.0.0.1:8080"
    assert not list(
        unknown_settings(
            {
                "ROOMS_PORT": address,
                "ROOMS_API_PORT": address,
                "ROOMS_PORT_8080_TCP": address,
                "ROOMS_PORT_8080_TCP_ADDR": "10.0.0.1",
                "ROOMS_SERVICE_HOST": "10.0.0.1",
                "ROOMS_SERVICE_PORT_HTTP": "8080",
            }
        )
    )
    assert list(unknown_settings({"ROOMS_PORT": "8080"}))
