"""Test that a list of large items ends by their bytes, and loses none."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from rooms.db.bounded_lists import MAX_LISTED_BYTES, read_bounded


@given(
    st.lists(st.sampled_from([0, 10, MAX_LISTED_BYTES // 3, MAX_LISTED_BYTES]), max_size=40),
    st.integers(1, 30),
)
async def test_pages_together_are_the_whole_list(sizes: list[int], limit: int) -> None:
    items = list(enumerate(sizes))
    most_read = 0
    seen: list[tuple[int, int]] = []
    is_over = False
    while not is_over:
        start = len(seen)

        async def read(
            last: tuple[int, int] | None, count: int, *, start: int = start
        ) -> Sequence[tuple[int, int]]:
            nonlocal most_read
            most_read = max(most_read, count)
            begin = start if last is None else last[0] + 1
            return items[begin : begin + count]

        page, is_cut = await read_bounded(read, limit, lambda one: one[1])
        assert len(page) <= limit
        assert sum(size for _, size in page[:-1]) < MAX_LISTED_BYTES
        assert is_cut or len(page) == min(limit, len(items) - start)
        seen += page
        is_over = not page or (not is_cut and len(page) < limit)
    assert seen == items
    assert most_read <= 8
