"""Name the headers that every answer has: a browser does nothing with one but show it."""

import hashlib
from base64 import b64encode
from typing import Final

from rooms.rest.document import STYLE

# The page at /schema has one style sheet, which the policy names by its hash; nothing else may be loaded or run.
_STYLE_HASH: Final = b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
SECURITY_HEADERS: Final = [
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    (
        "content-security-policy",
        f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("x-frame-options", "DENY"),
    ("cache-control", "no-store"),
]
"""Answers have tenants' data: none may be kept by a browser or a proxy."""
