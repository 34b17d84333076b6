"""The bubble account: where the devices' time went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from roundpipe.plan.timeline import COMPUTE, HOST, Span, Timeline

CAUSES = ("fill", "switch", "steady", "drain", "upload", "step")


@dataclass(frozen=True)
class BubbleAccount:
    """Device time between two moments, all devices together, in milliseconds.

    Attributes:
        total_ms: the moments' distance times the number of devices.
        busy_ms: computing.
        fill_ms: idle before a device's first stage of an iteration, waiting for the first
            microbatch to come down the pipeline.
        switch_ms: idle between two stages of a device, waiting for the input of the second.
        steady_ms: idle within a stage, waiting for its next microbatch.
        drain_ms: idle after a device's last stage of an iteration, until all have finished.
        upload_ms: idle while the weights of the next stage were still arriving.
        step_ms: idle while the next stage waited for the optimizer step, or for gradients that it
            waited for.
    """

    total_ms: float
    busy_ms: float
    fill_ms: float
    switch_ms: float
    steady_ms: float
    drain_ms: float
    upload_ms: float
    step_ms: float

    @property
    def idle_ms(self) -> float:
        """All of it but the computing."""
        # Sums in another order may be above the whole in the last digits.
        return max(self.total_ms - self.busy_ms, 0.0)

    @property
    def bubble_percent(self) -> float:
        """Idle share of the whole."""
        return 100 * self.idle_ms / self.total_ms if self.total_ms else 0.0

    def percent(self, cause: str) -> float:
        """Share of one of :data:`CAUSES` in the whole."""
        amount: float = getattr(self, f"{cause}_ms")
        return 100 * amount / self.total_ms if self.total_ms else 0.0


class _Gap(NamedTuple):
    """An idle time of a device, and what it computed before and after it."""

    begin: float
    end: float
    before: Span | None
    after: Span | None


def account_of(
    timeline: Timeline,
    begin_ms: float | None = None,
    end_ms: float | None = None,
    *,
    slack_ms: float = 1e-6,
) -> BubbleAccount:
    """Where the time between two moments went.

    Every idle moment of a device lies before some span of it, or after its last one. If that span
    goes on with a stage, the idle time is *steady*. Else, if the next stage began when a step
    ended, the time from the end of the step's iteration to the end of the step is *step*; and so is
    what a measured timeline marks as waiting for a step, of the device or of the caller. While the
    stage's weights were arriving, the time is *upload*. What remains is *switch* within an
    iteration. Between two iterations it is *drain* until all devices have finished the first one,
    and *fill* after that.

    Args:
        timeline: simulated or measured.
        begin_ms: the first moment; None for the timeline's.
        end_ms: the last moment; None for the timeline's.
        slack_ms: how soon after a step what waits for it begins; more for measured timelines.
    """
    begin = timeline.begin_ms if begin_ms is None else begin_ms
    end = timeline.end_ms if end_ms is None else end_ms
    judge = _Judge(timeline, slack_ms)
    amounts = dict.fromkeys(("busy", *CAUSES), 0.0)
    for device in range(len(timeline.devices)):
        spans = timeline.of(device, *COMPUTE)
        covered = begin
        for span in spans:
            left, right = max(span.begin_ms, covered), min(span.end_ms, end)
            amounts["busy"] += max(right - left, 0.0)
            covered = max(covered, right)
        for gap in _gaps(spans, begin, end):
            judge.add(device, gap, amounts)
    return BubbleAccount((end - begin) * len(timeline.devices), **_with_unit(amounts))


def _with_unit(amounts: dict[str, float]) -> dict[str, float]:
    return {f"{name}_ms": amount for name, amount in amounts.items()}


def _gaps(spans: Sequence[Span], begin: float, end: float) -> list[_Gap]:
    """The idle times of a device between two moments."""
    gaps = []
    before: Span | None = None
    free = float("-inf")
    for span in [*spans, None]:
        until = float("inf") if span is None else span.begin_ms
        left, right = max(free, begin), min(until, end)
        if right > left:
            gaps.append(_Gap(left, right, before, span))
        if span is not None and span.end_ms >= free:
            before, free = span, span.end_ms
    return gaps


class _Judge:
    """Says what an idle time was spent waiting for."""

    def __init__(self, timeline: Timeline, slack_ms: float) -> None:
        self._slack = slack_ms
        self._steps = timeline.of(HOST, "step")
        self._ends: dict[int, float] = {}
        self._uploads: dict[tuple[int, int, int, int], Span] = {}
        self._waits = timeline.of(HOST, "step_wait")
        self._waits += [
            span for span in timeline.spans if span.kind == "step_wait" and span.device != HOST
        ]
        for span in timeline.spans:
            if span.kind in COMPUTE:
                self._ends[span.iteration] = max(
                    self._ends.get(span.iteration, span.end_ms), span.end_ms
                )
            elif span.kind == "upload":
                # Measured uploads come in pieces: the first begins and the last one ends it.
                place = _at(span.device, span)
                first = self._uploads.get(place, span)
                begin, end = min(first.begin_ms, span.begin_ms), max(first.end_ms, span.end_ms)
                self._uploads[place] = span._replace(begin_ms=begin, end_ms=end)

    def add(self, device: int, gap: _Gap, amounts: dict[str, float]) -> None:
        """Book an idle time under its causes."""
        before, after = gap.before, gap.after
        if before is not None and after is not None and _stage(before) == _stage(after):
            amounts["steady"] += gap.end - gap.begin
            return
        upload = None if after is None else self._uploads.get(_at(device, after))
        step_begin, step_end = self._step(after, upload)
        upload_begin, upload_end = (0.0, 0.0) if upload is None else _times(upload)
        turn = self._turn(before, after)
        waits = [_times(wait) for wait in self._waits_of(device, gap)]
        waits.append((step_begin, step_end))
        edges = (*(edge for wait in waits for edge in wait), upload_begin, upload_end, turn)
        cuts = sorted({gap.begin, gap.end, *(e for e in edges if gap.begin < e < gap.end)})
        for left, right in pairwise(cuts):
            middle = (left + right) / 2
            if any(begin <= middle < end for begin, end in waits):
                cause = "step"
            elif upload_begin <= middle < upload_end:
                cause = "upload"
            elif turn < 0:
                cause = "switch"
            else:
                cause = "drain" if middle < turn else "fill"
            amounts[cause] += right - left

    def _waits_of(self, device: int, gap: _Gap) -> list[Span]:
        return [
            wait
            for wait in self._waits
            if wait.device in (device, HOST) and wait.begin_ms < gap.end and wait.end_ms > gap.begin
        ]

    def _step(self, after: Span | None, upload: Span | None) -> tuple[float, float]:
        """The time that a stage waited for a step; empty if it did not."""
        if after is not None:
            begin = after.begin_ms if upload is None else upload.begin_ms
            for step in reversed(self._steps):
                if step.iteration < after.iteration and 0 <= begin - step.end_ms <= self._slack:
                    end = self._ends.get(step.iteration, step.begin_ms)
                    return min(end, step.begin_ms), step.end_ms
        return 0.0, 0.0

    def _turn(self, before: Span | None, after: Span | None) -> float:
        """Where the drain of one iteration ends and the fill of the next begins; -1 for neither."""
        if before is None:
            return 0.0
        end = self._ends[before.iteration]
        if after is None:
            return float("inf")
        if before.iteration == after.iteration or after.begin_ms < end:
            return -1.0
        return end


def _stage(span: Span) -> tuple[int, int, int]:
    return span.iteration, span.call, span.stage


def _at(device: int, span: Span) -> tuple[int, int, int, int]:
    return device, span.iteration, span.call, span.stage


def _times(span: Span) -> tuple[float, float]:
    return span.begin_ms, span.end_ms
