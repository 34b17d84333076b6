"""Trace files against the Trace Event Format: what Perfetto's importer requires of each event."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

from roundpipe.plan import (
    DeviceSpec,
    LayerCost,
    LayerCosts,
    Machine,
    StagePlan,
    Timeline,
    Workload,
    simulate,
)
from roundpipe.plan.timeline import COMPUTE, HOST, Span
from roundpipe.plan.trace_events import save_trace_document, trace_document
from support.trace_format import check_format


def simulated() -> Timeline:
    layer = LayerCost(2.0, 4.0, weight_bytes=10, gradient_bytes=10, optimizer_ms=1.0)
    like = DeviceSpec("gpu", upload_bytes_per_ms=10.0, download_bytes_per_ms=10.0)
    workload = Workload(LayerCosts((layer,) * 4), Machine.uniform(2, 0.5, like=like), 3)
    plan = StagePlan([range(2)], [range(2, 4), range(2)])
    return simulate(workload, plan, iterations=2, title="simulated").timeline


def test_a_simulated_timeline_is_a_valid_trace(tmp_path: Path) -> None:
    timeline = simulated()
    save_trace_document(tmp_path / "trace.json", timeline)

    events = check_format(json.loads((tmp_path / "trace.json").read_text(encoding="utf-8")))

    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == len(timeline.spans)
    rows = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert rows == {
        "gpu:0", "gpu:1", "gpu:0 uploads", "gpu:1 uploads", "gpu:0 downloads", "gpu:1 downloads",
        "optimizer",
    }  # fmt: skip
    forward = next(event for event in complete if event["name"] == "forward 0")
    assert forward["dur"] == pytest.approx(4000)  # microseconds: two layers of 2 ms
    assert forward["args"] == {
        "iteration": 0, "call": 0, "stage": 0, "layers": "0..1", "microbatch": 0,
    }  # fmt: skip


def test_each_microbatch_of_each_call_has_a_flow_through_its_stages() -> None:
    events = check_format(trace_document(simulated()))
    flows = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            flows[event["id"]].append(event["ph"])
    assert len(flows) == 2 * 3
    # Forward, fused, recompute and backward.
    assert all(phases == ["s", "t", "t", "f"] for phases in flows.values())


def test_two_timelines_are_two_processes_that_begin_together() -> None:
    later = Timeline(("gpu:0",), (Span("forward", 0, 0, 0, 0, 0, 100.0, 101.0),), "measured")
    events = check_format(trace_document(simulated(), later))
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["simulated", "measured"]
    begins = {
        pid: min(e["ts"] for e in events if e["ph"] == "X" and e["pid"] == pid) for pid in (1, 2)
    }
    assert begins == {1: 0.0, 2: 0.0}


def test_waits_have_rows_of_their_own() -> None:
    spans = (
        Span("forward", 0, 0, 0, 0, 0, 0.0, 1.0),
        Span("step_wait", 0, 0, 0, 1, -1, 1.0, 2.0),
        Span("step_wait", HOST, 0, -1, -1, -1, 2.0, 3.0),
        Span("step", HOST, 0, -1, -1, -1, 1.0, 3.0),
    )
    events = check_format(trace_document(Timeline(("a",), spans)))
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    placed = [(e["cat"], rows[e["tid"]]) for e in events if e["ph"] == "X"]
    assert sorted(placed) == [
        ("forward", "a"), ("step", "optimizer"), ("step_wait", "a waits"),
        ("step_wait", "caller waits"),
    ]  # fmt: skip
    assert COMPUTE[0] == "forward"
