"""The simulator against a second one, which goes from event to event, and published numbers."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe.errors import InvalidValueError
from roundpipe.plan import (
    ENGINE_RULES,
    LayerCost,
    LayerCosts,
    Machine,
    PlanLimits,
    StagePlan,
    Workload,
    simulate,
)
from roundpipe.plan.bounds import least_iteration_ms
from roundpipe.plan.iterations import IterationClock, pace_of
from roundpipe.plan.published import published_model, published_names
from roundpipe.plan.simulate import schedule_of
from roundpipe.plan.timeline import COMPUTE, HOST
from unit.plan.draws import divisors, plans, workloads
from unit.plan.event_by_event import EventByEvent


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_agrees_with_an_independent_event_by_event_simulation(data: st.DataObject) -> None:
    workload = data.draw(workloads())
    plan = data.draw(plans(workload))
    per_round = data.draw(st.sampled_from(divisors(workload.microbatches)))
    expected = EventByEvent(workload, plan, per_round, 3).run()

    found = simulate(workload, plan, microbatches_per_round=per_round, iterations=3)

    assert list(found.ends_ms) == pytest.approx(expected.iteration_ends, rel=1e-9, abs=1e-9)
    ends = {}
    for span in found.timeline.spans:
        if span.kind in ("forward", "fused", "backward"):
            key = (span.iteration, span.call, span.stage, span.microbatch)
            ends[key] = span.end_ms
    by_event = {
        (*key, microbatch): end
        for key, row in expected.ends.items()
        for microbatch, end in row.items()
    }
    assert ends == pytest.approx(by_event, rel=1e-9, abs=1e-9)


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_the_planners_shortcut_for_even_stages_changes_nothing(data: st.DataObject) -> None:
    """Without a recorder, rows of evenly spaced microbatches are not spelled out."""
    workload = data.draw(workloads())
    plan = data.draw(plans(workload))
    per_round = data.draw(st.sampled_from(divisors(workload.microbatches)))
    spelled_out = simulate(workload, plan, microbatches_per_round=per_round, iterations=4)

    short = IterationClock(workload, [schedule_of(workload, plan, per_round)])
    for _ in range(4):
        short.run_iteration()

    assert short.ends_ms == pytest.approx(list(spelled_out.ends_ms), rel=1e-9, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(workloads(), st.booleans(), st.data())
def test_layer_by_layer_is_between_the_bound_and_synchronous_steps(
    drawn: Workload, early_recompute: bool, data: st.DataObject
) -> None:
    """Under this package's rules, and in every iteration, not only on average."""
    rules = replace(ENGINE_RULES, early_recompute=early_recompute)
    like = drawn.machine.devices[0]
    uniform = Machine.uniform(3, drawn.machine.hop_ms, like=like, links=drawn.machine.links)
    machine = data.draw(st.sampled_from([drawn.machine, uniform]))
    layerwise = replace(drawn, mode="layerwise", machine=machine, rules=rules)
    plan = data.draw(plans(layerwise))
    sync, found = (
        simulate(workload, plan, iterations=4)
        for workload in (replace(layerwise, mode="sync"), layerwise)
    )

    slack_ms = 1e-9 * sync.makespan_ms
    assert all(a <= b + slack_ms for a, b in zip(found.ends_ms, sync.ends_ms, strict=True))
    limits = PlanLimits(fused_layers=len(plan.bwd_plan[0]) if plan.bwd_plan else None)
    bound_ms = least_iteration_ms(layerwise, limits)
    times_ms = [b - a for a, b in pairwise(found.ends_ms)]
    assert all(time_ms >= bound_ms - slack_ms for time_ms in times_ms)
    if machine.is_uniform:  # then all are alike, and two tell the pace
        pace_ms = pace_of(layerwise, [schedule_of(layerwise, plan)]).iteration_ms
        assert times_ms == pytest.approx([pace_ms] * 3, abs=slack_ms)


@pytest.mark.parametrize(
    ("overlap_calls", "updates"),
    [(False, [(19.0, 24.0), (24.0, 28.0)]), (True, [(8.0, 12.0), (19.0, 24.0)])],
)
def test_layers_are_updated_upwards_unless_the_engine_knows_of_the_step_beforehand(
    overlap_calls: bool, updates: list[tuple[float, float]]
) -> None:
    """Layer 0 takes 5 ms to update, layer 1, the head, 4; both matter to the next iteration.

    device   F0 F0 L1 L1 B0 B0     F0 F0    L1 L1 ..
    step                       U0  U1
    """
    layers = (LayerCost(1.0, 4.5, optimizer_ms=5.0), LayerCost(1.0, 2.0, optimizer_ms=4.0))
    costs = LayerCosts(layers)
    rules = replace(ENGINE_RULES, overlap_calls=overlap_calls)
    workload = Workload(costs, Machine.uniform(1), 2, mode="layerwise", rules=rules)
    plan = StagePlan([range(1)], [range(1, 2), range(1)])

    simulation = simulate(workload, plan, iterations=2)

    steps = [s for s in simulation.timeline.of(HOST, "step") if s.iteration == 0]
    assert [(span.begin_ms, span.end_ms) for span in steps] == updates
    again = [span for span in simulation.timeline.of(0, *COMPUTE) if span.iteration == 1]
    head_ms = 26.0 if overlap_calls else 28.0
    assert [span.begin_ms for span in again[:3]] == [24.0, 25.0, head_ms]
    assert simulation.ends_ms == (19.0, head_ms + 17.0)
    bound_ms = least_iteration_ms(workload, PlanLimits(fused_layers=1))
    assert bound_ms == (19.0 if overlap_calls else 26.0)  # of 24 and of 26 ms


