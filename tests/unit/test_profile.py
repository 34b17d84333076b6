"""Profiles: what ran, in the simulator's form and in the simulator's order."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe.errors import StateError
from roundpipe.plan import LayerCost, LayerCosts, Machine, Timeline, Workload, simulate
from roundpipe.plan.timeline import COMPUTE, HOST
from roundpipe.plan.workload import ENGINE_RULES
from roundpipe.profile import Profile, timeline_of
from roundpipe.trace import Span
from support.trace_format import check_format

MS = 1_000_000


def logged(phase: str, device: str, begin_ms: int, end_ms: int, **more: int) -> Span:
    fields = {"call": 0, "stage": 0, "microbatch": 0, "iteration": 0, **more}
    return Span(
        phase, device, fields["call"], fields["stage"], fields["microbatch"],
        (100 + begin_ms) * MS, (100 + end_ms) * MS, fields["iteration"], range(1),
    )  # fmt: skip


def profile_of(*spans: Span) -> Profile:
    profile = Profile(["a", "b"], "net")
    profile.close(spans)
    return profile


def test_spans_become_a_timeline_that_begins_at_zero() -> None:
    timeline = timeline_of(
        [
            logged("fused", "b", 4, 6, call=7, iteration=3),
            logged("forward", "a", 0, 3, call=7, iteration=3),
            logged("step", "net", 6, 9, call=-1, stage=-1, microbatch=-1, iteration=3),
            logged("publish", "net", 9, 10, call=-1, stage=-1, microbatch=-1, iteration=3),
        ],
        ["a", "b"],
        "net",
    )
    assert timeline.devices == ("a", "b")
    assert [(s.kind, s.device, s.iteration, s.begin_ms, s.end_ms) for s in timeline.spans] == [
        ("forward", 0, 0, 0.0, 3.0),
        ("fused", 1, 0, 4.0, 6.0),
        ("step", HOST, 0, 6.0, 9.0),
        ("step", HOST, 0, 9.0, 10.0),
    ]


def test_an_iteration_lasts_from_begin_to_begin() -> None:
    spans = [
        logged("fused", "a", begin, begin + 2, call=number, iteration=number)
        for number, begin in enumerate((0, 10, 30, 41))
    ]
    steps = [logged("step", "net", 5, 6, iteration=number) for number in range(4)]
    assert profile_of(*spans, *steps).iteration_ms() == 11.0
    # Without steps, each call is an iteration.
    alike = [span._replace(iteration=0) for span in spans]
    assert profile_of(*alike).iteration_ms() == 11.0


def test_a_single_iteration_ends_with_what_the_caller_waited_for() -> None:
    wait = logged("step_wait", "net", 3, 8, call=-1, stage=-1, microbatch=-1)
    assert profile_of(logged("fused", "a", 0, 3)).iteration_ms() == 3.0
    assert profile_of(logged("fused", "a", 0, 3), wait).iteration_ms() == 8.0


def test_waiting_for_steps_and_for_uploads_is_told_apart() -> None:
    profile = profile_of(
        logged("forward", "a", 0, 4),
        logged("forward", "b", 0, 4, stage=1),
        logged("step", "net", 4, 6, call=-1, stage=-1, microbatch=-1),
        logged("step_wait", "net", 4, 6, call=-1, stage=-1, microbatch=-1),
        logged("upload", "b", 3, 5, call=1, stage=1, microbatch=-1, iteration=1),
        logged("upload", "b", 6, 7, call=1, stage=1, microbatch=-1, iteration=1),
        logged("step_wait", "a", 6, 8, call=1, stage=0, microbatch=-1, iteration=1),
        logged("forward", "a", 8, 10, call=1, iteration=1),
        logged("forward", "b", 8, 10, call=1, stage=1, iteration=1),
    )
    account = profile.account()
    assert account.total_ms == 20
    assert account.busy_ms == 12
    assert account.step_ms == 2 + 2 + 2
    assert account.upload_ms == 1
    assert account.idle_ms == pytest.approx(account.step_ms + account.upload_ms + account.fill_ms)


def test_a_profile_is_read_afterwards_and_needs_something_that_ran() -> None:
    with pytest.raises(StateError, match="read it after the with block"):
        _ = Profile(["a"], "net").timeline
    with pytest.raises(StateError, match="call the model within the with block"):
        _ = profile_of().timeline


# --- in the engine ---------------------------------------------------------------------------

PLANS = {
    "even": ModelExecutePlan([range(2), range(2, 4)], [range(4, 6), range(2, 4), range(2)]),
    "uneven": ModelExecutePlan([range(1), range(1, 5)], [range(5, 6), range(1, 5), range(1)]),
    "one stage": ModelExecutePlan([], [range(6)]),
    "wide": ModelExecutePlan(
        [range(3), range(3, 5)], [range(5, 6), range(2, 5), range(2)], [1, 2], [2, 1, 1]
    ),
}


def order(timeline: Timeline) -> list[list[tuple[str, int, int, int]]]:
    """What each device computed, in order: kind, iteration, stage, microbatch."""
    return [
        [(s.kind, s.iteration, s.stage, s.microbatch) for s in timeline.of(device, *COMPUTE)]
        for device in range(len(timeline.devices))
    ]


@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("name", PLANS)
def test_events_come_in_the_order_of_the_simulation(name: str, devices: int) -> None:
    plan, microbatches = PLANS[name], 4
    config = RoundPipeRunConfig(num_microbatch=microbatches, execute_plan=plan)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    x = torch.ones(8, 4)
    with RoundPipe(model, devices=f"cpu:{devices}", model_run_config=config) as pipe:
        with pipe.profile() as profile:
            for _ in range(3):
                pipe.forward_backward((x,), loss_fn=lambda out, _: out.sum())
                pipe.step(lambda: None, is_async=False)

    costs = LayerCosts((LayerCost(1.0, 2.0, optimizer_ms=1.0),) * 6)
    workload = Workload(costs, Machine.uniform(devices), microbatches, rules=ENGINE_RULES)
    predicted = simulate(workload, plan, iterations=3).timeline

    measured = profile.timeline
    assert order(measured) == order(predicted)
    assert [s.layers for s in measured.of(0, *COMPUTE)] == [
        s.layers for s in predicted.of(0, *COMPUTE)
    ]
    check_precedence(measured)


def check_precedence(timeline: Timeline) -> None:
    """No microbatch enters a stage before it has left the one before."""
    left: dict[tuple[int, int, int], float] = {}
    for span in sorted(timeline.spans, key=lambda span: span.begin_ms):
        if span.kind in COMPUTE:
            left[span.call, span.stage, span.microbatch] = span.end_ms
            before = left.get((span.call, span.stage - 1, span.microbatch))
            assert (before is None) == (span.stage == 0)
            assert before is None or before <= span.begin_ms


def test_the_profile_has_the_step_in_flight_when_it_ends() -> None:
    may_step = threading.Event()
    with RoundPipe(nn.Linear(2, 2), devices="cpu:2") as pipe:
        with pipe.profile() as profile:
            pipe.forward_backward((torch.ones(4, 2),), loss_fn=lambda out, _: out.sum())
            pipe.step(may_step.wait)
            may_step.set()
    assert len(profile.timeline.of(HOST, "step")) == 1


def test_a_failing_step_is_told_to_whoever_comes_next_and_not_to_the_profile() -> None:
    def fail() -> None:
        raise OSError("no")

    with RoundPipe(nn.Linear(2, 2), devices="cpu:1") as pipe:
        with pipe.profile() as profile:
            pipe.forward_backward((torch.ones(4, 2),), loss_fn=lambda out, _: out.sum())
            pipe.step(fail)
        assert profile.timeline.spans
        with pytest.raises(OSError, match="no"):
            pipe.synchronize()


def test_traces_and_pictures_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with RoundPipe(nn.Linear(2, 2), devices="cpu:2", name="net") as pipe:
        with pipe.profile() as profile:
            for _ in range(3):
                pipe.forward_backward((torch.ones(4, 2),), loss_fn=lambda out, _: out.sum())
                pipe.step(lambda: None)
        pipe.save_trace(tmp_path / "log.json")
    predicted = profile.timeline
    profile.save_trace(tmp_path / "profile.json", predicted)
    profile.save_picture(tmp_path / "measured.png")
    profile.save_picture(tmp_path / "both.png", predicted)

    for name, processes in (("log.json", 1), ("profile.json", 2)):
        events = check_format(json.loads((tmp_path / name).read_text(encoding="utf-8")))
        assert sum(event["name"] == "process_name" for event in events) == processes
    for name in ("measured.png", "both.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_a_model_that_has_not_run_has_no_trace(tmp_path: Path) -> None:
    with (
        RoundPipe(nn.Sequential(nn.Linear(2, 2)), devices="cpu:1", name="fresh") as model,
        pytest.raises(StateError, match="the model fresh has not run yet; call it before"),
    ):
        model.save_trace(tmp_path / "trace.json")
