"""The Trace Event Format, as far as the package writes it: what an importer requires of a file."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

Event = dict[str, Any]


def check_format(document: Any) -> list[Event]:
    """The rules of the format (Google, "Trace Event Format", 2016) for the kinds that we write."""
    assert isinstance(document, dict)
    assert document["displayTimeUnit"] in ("ms", "ns")
    events: list[Event] = document["traceEvents"]
    required = {
        "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid"},
        "M": {"name", "ph", "pid", "args"},
        "s": {"name", "cat", "ph", "ts", "pid", "tid", "id"},
        "t": {"name", "cat", "ph", "ts", "pid", "tid", "id"},
        "f": {"name", "cat", "ph", "ts", "pid", "tid", "id"},
    }
    for event in events:
        assert required[event["ph"]] <= set(event)
        assert isinstance(event["name"], str)
        for number in ("ts", "dur"):
            assert isinstance(event.get(number, 0), (int, float))
            assert event.get(number, 0) >= 0
        assert isinstance(event["pid"], int)
        assert isinstance(event.get("tid", 0), int)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
    check_nesting(events)
    check_flows(events)
    return events


def check_nesting(events: list[Event]) -> None:
    """Complete events of a thread may lie within each other, but not overlap."""
    rows: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            end = event["ts"] + event["dur"]
            rows[event["pid"], event["tid"]].append((event["ts"], end))
    assert rows
    for intervals in rows.values():
        free = 0.0
        for begin, end in sorted(intervals):
            assert begin >= free - 1e-6
            free = end


def check_flows(events: list[Event]) -> None:
    """A flow starts once, ends once, and each of its points lies within a complete event."""
    flows: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            flows[event["id"]].append(event)
    slices = [event for event in events if event["ph"] == "X"]
    for points in flows.values():
        points.sort(key=lambda event: float(event["ts"]))
        phases = "".join(point["ph"] for point in points)
        assert phases == "s" + "t" * (len(points) - 2) + "f"
        for point in points:
            assert any(
                each["tid"] == point["tid"] and each["pid"] == point["pid"]
                and each["ts"] <= point["ts"] <= each["ts"] + each["dur"]
                for each in slices
            )  # fmt: skip
