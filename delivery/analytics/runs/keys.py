"""Compute the keys of names: numbers of 60 bits in place of texts.

Both engines have the same keys, as the order of keys breaks ties and seeds the simulations of retry
advice. They are the first hexadecimal digits of the SHA-256 of a secret salt and the text, so
no organisation can choose two names with one key. A million names share a key by chance in one of
two million states.
"""

import hashlib
from typing import Final

KEY_DIGITS: Final = 15
"""Hexadecimal digits of a key: as many as a bigint holds without its sign."""


def text_key(text: str, salt: str) -> int:
    """Return the key of a text."""
    return int(hashlib.sha256((salt + text).encode()).hexdigest()[:KEY_DIGITS], 16)
