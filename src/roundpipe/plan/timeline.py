"""Timelines: what ran where and when, simulated or measured, in one form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

COMPUTE = ("forward", "fused", "recompute", "backward")
"""Kinds of spans in which a device computes."""

TRANSFERS = ("upload", "download")
"""Kinds of spans in which weights or gradients move."""

KINDS = (*COMPUTE, *TRANSFERS, "step", "step_wait")
"""All kinds. Only measured timelines say explicitly that a device waited for a step."""

HOST = -1
"""The device of optimizer steps."""


class Span(NamedTuple):
    """Something that took time.

    Attributes:
        kind: one of :data:`KINDS`. A measured ``backward`` may contain the recompute.
        device: index of the device, or :data:`HOST`; there, a ``step_wait`` is the caller's, during
            which no device has work.
        iteration: counted from 0.
        call: counted through the iteration.
        stage: position of the stage in its call; -1 for steps.
        microbatch: index in its call; -1 for transfers and steps.
        begin_ms: start.
        end_ms: end.
        layers: the stage; empty where that is not known.
    """

    kind: str
    device: int
    iteration: int
    call: int
    stage: int
    microbatch: int
    begin_ms: float
    end_ms: float
    layers: range = range(0)


@dataclass(frozen=True)
class Timeline:
    """Spans of some iterations on some devices.

    Attributes:
        devices: their names.
        spans: in no particular order.
        title: shown above pictures.
    """

    devices: tuple[str, ...]
    spans: tuple[Span, ...]
    title: str = ""

    @property
    def begin_ms(self) -> float:
        """Start of the first span."""
        return min((span.begin_ms for span in self.spans), default=0.0)

    @property
    def end_ms(self) -> float:
        """End of the last span."""
        return max((span.end_ms for span in self.spans), default=0.0)

    def of(self, device: int, *kinds: str) -> list[Span]:
        """Spans of a device and of some kinds, by their start."""
        chosen = [span for span in self.spans if span.device == device and span.kind in kinds]
        return sorted(chosen, key=lambda span: (span.begin_ms, span.end_ms))

    def between(self, begin_ms: float, end_ms: float) -> Timeline:
        """What ran between two moments; spans that reach beyond are cut."""
        spans = tuple(
            span._replace(begin_ms=max(span.begin_ms, begin_ms), end_ms=min(span.end_ms, end_ms))
            for span in self.spans
            if span.begin_ms < end_ms and span.end_ms > begin_ms
        )
        return Timeline(self.devices, spans, self.title)


_LETTERS = {"forward": "F", "fused": "L", "recompute": "R", "backward": "B"}


def render_timeline(timeline: Timeline, width: int = 100) -> str:
    """A timeline as text: one row per device, one character per slice of time.

    ``F`` forward, ``L`` fused (with the loss), ``R`` recompute, ``B`` backward, ``.`` idle; below,
    ``u`` uploads and ``d`` downloads of any device and ``s`` optimizer steps, where there are any.
    A slice shows what took most of it.

    Args:
        timeline: what to show.
        width: characters for the whole time.
    """
    begin, end = timeline.begin_ms, timeline.end_ms
    if end <= begin:
        return "(nothing ran)"
    slice_ms = (end - begin) / width
    label = max(len(name) for name in (*timeline.devices, "transfers"))
    rows = []
    for device, name in enumerate(timeline.devices):
        row = _row(timeline.of(device, *COMPUTE), begin, slice_ms, width, _LETTERS)
        rows.append(f"{name:>{label}} |{row}|")
    moving = [span for span in timeline.spans if span.kind in TRANSFERS]
    if moving:
        row = _row(moving, begin, slice_ms, width, {"upload": "u", "download": "d"})
        rows.append(f"{'transfers':>{label}} |{row}|")
    steps = timeline.of(HOST, "step")
    if steps:
        row = _row(steps, begin, slice_ms, width, {"step": "s"})
        rows.append(f"{'step':>{label}} |{row}|")
    ruler = f"{0:<{width // 2}.0f}{end - begin:>{width - width // 2}.1f}"
    rows.append(f"{'ms':>{label}}  {ruler}")
    return "\n".join([timeline.title, *rows] if timeline.title else rows)


def _row(
    spans: Sequence[Span], begin: float, slice_ms: float, width: int, letters: dict[str, str]
) -> str:
    """For each slice, the letter of what took most of it."""
    shares: list[dict[str, float]] = [{} for _ in range(width)]
    for span in spans:
        first = int((span.begin_ms - begin) / slice_ms)
        last = min(int((span.end_ms - begin) / slice_ms), width - 1)
        for index in range(max(first, 0), last + 1):
            left = max(span.begin_ms, begin + index * slice_ms)
            right = min(span.end_ms, begin + (index + 1) * slice_ms)
            share = shares[index]
            share[letters[span.kind]] = share.get(letters[span.kind], 0.0) + max(right - left, 0.0)
    row = []
    for share in shares:
        idle = slice_ms - sum(share.values())
        letter, most = max(share.items(), key=lambda item: item[1], default=(".", 0.0))
        row.append(letter if most > 0 and most >= idle else ".")
    return "".join(row)
