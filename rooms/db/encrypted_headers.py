"""Encrypt the headers of a subscription for its row, and decrypt them."""

from collections.abc import Mapping
from typing import Any

import msgspec

from rooms.db.secrets import Cipher
from rooms.domain.ids import SubscriptionId


def headers_purpose(subscription: SubscriptionId) -> bytes:
    """Return the purpose for which headers of a subscription are encrypted."""
    return f"headers {subscription}".encode()


def encrypt_headers(
    cipher: Cipher, subscription: SubscriptionId, headers: Mapping[str, str]
) -> dict[str, Any]:
    """Return the columns that hold these headers of a subscription, encrypted."""
    encrypted = (
        cipher.encrypt(msgspec.json.encode(headers), headers_purpose(subscription))
        if headers
        else None
    )
    return {"headers": {}, "header_names": list(headers), "sealed_headers": encrypted}


def decrypt_headers(
    cipher: Cipher, subscription: SubscriptionId, encrypted: bytes
) -> Mapping[str, str]:
    """Return the headers in a column. ValueError: none of the keys encrypted them for it."""
    text = cipher.decrypt(encrypted, headers_purpose(subscription))
    return msgspec.json.decode(text, type=dict[str, str])
