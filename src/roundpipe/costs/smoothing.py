"""Smoothing: one number from many samples of which some are off."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


def median(samples: Sequence[float]) -> float:
    """The middle of the samples; of an even number, the mean of the two in the middle."""
    ordered = sorted(samples)
    half = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[half]
    return (ordered[half - 1] + ordered[half]) / 2


class RunningMedian:
    """The median of the latest samples (Tukey, Exploratory Data Analysis, 1977, chapter 7).

    Up to half of the samples in the window may be arbitrarily wrong without moving it far (Donoho
    and Huber, The notion of breakdown point, 1983), which a mean or an exponential average cannot
    say: a machine that did something else for one call leaves no trace.

    Args:
        window: how many samples count.
    """

    def __init__(self, window: int = 9) -> None:
        self._samples: deque[float] = deque(maxlen=window)

    def add(self, sample: float) -> None:
        """Take one more sample; the oldest is forgotten once the window is full."""
        self._samples.append(sample)

    @property
    def value(self) -> float | None:
        """The median; None without samples."""
        return median(self._samples) if self._samples else None


class RunningMax:
    """The largest of the latest samples: for bytes, where too little is worse than too much."""

    def __init__(self, window: int = 3) -> None:
        self._samples: deque[int] = deque(maxlen=window)

    def add(self, sample: int) -> None:
        """Take one more sample."""
        self._samples.append(sample)

    @property
    def value(self) -> int | None:
        """The largest; None without samples."""
        return max(self._samples, default=None)
