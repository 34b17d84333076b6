"""Timelines in the Trace Event Format, which https://ui.perfetto.dev and chrome://tracing open.

The format: "Trace Event Format", Google, 2016. A file is an object with a list ``traceEvents``.
Complete events (``"ph": "X"``) are the spans; metadata events (``"M"``) name the rows; flow events
(``"s"``, ``"t"``, ``"f"``) draw a line along each microbatch's way through the stages.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

from roundpipe.plan.timeline import COMPUTE, HOST, TRANSFERS, Span, Timeline

_PID = 1
_US = 1000.0  # of a millisecond

Event = dict[str, Any]


def trace_document(*timelines: Timeline) -> dict[str, Any]:
    """Timelines as one JSON-ready trace, each a process of its own that begins at 0.

    Args:
        timelines: for instance a measured one and the simulated one to compare it with.
    """
    events: list[Event] = []
    for pid, timeline in enumerate(timelines, start=_PID):
        events += _process(timeline, pid)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def save_trace_document(path: str | PathLike[str], *timelines: Timeline) -> None:
    """Write a trace file; see :func:`trace_document`."""
    Path(path).write_text(json.dumps(trace_document(*timelines)), encoding="utf-8")


def _process(timeline: Timeline, pid: int) -> list[Event]:
    rows = _rows(timeline)
    events = [_named("process_name", pid, 0, timeline.title or "roundpipe")]
    for name, tid in rows.items():
        events.append(_named("thread_name", pid, tid, name))
        events.append(
            {"name": "thread_sort_index", "ph": "M", "ts": 0, "pid": pid, "tid": tid,
             "args": {"sort_index": tid}}
        )  # fmt: skip
    begin = timeline.begin_ms
    spans = sorted(timeline.spans, key=lambda span: (span.begin_ms, span.end_ms))
    for span in spans:
        events.append(_complete(span, begin, pid, rows[_row(timeline, span)]))
    events += _flows(timeline, spans, pid, rows)
    return events


def _rows(timeline: Timeline) -> dict[str, int]:
    """Each row's number: devices first, then their transfers, then optimizer and caller."""
    used = {_row(timeline, span) for span in timeline.spans}
    names = list(timeline.devices)
    for kind in TRANSFERS:
        names += [f"{device} {kind}s" for device in timeline.devices]
    names += [f"{device} waits" for device in timeline.devices] + ["optimizer", "caller waits"]
    return {name: tid for tid, name in enumerate(names) if name in used or name in timeline.devices}


def _row(timeline: Timeline, span: Span) -> str:
    if span.device == HOST:
        return "optimizer" if span.kind == "step" else "caller waits"
    device = timeline.devices[span.device]
    if span.kind in TRANSFERS:
        return f"{device} {span.kind}s"
    return f"{device} waits" if span.kind == "step_wait" else device


def _named(what: str, pid: int, tid: int, name: str) -> Event:
    return {"name": what, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": {"name": name}}


def _complete(span: Span, begin_ms: float, pid: int, tid: int) -> Event:
    arguments: Event = {"iteration": span.iteration}
    if span.stage >= 0:
        arguments |= {"call": span.call, "stage": span.stage}
    if len(span.layers):
        arguments["layers"] = f"{span.layers.start}..{span.layers.stop - 1}"
    name = span.kind
    if span.microbatch >= 0:
        arguments["microbatch"] = span.microbatch
        name = f"{span.kind} {span.microbatch}"
    return {
        "name": name,
        "cat": span.kind,
        "ph": "X",
        "ts": (span.begin_ms - begin_ms) * _US,
        "dur": (span.end_ms - span.begin_ms) * _US,
        "pid": pid,
        "tid": tid,
        "args": arguments,
    }


def _flows(
    timeline: Timeline, spans: list[Span], pid: int, rows: dict[str, int]
) -> Iterator[Event]:
    """A line through the middles of a microbatch's stages, for each microbatch of each call."""
    ways: dict[tuple[int, int, int], list[Span]] = defaultdict(list)
    for span in spans:
        if span.kind in COMPUTE:
            ways[span.iteration, span.call, span.microbatch].append(span)
    for place, way in ways.items():
        for index, span in enumerate(way if len(way) > 1 else ()):
            middle = (span.begin_ms + span.end_ms) / 2 - timeline.begin_ms
            event: Event = {
                "name": "microbatch",
                "cat": "microbatch",
                "ph": "s" if index == 0 else "f" if index == len(way) - 1 else "t",
                "id": ".".join(map(str, (pid, *place))),
                "ts": middle * _US,
                "pid": pid,
                "tid": rows[_row(timeline, span)],
            }
            if event["ph"] == "f":
                event["bp"] = "e"  # ends at the span around it, not at the next one
            yield event
