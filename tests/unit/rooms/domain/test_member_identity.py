"""Test which member an identifier or a certificate names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooms.domain.member_identity import (
    DEFAULT_RULES,
    SUBJECT_ATTRIBUTES,
    CertificateNames,
    CertificateRules,
    MemberIdentity,
)

RULES = CertificateRules.parse(DEFAULT_RULES)


def names(*uris: str, **subject: str | tuple[str, ...]) -> CertificateNames:
    return CertificateNames(
        {
            SUBJECT_ATTRIBUTES[name]: (value,) if isinstance(value, str) else value
            for name, value in subject.items()
        },
        uris,
    )


@pytest.mark.parametrize(
    ("text", "application"), [("SE/GOV/1", None), ("SE/GOV/1/payroll", "payroll")]
)
def test_an_identifier_has_three_or_four_parts(text: str, application: str | None) -> None:
    assert MemberIdentity.parse(text) == MemberIdentity("SE/GOV/1", application)


@pytest.mark.parametrize(
    "text",
    ["", "SE", "SE/GOV", "SE/GOV/", "/GOV/1", "SE/GOV/1/", "SE/GOV/1/a/b", "SE/GOV/1/å", "SE//1",
     "SE/GOV/1\n", " SE/GOV/1", "SE/GOV/%31", "SE/GOV/1/" + "a" * 65, "a/" * 100_000],
)  # fmt: skip
def test_anything_else_is_no_identifier(text: str) -> None:
    with pytest.raises(ValueError, match="instance/class/code"):
        MemberIdentity.parse(text)


@given(st.text(max_size=300))
def test_an_identifier_is_read_back_as_it_was_written(text: str) -> None:
    try:
        found = MemberIdentity.parse(text)
    except ValueError:
        return
    assert "/".join(filter(None, [found.member_id, found.application])) == text


def test_the_subject_of_x_road_names_a_member() -> None:
    assert RULES.identify(names(C="SE", O="GOV", CN="1")) == MemberIdentity("SE/GOV/1")


def test_a_uri_goes_before_the_subject_and_may_name_an_application() -> None:
    found = RULES.identify(
        names("https://example.com", "urn:govstack:member:FI/COM/2/app", C="SE", O="GOV", CN="1")
    )
    assert found == MemberIdentity("FI/COM/2", "app")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (names(C="SE", CN="1"), "names a member"),
        (names(), "names a member"),
        (names(C="SE", O="GOV", CN=("1", "2")), "several times"),
        (names(C="SE", O="GOV/1", CN="2"), "slash"),
        (names(C="SE", O="Some Agency", CN="2"), "names no member"),
        (names("urn:govstack:member:bad", C="SE", O="GOV", CN="1"), "names no member"),
        (names("urn:govstack:member:SE/GOV/1", "urn:govstack:member:SE/GOV/2"), "several URIs"),
    ],
)
def test_an_ambiguous_or_malformed_name_is_refused_and_not_passed_over(
    given: CertificateNames, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        RULES.identify(given)


def test_rules_may_have_fixed_parts_and_an_application() -> None:
    rules = CertificateRules.parse("subject=EE/{O}/{serialNumber}/{OU}, subject=EE/COM/{CN}")
    assert rules.identify(names(O="GOV", serialNumber="7", OU="tax", CN="x")) == MemberIdentity(
        "EE/GOV/7", "tax"
    )
    assert rules.identify(names(O="GOV", CN="x")) == MemberIdentity("EE/COM/x")


@pytest.mark.parametrize(
    ("text", "why"),
    [("", "is no rule"), ("uri=", "is no rule"), ("dns=x", "is no rule"), ("subject=a/b/c", "no attribute"),
     ("subject={C}/{X}/{CN}", "names X"), ("subject={C}/{CN}", "makes no identifier"),
     ("subject={C}/{O}/{CN}/{OU}/{L}", "makes no identifier")],
)  # fmt: skip
def test_a_malformed_rule_is_named(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        CertificateRules.parse(text)
