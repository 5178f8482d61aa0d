"""Hide values of headers in answers that repeat them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delivery.push.redaction import MIN_LENGTH, hidden_texts, hide
from rooms.domain.attempt import AttemptResult, ErrorClass

TEXTS = hidden_texts(["Bearer s3cret-token-1", "short", "Basic dXNlcjpwYXNz"])


def result(body: bytes, detail: str = "") -> AttemptResult:
    return AttemptResult(500, ErrorClass.STATUS, detail, body, None, 1.0)


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        (b'{"Authorization": "Bearer s3cret-token-1"}', b'{"Authorization": "***"}'),
        (b"token s3cret-token-1, dXNlcjpwYXNz", b"token ***, ***"),
        (b"cut Bearer s3cret-tok", b"cut ***"),
        (b"cut s3cret-tok", b"cut ***"),
        (b"short Bearer \xff\x00", b"short Bearer \xff\x00"),
        (b"", b""),
    ],
)
def test_what_an_endpoint_repeats_is_hidden(body: bytes, kept: bytes) -> None:
    found = hide(result(body, f"moved to /?t={body.decode('latin-1')}"), TEXTS)
    assert found.body_head == kept
    assert "s3cret" not in found.detail
    assert (found.status, found.error, found.latency_ms) == (500, ErrorClass.STATUS, 1.0)


def test_without_long_values_the_result_is_the_same_one() -> None:
    one = result(b"a body")
    assert hide(one, hidden_texts(["short"])) is one
    assert hide(one, ()) is one


@given(
    st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=MIN_LENGTH, max_size=40),
    st.binary(max_size=30),
    st.binary(max_size=30),
)
def test_no_value_is_left_wherever_it_is(value: str, before: bytes, after: bytes) -> None:
    found = hide(result(before + value.encode() + after), hidden_texts([value]))
    assert value.encode() not in found.body_head
