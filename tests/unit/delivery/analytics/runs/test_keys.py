"""Test the keys of names."""

import hashlib

from delivery.analytics.runs.keys import text_key

# These had one key while it was XXH64 with Spark's seed.
FIRST = f"orders.a{'a' * 24}payments{'a' * 24}"
SECOND = f"X1.LbZpI{'a' * 24}hO0lbZKj{'a' * 24}"


def test_names_that_were_chosen_to_collide_have_two_keys() -> None:
    assert text_key(FIRST, "salt") != text_key(SECOND, "salt")


def test_a_key_depends_on_the_salt_and_fits_a_bigint() -> None:
    keys = {text_key("order", str(salt)) for salt in range(100)}
    assert len(keys) == 100
    assert all(0 <= key < 1 << 60 for key in keys)


def test_a_key_is_the_begin_of_the_digest() -> None:
    digest = hashlib.sha256("saltäöü".encode()).digest()
    assert text_key("äöü", "salt") == int.from_bytes(digest[:8]) >> 4
