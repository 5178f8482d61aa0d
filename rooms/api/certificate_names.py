"""Compare the names of certificate authorities as OpenSSL does.

OpenSSL looks a revocation list up by the canonical form of its issuer. Any difference to that form
would be a list that counts in a handshake and was not checked when it was loaded.
"""

from cryptography import x509

CanonicalName = tuple[frozenset[tuple[str, bytes]], ...]
"""The parts of a name in their order; each is a set of attributes, by type and canonical value."""


def canonical_name(name: x509.Name) -> CanonicalName:
    """Return the form in which equal names are equal, as of OpenSSL's `x509_name_canon`.

    ASCII letters are in lower case, space around a value is left out, other space is one blank, and
    the type of a string is not compared. ValueError: a value cannot be decoded.
    """
    return tuple(
        frozenset((one.oid.dotted_string, _canonical_value(one.value)) for one in part)
        for part in name.rdns
    )


def _canonical_value(value: str | bytes) -> bytes:
    if isinstance(value, bytes):  # a bit string
        return value
    # Unlike those of a string, these methods of bytes know the letters and spaces of ASCII only.
    return b" ".join(value.encode().lower().split())
