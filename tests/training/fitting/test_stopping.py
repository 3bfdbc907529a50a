"""When variants and runs are stopped, from the figures of their epochs alone."""

import math

from engram_training.fitting.stopping import (
    FIRST_CHECK,
    PATIENCE,
    Epoch,
    behind,
    has_stalled,
    last_figures,
)


def epochs(scores, losses=None):
    """One epoch per row, with a score and a loss of each variant."""
    losses = losses or [[1.0] * len(row) for row in scores]
    return [
        Epoch(step, [1.0] * len(row), list(row), list(loss), list(row), list(loss))
        for step, (row, loss) in enumerate(zip(scores, losses, strict=True), 1)
    ]


def test_a_variant_clearly_behind_is_stopped_and_a_near_one_is_not():
    found = epochs([[0.9, 0.88, 0.6]] * FIRST_CHECK)
    assert behind(found, images=100) == {2}
    assert behind(found, images=10_000) == {1, 2}, "more images tell smaller differences"
    assert behind(found, images=6) == set()


def test_nothing_is_stopped_in_the_first_epochs():
    assert behind(epochs([[0.9, 0.1]] * (FIRST_CHECK - 1)), images=1000) == set()


def test_a_variant_that_diverged_or_stopped_stays_stopped():
    assert behind(epochs([[0.9, math.nan]] * FIRST_CHECK), images=100) == {1}


def test_a_stopped_variant_is_shown_with_its_last_figures():
    found = epochs([[0.5, 0.4], [0.5, math.nan]], [[1.0, 2.0], [0.9, math.nan]])
    assert last_figures(found) == [(0.5, 0.9), (0.4, 2.0)]


def test_one_right_answer_after_another_stops_no_perfect_variant():
    assert behind(epochs([[1.0, 0.99]] * FIRST_CHECK), images=100) == set()


def test_a_run_ends_without_progress_of_any_variant():
    falling = [[1.0 / step, 1.0] for step in range(1, 12)]
    flat = [[1.0, 1.0]] * 11
    assert not has_stalled(epochs(flat, falling))
    assert has_stalled(epochs(flat, flat))
    assert not has_stalled(epochs(flat[:PATIENCE], flat[:PATIENCE])), "too early to tell"


def test_progress_below_a_hundredth_does_not_count():
    slowly = [[1.0 - 0.001 * step] for step in range(11)]
    assert has_stalled(epochs([[0.5]] * 11, slowly))
