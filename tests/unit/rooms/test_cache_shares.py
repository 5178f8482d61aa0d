"""Test which entry of a cache is displaced."""

import random

from rooms.cache_shares import CacheShares


def test_the_tenant_with_the_most_entries_loses_its_oldest() -> None:
    shares = CacheShares[str]()
    for key in ("a1", "b1", "a2", "a3", "b2"):
        shares.add(key, key[0])
    shares.add("a1", "a")  # the newest now
    lost: list[str] = []
    while len(lost) < 5:
        lost.append(shares.displaced())
        shares.discard(lost[-1])
    assert lost[0] == "a2"
    assert lost.index("a3") < lost.index("a1")
    assert lost.index("b1") < lost.index("b2")
    shares.discard("never added")
    shares.add("c1", "c")
    assert shares.displaced() == "c1"


def test_an_entry_belongs_to_its_last_tenant() -> None:
    shares = CacheShares[str]()
    for key in ("1", "2", "3"):
        shares.add(key, "a")
    for key in ("1", "2"):
        shares.add(key, "b")
    assert shares.displaced() == "1"
    shares.clear()
    shares.add("4", "a")
    assert shares.displaced() == "4"


def test_it_agrees_with_counting() -> None:
    draw, shares = random.Random(7), CacheShares[int]()
    held: dict[int, str] = {}
    for step in range(2000):
        if held and draw.random() < 0.45:
            key = draw.choice(list(held))
            del held[key]
            shares.discard(key)
        else:
            held[step] = draw.choice("aaabbc")
            shares.add(step, held[step])
        if held:
            found = shares.displaced()
            counts = [list(held.values()).count(tenant) for tenant in "abc"]
            assert list(held.values()).count(held[found]) == max(counts)
            assert found == next(key for key in held if held[key] == held[found])
