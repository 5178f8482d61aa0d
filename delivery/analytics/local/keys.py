"""Compute the 64-bit keys of texts: XXH64 with seed 42, as Spark's `xxhash64`.

Both engines have the same keys, as the order of keys breaks ties and seeds the replays of retry
advice. Only distinct texts are hashed, so Python is fast enough.
"""

from typing import Final

_MASK: Final = (1 << 64) - 1
_P1: Final = 0x9E3779B185EBCA87
_P2: Final = 0xC2B2AE3D27D4EB4F
_P3: Final = 0x165667B19E3779F9
_P4: Final = 0x85EBCA77C2B2AE63
_P5: Final = 0x27D4EB2F165667C5
_SEED: Final = 42
_STRIPE: Final = 32


def text_key(text: str) -> int:
    """Return the key of a text, signed as a bigint."""
    hashed = _xxh64(text.encode())
    return hashed - (1 << 64) if hashed >> 63 else hashed


def _rotated(value: int, by: int) -> int:
    return (value << by | value >> (64 - by)) & _MASK


def _round(state: int, word: int) -> int:
    return _rotated((state + word * _P2) & _MASK, 31) * _P1 & _MASK


def _xxh64(content: bytes) -> int:
    size = len(content)
    whole = size - size % _STRIPE
    if whole:
        lanes = [(_SEED + _P1 + _P2) & _MASK, (_SEED + _P2) & _MASK, _SEED, (_SEED - _P1) & _MASK]
        for at in range(0, whole, 8):
            lane = at // 8 % 4
            lanes[lane] = _round(lanes[lane], int.from_bytes(content[at : at + 8], "little"))
        state = sum(map(_rotated, lanes, (1, 7, 12, 18))) & _MASK
        for lane_state in lanes:
            state = ((state ^ _round(0, lane_state)) * _P1 + _P4) & _MASK
    else:
        state = _SEED + _P5
    state = (state + size) & _MASK
    at = whole
    while at + 8 <= size:
        state ^= _round(0, int.from_bytes(content[at : at + 8], "little"))
        state = (_rotated(state, 27) * _P1 + _P4) & _MASK
        at += 8
    if at + 4 <= size:
        state ^= int.from_bytes(content[at : at + 4], "little") * _P1 & _MASK
        state = (_rotated(state, 23) * _P2 + _P3) & _MASK
        at += 4
    for byte in content[at:]:
        state ^= byte * _P5 & _MASK
        state = _rotated(state, 11) * _P1 & _MASK
    for shift, factor in ((33, _P2), (29, _P3)):
        state = (state ^ state >> shift) * factor & _MASK
    return state ^ state >> 32
