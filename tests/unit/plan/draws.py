"""Workloads and plans for hypothesis to draw."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import strategies as st

from roundpipe.plan import (
    DeviceSpec,
    EngineRules,
    LayerCost,
    LayerCosts,
    Machine,
    StagePlan,
    Workload,
)

times = st.sampled_from([0.0, 0.5, 1.0, 1.0, 2.0, 3.25, 7.0])
sizes = st.sampled_from([0, 0, 10, 30])
rates = st.sampled_from([None, 5.0, 20.0])


@st.composite
def layer_costs(draw: st.DrawFn, most: int = 6) -> LayerCosts:
    """A few layers, some alike, some free."""
    layers = draw(st.integers(1, most))
    return LayerCosts(
        tuple(
            LayerCost(
                draw(times),
                draw(times),
                draw(st.one_of(st.none(), times)),
                weight_bytes=draw(sizes),
                gradient_bytes=draw(sizes),
                forward_bytes=draw(sizes),
                activation_bytes=draw(sizes),
                optimizer_ms=draw(times),
            )
            for _ in range(layers)
        )
    )


@st.composite
def machines(draw: st.DrawFn, most: int = 4) -> Machine:
    """Devices of different speeds, some with slow ways, some of these shared."""
    links = {"bus": draw(st.sampled_from([10.0, 40.0]))}
    devices = tuple(
        DeviceSpec(
            f"device:{index}",
            speed=draw(st.sampled_from([1.0, 1.0, 0.5])),
            upload_bytes_per_ms=draw(rates),
            download_bytes_per_ms=draw(rates),
            link=draw(st.sampled_from([None, "bus"])),
        )
        for index in range(draw(st.integers(1, most)))
    )
    hop_ms = draw(st.sampled_from([0.0, 0.25, 2.0]))
    return Machine(devices, hop_ms, links, draw(st.sampled_from([0.0, 0.0, 0.75])))


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Everything that a simulator has to cope with."""
    return Workload(
        draw(layer_costs()),
        draw(machines()),
        draw(st.sampled_from([1, 2, 3, 4, 6])),
        draw(st.sampled_from(["infer", "train", "fused", "fused"])),
        draw(st.sampled_from(["sync", "layerwise", "async"])),
        rules=EngineRules(draw(st.booleans()), draw(st.booleans()), draw(st.booleans())),
    )


@st.composite
def plans(draw: st.DrawFn, workload: Workload) -> StagePlan:
    """Any legal plan of a workload, wide stages included."""
    layers = len(workload.costs)
    backward: list[range] = []
    top = layers
    if workload.run_type != "infer":
        backward = _stages(draw, layers)[::-1]
        if workload.run_type == "fused":
            top = backward[0].start
    forward = _stages(draw, top)
    widths = st.sampled_from([1, 1, 1, 2, 3])
    return StagePlan(
        forward, backward, [draw(widths) for _ in forward], [draw(widths) for _ in backward]
    )


def _stages(draw: st.DrawFn, top: int) -> list[range]:
    if top == 0:
        return []
    inner = draw(st.sets(st.integers(1, top - 1))) if top > 1 else set()
    return [range(start, stop) for start, stop in pairwise(sorted({0, top, *inner}))]


def divisors(number: int) -> list[int]:
    """Sizes of a round."""
    return [size for size in range(1, number + 1) if number % size == 0]