def test_the_layers_of_all_models_are_updated_after_the_calls_of_the_last() -> None:
    """Two models of a layer each on one device: 3 ms each, then updates of 2 and 5 ms."""
    machine = Machine.uniform(1)
    first, second = (
        Workload(
            LayerCosts((LayerCost(1.0, 2.0, optimizer_ms=update_ms),)),
            machine, 1, mode="layerwise", rules=ENGINE_RULES,
        )
        for update_ms in (2.0, 5.0)
    )  # fmt: skip
    plan = StagePlan([], [range(1)])

    simulation = simulate([first, second], [plan, plan], iterations=2)

    spans = simulation.timeline.of(HOST, "step")[:2]
    assert [(span.begin_ms, span.end_ms) for span in spans] == [(6.0, 8.0), (8.0, 13.0)]
    begins = [span.begin_ms for span in simulation.timeline.of(0, *COMPUTE)]
    assert begins == [0.0, 3.0, 8.0, 13.0]


@pytest.mark.parametrize("name", published_names())
def test_reproduces_the_published_makespans(name: str) -> None:
    """To the digit, if the head's forward may start early, as it must have done there."""
    model = published_model(name)
    early = model.workload(early_fused_forward=True)

    found = simulate(early, model.plan, microbatches_per_round=model.microbatches_per_round)

    assert found.makespan_ms == pytest.approx(model.makespan_ms, abs=1e-3)
    assert found.account().bubble_percent == pytest.approx(
        model.published_bubble_percent("sync"), abs=1e-3
    )


@pytest.mark.parametrize(
    ("name", "relative"),
    [
        ("Qwen3-1.7B", 1e-9),
        ("Llama-3.1-8B", 1e-8),
        ("Qwen3-235B-LoRA", 1e-9),
        ("GPT-OSS-20B", 0.013),
        ("Qwen3-32B", 0.003),
    ],
)
def test_a_head_that_waits_for_its_input_costs_the_published_plans_little(
    name: str, relative: float
) -> None:
    model = published_model(name)

    found = simulate(model.workload(), model.plan, microbatches_per_round=8)

    assert model.makespan_ms <= found.makespan_ms * (1 + 1e-8)
    assert found.makespan_ms == pytest.approx(model.makespan_ms, rel=relative)


def test_a_pipeline_of_two_devices_by_hand() -> None:
    """Forward 2 ms, then head and loss 3 ms, then recompute 2 ms and backward 4 ms; hops of 1 ms.

    device 0   F0 F1 . . . . . . R0 B0      R1 B1
    device 1         L0 L1
    """
    costs = LayerCosts((LayerCost(2.0, 4.0), LayerCost(1.0, 2.0)))
    workload = Workload(costs, Machine.uniform(2, hop_ms=1.0), 2)
    plan = StagePlan([range(1)], [range(1, 2), range(1)])

    timeline = simulate(workload, plan).timeline

    rows = [
        [(span.kind, span.microbatch, span.begin_ms, span.end_ms) for span in spans]
        for spans in (timeline.of(0, *COMPUTE), timeline.of(1, *COMPUTE))
    ]
    assert rows == [
        [
            ("forward", 0, 0.0, 2.0),
            ("forward", 1, 2.0, 4.0),
            ("recompute", 0, 4.0, 6.0),
            ("backward", 0, 7.0, 11.0),
            ("recompute", 1, 11.0, 13.0),
            ("backward", 1, 13.0, 17.0),
        ],
        [("fused", 0, 3.0, 6.0), ("fused", 1, 6.0, 9.0)],
    ]


def test_a_wide_stage_takes_turns_in_microbatches() -> None:
    """The second stage runs on devices 1 and 2 at once, the third on device 3."""
    costs = LayerCosts((LayerCost(1.0), LayerCost(2.0), LayerCost(1.0)))
    workload = Workload(costs, Machine.uniform(4), 4, "infer")
    plan = StagePlan([range(1), range(1, 2), range(2, 3)], fwd_replicas=[1, 2, 1])

    timeline = simulate(workload, plan).timeline

    assert [span.microbatch for span in timeline.of(1, "forward")] == [0, 2]
    assert [span.microbatch for span in timeline.of(2, "forward")] == [1, 3]
    assert [span.end_ms for span in timeline.of(3, "forward")] == [4.0, 5.0, 6.0, 7.0]


def test_what_does_not_fit_together_is_refused() -> None:
    workload = Workload(LayerCosts.uniform(2, 1.0, 2.0), Machine.uniform(2), 4)
    plan = StagePlan([range(1)], [range(1, 2), range(1)])

    with pytest.raises(InvalidValueError, match="got 1 plans for 2 workloads"):
        simulate([workload, workload], [plan])
    with pytest.raises(InvalidValueError, match="got 1 microbatches_per_round for 2 plans"):
        simulate([workload, workload], [plan, plan], microbatches_per_round=[4])
    with pytest.raises(InvalidValueError, match="is 3; expected a divisor of the 4 microbatches"):
        simulate(workload, plan, microbatches_per_round=3)
    with pytest.raises(InvalidValueError, match="iterations is 0; expected at least 1"):
        simulate(workload, plan, iterations=0)
    with pytest.raises(InvalidValueError, match="lacks layer 0"):
        simulate(workload, StagePlan([], [range(1, 2)]))
