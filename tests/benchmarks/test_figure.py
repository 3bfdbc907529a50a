"""The pictures of the README: names beside lines can be read."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.figure import BOTTOM, HEIGHT, LINE, TOP, spread

AXIS = HEIGHT - BOTTOM + 24  # where the words of the axis stand


@given(st.lists(st.floats(TOP, HEIGHT - BOTTOM), min_size=1, max_size=12))
def test_names_overlap_neither_each_other_nor_the_axis(places):
    moved = sorted(spread(places))
    assert all(after - before >= LINE - 1e-6 for before, after in itertools.pairwise(moved))
    assert moved[-1] <= AXIS - LINE


def test_names_with_room_stay_beside_their_lines():
    assert spread([60.0, 200.0, 100.0]) == [60.0, 200.0, 100.0]
