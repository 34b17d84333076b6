"""The plan that the engine runs, and how to get one from a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, overload, runtime_checkable

from roundpipe.errors import InvalidTypeError, InvalidValueError
from roundpipe.plan.costs import LayerCosts, Machine
from roundpipe.plan.defaults import default_stages
from roundpipe.plan.partition import running_sums, smallest_bound
from roundpipe.plan.planner import plan_models
from roundpipe.plan.stage_plan import StagePlan, check_run_type
from roundpipe.plan.workload import ENGINE_RULES, PlanLimits, Workload, check_count

MODEL_SHARE_OF_MEMORY = 0.6
"""Share of the smallest device's memory that a model may use unless told otherwise."""


@runtime_checkable
class Plannable(Protocol):
    """What a model must offer to be planned."""

    def plan_costs(self) -> LayerCosts:
        """What its layers cost, as far as that is known; without times, sizes decide."""

    def plan_machine(self) -> Machine:
        """Its devices, with all of their memory, and the ways to them."""


@dataclass(frozen=True)
class ModelExecutePlan(StagePlan):
    """Which layers form a stage, in dispatch order, and on how many devices each stage runs."""

    @overload
    @classmethod
    def auto(
        cls,
        run_type: str,
        model: Plannable,
        /,
        *,
        min_stages: int | None = None,
        upper_threshold: float = 1.1,
        model_memory_limit: int | None = None,
        num_microbatch: int | None = None,
    ) -> ModelExecutePlan: ...

    @overload
    @classmethod
    def auto(
        cls,
        run_type: str,
        model: Plannable,
        second: Plannable,
        /,
        *more: Plannable,
        min_stages: int | None = None,
        upper_threshold: float = 1.1,
        model_memory_limit: int | None = None,
        num_microbatch: int | None = None,
    ) -> list[ModelExecutePlan]: ...

    @classmethod
    def auto(
        cls,
        run_type: str,
        *models: Plannable,
        min_stages: int | None = None,
        upper_threshold: float = 1.1,
        model_memory_limit: int | None = None,
        num_microbatch: int | None = None,
    ) -> ModelExecutePlan | list[ModelExecutePlan]:
        """Plan one model, or several that run one after another.

        Args:
            run_type: ``"infer"``, ``"train"`` or ``"fused"``.
            models: what to plan: every RoundPipe can be.
            min_stages: fewest stages of a call, as far as there are layers; the number of devices
                unless given.
            upper_threshold: no stage takes longer than this many times the longest stage of the
                most even plan with ``min_stages`` backward (for ``"infer"``: forward) stages; only
                a single layer may.
            model_memory_limit: bytes that stages may use on each device: two neighbours' weights,
                gradients and one microbatch's activations. A single stage's weights and gradients
                may use half. Unless given, 60% of the smallest device's memory.
            num_microbatch: microbatches of a call; one more than devices unless given.

        Returns:
            A plan, or for several models a list of one plan each.

        Raises:
            InvalidTypeError: a model that cannot be planned.
            InvalidValueError: no models, models on different machines, an impossible number, or
                nothing that fits the memory.
        """
        check_run_type(run_type)
        if not models:
            raise InvalidValueError("got no models; expected at least one to plan")
        for model in models:
            if not isinstance(model, Plannable):
                raise InvalidTypeError(
                    f"cannot plan a {type(model).__name__}; expected a RoundPipe, or an object "
                    "with plan_costs() and plan_machine()"
                )
        if not upper_threshold >= 1:
            raise InvalidValueError(f"upper_threshold is {upper_threshold}; expected at least 1")
        machine = _limited(models[0].plan_machine(), model_memory_limit)
        stages = len(machine) if min_stages is None else min_stages
        count = len(machine) + 1 if num_microbatch is None else num_microbatch
        check_count("min_stages", stages)
        check_count("num_microbatch", count)
        all_costs = [model.plan_costs() for model in models]
        if all(costs.is_measured for costs in all_costs):
            plans = _from_times(run_type, all_costs, machine, stages, upper_threshold, count)
        else:
            plans = _from_sizes(run_type, all_costs, machine, stages)
        executable = [
            cls(plan.fwd_plan, plan.bwd_plan, plan.fwd_replicas, plan.bwd_replicas)
            for plan in plans
        ]
        return executable[0] if len(executable) == 1 else executable


def default_plan(
    run_type: str,
    layer_sizes: Sequence[int],
    num_devices: int,
    *,
    stage_limit: int | None = None,
) -> ModelExecutePlan:
    """A sound plan from layer sizes alone, for the time before there are measurements.

    Time is taken to be proportional to size, backward with recompute to three times forward.
    Stages are contiguous and even; there are at least ``num_devices`` of them when there are
    enough layers. The same arguments give the same plan.

    Args:
        run_type: ``"infer"``, ``"train"`` or ``"fused"``.
        layer_sizes: bytes of each layer's parameters and buffers; 0 is allowed.
        num_devices: how many devices take turns.
        stage_limit: the most bytes a stage may have; only a single layer may be above it.

    Raises:
        InvalidValueError: an unknown run type, no layers, a negative size, fewer than one device
            or a limit below one byte.
    """
    forward, backward = default_stages(run_type, layer_sizes, num_devices, stage_limit)
    return ModelExecutePlan(forward, backward)


def _limited(machine: Machine, limit: int | None) -> Machine:
    """The machine with the memory that stages may use."""
    if limit is None:
        sizes = [device.memory_bytes for device in machine.devices]
        known = [size for size in sizes if size is not None]
        if not known:
            return machine
        limit = int(MODEL_SHARE_OF_MEMORY * min(known))
    check_count("model_memory_limit", limit)
    devices = tuple(replace(device, memory_bytes=limit) for device in machine.devices)
    return replace(machine, devices=devices)


def _half(machine: Machine) -> int | None:
    """Bytes that a single stage may use."""
    limit = machine.devices[0].memory_bytes
    return None if limit is None else max(limit // 2, 1)


def _from_sizes(
    run_type: str, all_costs: Sequence[LayerCosts], machine: Machine, stages: int
) -> list[StagePlan]:
    limit = _half(machine)
    if limit is not None and run_type != "infer":
        limit = max(limit // 2, 1)  # the other half is for gradients
    plans: list[StagePlan] = []
    for costs in all_costs:
        sizes = [layer.weight_bytes for layer in costs.layers]
        plans.append(StagePlan(*default_stages(run_type, sizes, stages, limit)))
    return plans


def _from_times(
    run_type: str,
    all_costs: Sequence[LayerCosts],
    machine: Machine,
    stages: int,
    threshold: float,
    microbatches: int,
) -> list[StagePlan]:
    workloads, limits = [], []
    for costs in all_costs:
        times = [
            layer.forward_ms if run_type == "infer" else layer.again_ms + layer.backward_ms
            for layer in costs.layers
        ]
        limits.append(
            PlanLimits(
                stage_bytes=_half(machine),
                stage_ms=threshold * smallest_bound(running_sums(times), stages),
                min_stages=stages,
                microbatches_per_round=(microbatches,),
            )
        )
        workloads.append(
            Workload(costs, machine, microbatches, run_type, "async", rules=ENGINE_RULES)
        )
    return [planned.plan for planned in plan_models(workloads, limits)]
