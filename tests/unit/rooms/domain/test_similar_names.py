"""The nearest of the known names."""

import pytest

from rooms.domain.similar_names import nearest_name, suggestion


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("order.creatd", "order.created"),
        ("ordre.created", "order.created"),
        ("order.pai", "order.paid"),
        ("shipment", None),
        ("order.paid", None),
        ("o" * 65, None),
    ],
)
def test_the_nearest_name_is_found(name: str, nearest: str | None) -> None:
    known = ["order.created", "order.paid", "o" * 66]
    assert nearest_name(name, known) == nearest
    assert suggestion(name, known) == ("" if nearest is None else f"; is {nearest} meant?")
