"""What a model did over time: the measured timeline, its account, and what was to be expected."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from os import PathLike

from .errors import StateError
from .plan import BubbleAccount, Timeline, account_of
from .plan.timeline import COMPUTE, HOST
from .plan.timeline import Span as TimelineSpan
from .plan.trace_events import save_trace_document
from .plot import plot_overlay, plot_timeline, save_picture
from .trace import Span

_KINDS = {"publish": "step"}  # what the optimizer thread does between two steps' gradients
_SLACK_MS = 0.5  # how soon after a step those who waited for it begin


def timeline_of(spans: Iterable[Span], devices: Sequence[str], title: str) -> Timeline:
    """Logged spans in the form of the simulator's.

    An iteration ends with a step. Where there were none, every call is an iteration.

    Args:
        spans: from an event log.
        devices: names of the devices, in order.
        title: for pictures.
    """
    index = {name: number for number, name in enumerate(devices)}
    known = sorted(spans, key=lambda span: span.begin_ns)
    has_steps = any(span.phase == "step" for span in known)
    calls = [span.iteration if has_steps else span.call for span in known]
    first = min(calls, default=0)
    origin_ns = min((span.begin_ns for span in known), default=0)
    return Timeline(
        tuple(devices),
        tuple(
            TimelineSpan(
                _KINDS.get(span.phase, span.phase),
                index.get(span.device, HOST),
                iteration - first,
                span.call,
                span.stage,
                span.microbatch,
                (span.begin_ns - origin_ns) / 1e6,
                (span.end_ns - origin_ns) / 1e6,
                span.layers,
            )
            for span, iteration in zip(known, calls, strict=True)
        ),
        title,
    )


class Profile:
    """What ran within ``model.profile()``; to be read after it.

    Args:
        devices: names of the devices, in order.
        title: for pictures.
    """

    def __init__(self, devices: Sequence[str], title: str) -> None:
        self._devices = tuple(devices)
        self._title = title
        self._timeline: Timeline | None = None

    def close(self, spans: Iterable[Span]) -> None:
        """The profile is over, with these spans."""
        self._timeline = timeline_of(spans, self._devices, self._title)

    @property
    def timeline(self) -> Timeline:
        """What ran where and when, in the form of the simulator's.

        Raises:
            StateError: inside the ``with`` block, or nothing ran in it.
        """
        if self._timeline is None:
            raise StateError(
                "the profile is still being taken; read it after the with block of model.profile()"
            )
        if not self._timeline.spans:
            raise StateError(
                "nothing ran while the profile was taken; call the model within the with block"
            )
        return self._timeline

    def iteration_ms(self) -> float:
        """Time from the begin of an iteration to the begin of the next; the median of them all.

        With a single iteration it is the time from its begin to the end of its last stage or, if
        the caller waited for the step, to the end of the step.
        """
        spans = self.timeline.spans
        begins: dict[int, float] = {}
        for span in spans:
            if span.kind in COMPUTE:
                begin = begins.get(span.iteration, span.begin_ms)
                begins[span.iteration] = min(begin, span.begin_ms)
        ordered = [begins[iteration] for iteration in sorted(begins)]
        if len(ordered) < 2:
            waits = ("step_wait", *COMPUTE)
            end = max(span.end_ms for span in spans if span.kind in waits)
            return end - ordered[0]
        gaps = sorted(b - a for a, b in pairwise(ordered))
        return (gaps[len(gaps) // 2] + gaps[(len(gaps) - 1) // 2]) / 2

    def account(self) -> BubbleAccount:
        """Where the devices' time went, from the first stage's begin to the last one's end."""
        computed = [span for span in self.timeline.spans if span.kind in COMPUTE]
        begin = min(span.begin_ms for span in computed)
        end = max(span.end_ms for span in computed)
        return account_of(self.timeline, begin, end, slack_ms=_SLACK_MS)

    def save_trace(self, path: str | PathLike[str], *more: Timeline) -> None:
        """Write a trace file for https://ui.perfetto.dev.

        Args:
            path: where to.
            more: other timelines to show below, such as the predicted one.
        """
        save_trace_document(path, self.timeline, *more)

    def save_picture(self, path: str | PathLike[str], predicted: Timeline | None = None) -> None:
        """Draw the timeline; matplotlib's endings of file names decide the format.

        Args:
            path: where to.
            predicted: a simulated timeline, drawn over the measured one.

        Raises:
            StateError: matplotlib is not installed.
        """
        if predicted is None:
            figure = plot_timeline(self.timeline)
        else:
            figure = plot_overlay(predicted, self.timeline)
        save_picture(figure, path)
