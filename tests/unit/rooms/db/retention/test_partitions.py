"""Which parts of the past are gone through, and which of them become one."""

from datetime import UTC, datetime, timedelta

import pytest

from rooms.db.retention.partitions import PartitionSet, ranges_to_replace


def ms(at: datetime) -> int:
    return int(at.timestamp() * 1000)


def day(label: str, *, kept: bool = False) -> PartitionSet:
    low = datetime.strptime(label, "%Y%m%d").replace(tzinfo=UTC)
    return PartitionSet(label=label, low_ms=ms(low), high_ms=ms(low + timedelta(days=1)), kept=kept)


def month(label: str) -> PartitionSet:
    low = datetime.strptime(label, "%Y%m").replace(tzinfo=UTC)
    high = (low + timedelta(days=31)).replace(day=1)
    return PartitionSet(label=label, low_ms=ms(low), high_ms=ms(high), kept=True)


def several(*parts: PartitionSet, before: datetime) -> list[tuple[str, list[str]]]:
    """Return the ranges to merge."""
    spans = [span for span in ranges_to_replace(parts, ms(before)) if len(span.partition_sets) > 1]
    return [(span.label, [part.label for part in span.partition_sets]) for span in spans]


def test_each_part_is_gone_through_once_it_is_over() -> None:
    parts = [day("20240228"), day("20240229", kept=True), day("20240301")]
    spans = list(ranges_to_replace(parts, ms(datetime(2024, 3, 1, tzinfo=UTC))))
    assert [(span.label, span.low_ms, span.high_ms) for span in spans] == [
        (part.label, part.low_ms, part.high_ms) for part in parts[:2]
    ]


@pytest.mark.parametrize(("last", "merged"), [(28, False), (29, True)])
def test_a_month_becomes_one_when_all_of_it_is_over(last: int, *, merged: bool) -> None:
    """Of a leap year, too: to the first of March, and not before."""
    parts = [day("20240203", kept=True), day("20240229", kept=True)]
    before = datetime(2024, 2, last, 23, 59, tzinfo=UTC) + timedelta(minutes=1)
    assert several(*parts, before=before) == (
        [("202402", ["20240203", "20240229"])] if merged else []
    )


def test_what_is_whole_keeps_its_month_apart() -> None:
    parts = [day("20240103", kept=True), day("20240104", kept=True), day("20240105")]
    assert several(*parts, before=datetime(2025, 6, 1, tzinfo=UTC)) == []


def test_one_alone_is_not_made_anew() -> None:
    assert (
        several(
            month("202312"), day("20240131", kept=True), before=datetime(2024, 6, 1, tzinfo=UTC)
        )
        == []
    )


def test_a_year_becomes_one_of_months_and_days() -> None:
    parts = [month("202301"), month("202311"), day("20231231", kept=True), month("202401")]
    before = datetime(2024, 6, 1, tzinfo=UTC)
    assert several(*parts, before=before) == [("2023", ["202301", "202311", "20231231"])]
    (span,) = [
        span for span in ranges_to_replace(parts, ms(before)) if len(span.partition_sets) > 1
    ]
    assert (span.low_ms, span.high_ms) == (
        ms(datetime(2023, 1, 1, tzinfo=UTC)),
        ms(datetime(2024, 1, 1, tzinfo=UTC)),
    )
