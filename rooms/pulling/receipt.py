"""Ack ids: the delivery and the generation of its lease, 21 bytes as 28 characters that are safe anywhere."""

from binascii import a2b_base64, b2a_base64
from typing import Final

LENGTH: Final = 28
_FORMAT: Final = b"\x01"
_ID_END: Final = 17
_BYTES: Final = 21
_SAFE: Final = bytes.maketrans(b"+/", b"-_")
_PLAIN: Final = {ord("-"): "+", ord("_"): "/", ord("+"): "!", ord("/"): "!"}

Lease = tuple[bytes, bytes]
"""(delivery id as 16 bytes, generation as 4), both big-endian."""


def ack_id(delivery: bytes, generation: bytes) -> bytes:
    """The ack id of a lease, in ASCII."""
    return b2a_base64(_FORMAT + delivery + generation, newline=False).translate(_SAFE)


def read_ack_id(text: str) -> Lease:
    """The inverse of `ack_id`; ValueError where the text is none. One lease has one ack id."""
    if len(text) != LENGTH:
        raise ValueError("an ack_id has another length")
    packed = a2b_base64(text.translate(_PLAIN), strict_mode=True)
    if len(packed) != _BYTES or packed[:1] != _FORMAT or packed[_ID_END] & 0x80:
        raise ValueError("an ack_id is made otherwise")
    return packed[1:_ID_END], packed[_ID_END:]
