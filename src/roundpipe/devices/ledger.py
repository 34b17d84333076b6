"""What is on one device, in bytes."""

from __future__ import annotations

import torch

from .base import Category, MemoryReport


class Ledger:
    """Bytes by category, their peaks, and a limit that holds. Not locked: its owner locks.

    Args:
        name: the device, for the message of an error.
        limit_bytes: the most that may be held at once; ``None`` for no limit.
    """

    def __init__(self, name: str, limit_bytes: int | None = None) -> None:
        self._name = name
        self.limit_bytes = limit_bytes
        self._now = dict.fromkeys(Category, 0)
        self._peak = dict.fromkeys(Category, 0)
        self._total = 0
        self._peak_total = 0

    @property
    def total_bytes(self) -> int:
        """Bytes held now."""
        return self._total

    def fits(self, nbytes: int) -> bool:
        """Whether ``nbytes`` more stay within the limit."""
        return self.limit_bytes is None or self._total + nbytes <= self.limit_bytes

    def add(self, category: Category, nbytes: int) -> None:
        """Count ``nbytes`` more.

        Raises:
            torch.OutOfMemoryError: they do not fit; nothing is counted then.
        """
        if not self.fits(nbytes):
            held = ", ".join(f"{c.value} {n}" for c, n in self._now.items())
            raise torch.OutOfMemoryError(
                f"{self._name} is out of memory: {nbytes} bytes of {category.value} were asked for,"
                f" {self._total} of {self.limit_bytes} bytes are in use ({held})"
            )
        self._total += nbytes
        self._now[category] += nbytes
        self._peak_total = max(self._peak_total, self._total)
        self._peak[category] = max(self._peak[category], self._now[category])

    def remove(self, category: Category, nbytes: int) -> None:
        """Count ``nbytes`` less."""
        self._total -= nbytes
        self._now[category] -= nbytes

    def move(self, source: Category, target: Category, nbytes: int) -> None:
        """Count ``nbytes`` under another category than before."""
        self._now[source] -= nbytes
        self._now[target] += nbytes
        self._peak[target] = max(self._peak[target], self._now[target])

    def report(self) -> MemoryReport:
        """The figures now."""
        return MemoryReport(
            total_bytes=self.limit_bytes,
            allocated_bytes=self._total,
            peak_bytes=self._peak_total,
            by_category=dict(self._now),
            peak_by_category=dict(self._peak),
        )

    def reset_peak(self) -> None:
        """Start new peaks from what is held now."""
        self._peak_total = self._total
        self._peak = dict(self._now)
