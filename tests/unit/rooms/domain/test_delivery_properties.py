"""Test how publishers, keys and times stand in headers."""

import re
from datetime import UTC, datetime
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooms.domain.delivery_properties import (
    DeliveryProperties,
    expiry_text,
    header_value,
    publisher_text,
)
from rooms.domain.ids import OrganisationId

OWNER = OrganisationId("01900000-0000-7000-8000-000000000001")
OTHER = OrganisationId("01900000-0000-7000-8000-000000000002")


@given(st.text() | st.text('\r\n\t %"a\x7f\x00é\U0001f600'))
def test_any_text_becomes_a_header_value_that_gives_it_back(text: str) -> None:
    value = header_value(text)
    assert re.fullmatch(r"[!-~]*", value)
    assert '"' not in value
    assert unquote(value, errors="strict") == text
    assert len(value) <= 12 * len(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("customer-7", "customer-7"),
        ("a/b:c;d,e", "a/b:c;d,e"),
        ("100%", "100%25"),
        ("Euro €", "Euro%20%E2%82%AC"),
        ("x\r\nRooms-Publisher: other", "x%0D%0ARooms-Publisher:%20other"),
        ('"', "%22"),
    ],
)
def test_only_what_no_header_may_hold_is_encoded(text: str, value: str) -> None:
    assert header_value(text) == value


def test_a_publisher_is_its_organisation_and_its_application() -> None:
    assert DeliveryProperties().publisher(OWNER) == OWNER
    assert DeliveryProperties(application="billing").publisher(OWNER) == f"{OWNER}/billing"
    assert DeliveryProperties(organisation=OTHER).publisher(OWNER) == OTHER
    assert publisher_text(OTHER, "billing") == f"{OTHER}/billing"
    assert DeliveryProperties(has_publisher=False).publisher(OWNER) is None


@given(st.integers(0, 4_000_000_000_000))
def test_an_expiry_is_a_time_with_milliseconds(at_ms: int) -> None:
    text = expiry_text(at_ms)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", text)
    assert (datetime.fromisoformat(text) - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() == (
        pytest.approx(at_ms / 1000)
    )
