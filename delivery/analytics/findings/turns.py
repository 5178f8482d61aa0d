"""Choose what is computed where there is too much, such that every room has its turn."""

import numpy as np

from delivery.analytics.findings.series import Ints


def take_turns(rooms: Ints, weights: Ints, most: int) -> Ints:
    """Return the places of at most `most`: of each room the greatest weight, then the next.

    So the many subscriptions of one room that always fail do not displace those of all others. Of
    equal weights the earlier place comes first.
    """
    places = np.arange(len(rooms))
    by_room = np.lexsort((places, -weights, rooms))
    ordered = rooms[by_room]
    turns = np.empty(len(rooms), dtype=np.int64)
    turns[by_room] = places - np.searchsorted(ordered, ordered)
    chosen: Ints = np.lexsort((places, -weights, turns))[:most]
    return chosen
