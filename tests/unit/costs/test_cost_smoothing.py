"""One number from samples of which some are off."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from roundpipe.costs.smoothing import RunningMax, RunningMedian, median


def test_nothing_is_known_without_samples() -> None:
    assert RunningMedian().value is None
    assert RunningMax().value is None


def test_a_call_in_which_the_machine_did_something_else_leaves_no_trace() -> None:
    smoothed = RunningMedian(window=5)
    for sample in (10.0, 10.2, 500.0, 9.9, 10.1):
        smoothed.add(sample)
    assert smoothed.value == 10.1


def test_a_lasting_change_is_followed_once_it_fills_half_of_the_window() -> None:
    smoothed = RunningMedian(window=5)
    for sample in [10.0] * 5 + [20.0] * 2:
        smoothed.add(sample)
    assert smoothed.value == 10.0
    smoothed.add(20.0)
    assert smoothed.value == 20.0


@given(st.lists(st.floats(1.0, 2.0), min_size=9, max_size=9), st.integers(0, 4), st.randoms())
def test_as_long_as_most_samples_are_sound_so_is_the_median(
    sound: list[float], wrong: int, rng: random.Random
) -> None:
    samples = sound[wrong:] + [1e9] * wrong
    rng.shuffle(samples)
    smoothed = RunningMedian(window=9)
    for sample in samples:
        smoothed.add(sample)
    assert smoothed.value is not None
    assert min(sound) <= smoothed.value <= max(sound)


def test_the_median_of_an_even_number_is_between_the_two_in_the_middle() -> None:
    assert median([4.0, 1.0, 3.0, 2.0]) == 2.5


def test_bytes_are_the_largest_of_late() -> None:
    size = RunningMax(window=2)
    for sample in (9, 3, 5):
        size.add(sample)
    assert size.value == 5
