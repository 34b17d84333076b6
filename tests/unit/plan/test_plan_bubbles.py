"""The bubble account: every idle moment has one cause, and the sum is the whole."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe.plan import (
    DeviceSpec,
    LayerCost,
    LayerCosts,
    Machine,
    Span,
    StagePlan,
    Timeline,
    Workload,
    account_of,
    render_timeline,
    simulate,
)
from roundpipe.plan.bubbles import CAUSES
from unit.plan.draws import plans, workloads


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_account_adds_up(data: st.DataObject) -> None:
    workload = data.draw(workloads())
    simulation = simulate(workload, data.draw(plans(workload)), iterations=3)

    account = simulation.account()

    amounts = [getattr(account, f"{cause}_ms") for cause in CAUSES]
    assert min(amounts) >= 0
    assert account.busy_ms + sum(amounts) == pytest.approx(account.total_ms, abs=1e-6)
    assert account.total_ms == simulation.makespan_ms * len(workload.machine)
    spent = sum(
        span.end_ms - span.begin_ms
        for span in simulation.timeline.spans
        if span.kind in ("forward", "fused", "recompute", "backward")
    )
    assert account.busy_ms == pytest.approx(spent, abs=1e-6)


def test_fill_and_drain_of_two_stages_by_hand() -> None:
    """Two devices, one stage each, two microbatches: 1 ms of fill, 1 ms of drain."""
    workload = Workload(LayerCosts.uniform(2, 1.0, 0.0), Machine.uniform(2), 2, "infer")

    account = simulate(workload, StagePlan([range(1), range(1, 2)])).account()

    assert (account.busy_ms, account.fill_ms, account.drain_ms) == (4.0, 1.0, 1.0)
    assert account.percent("fill") == pytest.approx(100 / 6)
    assert account.bubble_percent == pytest.approx(100 / 3)


def test_a_slow_first_stage_makes_the_second_wait_in_the_middle() -> None:
    costs = LayerCosts((LayerCost(3.0), LayerCost(1.0)))
    workload = Workload(costs, Machine.uniform(2), 3, "infer")

    account = simulate(workload, StagePlan([range(1), range(1, 2)])).account()

    assert (account.fill_ms, account.steady_ms, account.drain_ms) == (3.0, 4.0, 1.0)


def test_uploads_and_the_step_are_accounted_for() -> None:
    """4 ms of upload, 2 ms of computing, 3 ms of step; then the same again."""
    layer = LayerCost(1.0, 1.0, weight_bytes=40, optimizer_ms=3.0)
    machine = Machine.uniform(1, like=DeviceSpec(upload_bytes_per_ms=10.0))
    workload = Workload(LayerCosts((layer,)), machine, 1)

    simulation = simulate(workload, StagePlan([], [range(1)]), iterations=2)
    account = simulation.account()

    assert simulation.ends_ms == (9.0, 18.0)
    assert (account.busy_ms, account.upload_ms) == (4.0, 8.0)
    assert account.step_ms == 3.0  # the last step has nothing waiting for it
    assert account.drain_ms == 3.0


def test_stages_of_one_device_may_wait_for_each_other() -> None:
    """Device 0 has stages 0 and 2, and waits for stage 1 of device 1 in between."""
    costs = LayerCosts((LayerCost(1.0), LayerCost(5.0), LayerCost(1.0)))
    workload = Workload(costs, Machine.uniform(2), 1, "infer")

    account = simulate(workload, StagePlan([range(1), range(1, 2), range(2, 3)])).account()

    assert account.switch_ms == 5.0


def test_an_empty_timeline_has_no_bubble() -> None:
    nothing = Timeline(("a",), ())

    account = account_of(nothing)

    assert (account.total_ms, account.bubble_percent, account.percent("fill")) == (0.0, 0.0, 0.0)
    assert render_timeline(nothing) == "(nothing ran)"


def test_a_measured_step_is_recognised_with_some_slack() -> None:
    """Between the end of the step and the next call, the measured world takes a moment."""
    timeline = Timeline(
        ("a",),
        (
            Span("fused", 0, 0, 0, 0, 0, 0.0, 2.0),
            Span("step", -1, 0, 0, -1, -1, 2.5, 5.0),
            Span("fused", 0, 1, 0, 0, 0, 5.25, 7.0),
        ),
    )

    strict, loose = account_of(timeline), account_of(timeline, slack_ms=1.0)

    assert (strict.step_ms, strict.fill_ms) == (0.0, 3.25)
    assert (loose.step_ms, loose.fill_ms) == (3.0, 0.25)


def test_text_shows_what_took_most_of_each_slice() -> None:
    layer = LayerCost(2.0, 2.0, weight_bytes=20, optimizer_ms=2.0)
    machine = Machine.uniform(1, like=DeviceSpec("gpu", upload_bytes_per_ms=10.0))
    workload = Workload(LayerCosts((layer, layer)), machine, 1)
    plan = StagePlan([range(1)], [range(1, 2), range(1)])

    text = render_timeline(simulate(workload, plan, title="a model").timeline, width=16)

    assert text.splitlines() == [
        "a model",
        "    gpu:0 |..FFLLLLRRBB....|",
        "transfers |uuuuuu..........|",
        "     step |............ssss|",
        "       ms  0           16.0",
    ]


def test_a_part_of_a_timeline_is_cut_at_its_ends() -> None:
    whole = Timeline(("a",), (Span("forward", 0, 0, 0, 0, 0, 0.0, 4.0),))

    part = whole.between(1.0, 3.0)

    assert (part.begin_ms, part.end_ms) == (1.0, 3.0)
    assert whole.between(5.0, 6.0).spans == ()
