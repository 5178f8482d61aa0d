"""Test which headers publishers may add to a message."""

import pytest

from rooms.domain.message_headers import header_key, is_reserved, is_withheld

IDENTITY = (
    "X-Road-Client", "X-Road-Represented-Party", "X-GovStack-Client", "Forwarded", "Via",
    "X-Forwarded-Client-Cert", "X-Forwarded-User", "X-Real-IP", "Client-Cert", "Client-Cert-Chain",
    "X-SSL-Client-S-DN", "SSL-Client-Cert", "Remote-User", "X-Remote-User", "X-Auth-Request-Email",
    "X-Original-URL", "True-Client-IP", "X_Road_Client",
    "Cf-Access-Jwt-Assertion", "Cf-Access-Authenticated-User-Email", "CF-Connecting-IPv6",
    "Cf-Client-Cert-Sha256", "X-MS-Client-Principal", "X-MS-CLIENT-PRINCIPAL-NAME",
    "X-MS-TOKEN-AAD-ID-TOKEN", "OIDC_CLAIM_email", "OIDC_access_token", "X-Pomerium-Claim-Email",
    "X-Pomerium-Jwt-Assertion", "Tailscale-User-Login", "X-Consumer-Username", "X-Consumer-ID",
    "X-Consumer-Custom-ID", "X-Credential-Identifier", "X-Anonymous-Consumer",
    "X-authentik-username", "X-Vouch-User", "X-Userinfo", "X-Appengine-User-Email",
    "X-Appengine-Inbound-Appid", "X-Azure-ClientIP", "X-Azure-FDID", "X-ARR-ClientCert",
    "X-Tls-Client-Cert", "X-Client-Verify", "X-Client-DN", "X-HTTP-Method-Override",
    "X-HTTP-Method", "X-Method-Override",
)  # fmt: skip
OWN = (
    "Content-Type",
    "webhook-id",
    "Rooms-Publisher",
    "Authorization",
    "Cookie",
    "Host",
    "Set-Cookie",
)
FREE = (
    "X-Trace", "X-Request-Id", "traceparent", "X-Api-Key", "X-Roads", "Viaduct",
    "Accept", "My_Header", "X-Client", "Clients-Cert",
    "X-Client-Version", "X-Client-Id", "X-Consumer-Version", "X-Ms-Date", "Cf-Ray", "X-Tls-Version",
    "X-User-Info", "X-Credential",
)  # fmt: skip


@pytest.mark.parametrize("name", IDENTITY)
def test_what_says_who_calls_is_reserved_and_withheld(name: str) -> None:
    assert is_reserved(header_key(name))
    assert is_withheld(name)


@pytest.mark.parametrize("name", OWN)
def test_what_belongs_to_rooms_is_reserved_in_any_writing(name: str) -> None:
    for spelt in (name, name.upper(), name.replace("-", "_")):
        assert is_reserved(header_key(spelt))
    assert not is_withheld(name)
    assert is_withheld(name.replace("-", "_")) == ("-" in name)


@pytest.mark.parametrize("separator", "!#$%&'*+.^`|~_")
def test_no_other_separator_makes_a_name_free(separator: str) -> None:
    """Some servers pass all of them on to programs as the same character."""
    for name in ("X-Forwarded-For", "X-GovStack-Client", "Webhook-Signature", "Rooms-Publisher"):
        spelt = name.replace("-", separator)
        assert is_reserved(header_key(spelt))
        assert is_withheld(spelt)
        assert header_key(spelt) == header_key(name)


@pytest.mark.parametrize("name", FREE)
def test_other_names_are_free(name: str) -> None:
    assert not is_reserved(header_key(name))
    assert not is_withheld(name)
