"""The plans of calls for which the user gave none: made once, and renewed when that pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from roundpipe.devices.base import Device
from roundpipe.errors import InvalidValueError
from roundpipe.plan import (
    ENGINE_RULES,
    MODEL_SHARE_OF_MEMORY,
    EngineRules,
    LayerCosts,
    Machine,
    ModelExecutePlan,
    PlanLimits,
    StagePlan,
    Workload,
    default_plan,
    plan_iteration,
)
from roundpipe.plan.iterations import pace_of
from roundpipe.plan.simulate import schedule_of

from .estimates import estimated_costs, layer_bytes, machine_of
from .meter import CostMeter
from .table import ModelCosts

_EFFORT = 2000  # simulated stages: a fraction of a second, between two calls
_FIRST_CHECK = 2  # measured runs before the first plan is held against them
_WORTH_IT = 0.95  # of the old plan's time; a smaller gain is within what measurements vary by


@dataclass
class _Entry:
    """A plan in use.

    Attributes:
        plan: the plan.
        next_check: number of measured runs at which it is held against the measurements.
    """

    plan: ModelExecutePlan
    next_check: int = _FIRST_CHECK


class PlanBook:
    """Costs and plans of one model. Used by the caller's thread only.

    The first plan comes from loaded costs, else from sizes. After 2, 4, 8, ... measured runs the
    fastest plan under the measured costs is looked for; it replaces the one in use if that would
    take 5% longer. No plan is changed while a call, or a forward whose backward is still to come,
    is under way: they hold the plan they began with. The same measurements give the same plans.

    Args:
        layers: the model's layers.
        devices: the pool's devices.
        name: the model's.
        shared: for each parameter that several layers use, these layers.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        devices: Sequence[Device],
        name: str,
        shared: Sequence[frozenset[int]] = (),
    ) -> None:
        self.meter = CostMeter()
        self._layers = list(layers)
        self._devices = devices
        self._name = name
        self._shared = [group for group in shared if len(group) > 1]
        self._loaded: ModelCosts | None = None
        self._entries: dict[tuple[str, int], _Entry] = {}
        self._microbatches = len(devices) + 1

    # --- costs -------------------------------------------------------------------------------

    def costs(self, run_type: str = "fused") -> ModelCosts:
        """The best that is known: measured, else loaded, else estimated from sizes."""
        self.meter.settle()
        estimated = estimated_costs(self._layers, self._name)
        machine = machine_of(self._devices)
        known = ModelCosts(
            estimated,
            machine,
            self._microbatches,
            self._kind,
            layer_names=tuple(type(layer).__name__ for layer in self._layers),
            rules=self._rules,
        )
        measured = self.meter.layer_costs(estimated, run_type)
        if measured is not None:
            machine = self.meter.machine(machine)
            return replace(known, layers=measured, machine=machine, source="measured")
        if self._loaded is not None:
            loaded = self._loaded
            seen = loaded.machine.devices[0]
            devices = tuple(
                replace(
                    device,
                    upload_bytes_per_ms=seen.upload_bytes_per_ms,
                    download_bytes_per_ms=seen.download_bytes_per_ms,
                )
                for device in machine.devices
            )
            machine = replace(
                machine,
                devices=devices,
                hop_ms=loaded.machine.hop_ms,
                stage_ms=loaded.machine.stage_ms,
            )
            layers = replace(loaded.layers, name=self._name)
            return replace(known, layers=layers, machine=machine, source="loaded")
        return known

    def load(self, costs: ModelCosts) -> None:
        """Plan with these costs until there are measurements.

        Raises:
            InvalidValueError: they are of another model or of another kind of device.
        """
        costs.check_fits([layer_bytes(layer) for layer in self._layers], self._kind)
        self._loaded = costs
        self._entries.clear()

    @property
    def _kind(self) -> str:
        return self._devices[0].torch_device.type

    @property
    def _rules(self) -> EngineRules:
        # Where compute is only enqueued, a recompute runs as soon as its input is there.
        if self._devices[0].shares_host_memory:
            return ENGINE_RULES
        return replace(ENGINE_RULES, early_recompute=True)

    # --- plans -------------------------------------------------------------------------------

    def plan(self, run_type: str, num_microbatch: int) -> ModelExecutePlan:
        """The plan of a call that is about to begin."""
        self._microbatches = num_microbatch
        self.meter.settle()
        entry = self._entries.get((run_type, num_microbatch))
        if entry is None:
            entry = _Entry(self._first_plan(run_type, num_microbatch))
            self._entries[run_type, num_microbatch] = entry
        elif self.meter.runs >= entry.next_check:
            entry.next_check = 2 * max(self.meter.runs, 1)
            entry.plan = self._better_plan(entry.plan, run_type, num_microbatch)
        return entry.plan

    def _first_plan(self, run_type: str, num_microbatch: int) -> ModelExecutePlan:
        first = plan_from_sizes(run_type, self._layers, self._devices, num_microbatch)
        return self._better_plan(first, run_type, num_microbatch, worth_it=1.0)

    def _better_plan(
        self,
        plan: ModelExecutePlan,
        run_type: str,
        num_microbatch: int,
        worth_it: float = _WORTH_IT,
    ) -> ModelExecutePlan:
        """The fastest plan under the costs that are known, if it is worth it; else ``plan``."""
        costs = self.costs(run_type)
        if costs.source == "estimated":
            return plan
        machine = _with_limit(costs.machine)
        workload = replace(costs, machine=machine).workload(
            run_type=run_type, microbatches=num_microbatch
        )
        limits = PlanLimits(
            stage_bytes=_stage_limit(self._devices),
            min_stages=len(self._devices),
            max_replicas=1,
            microbatches_per_round=(num_microbatch,),
        )
        try:
            planned = plan_iteration(workload, limits, effort=_EFFORT)
        except InvalidValueError:
            return plan  # one layer alone is above a limit that only estimates a need
        now_ms = pace_of(workload, [schedule_of(workload, plan)]).iteration_ms
        is_worth_it = planned.iteration_ms < worth_it * now_ms
        if not is_worth_it or self._sums(planned.plan) != self._sums(plan):
            return plan
        return ModelExecutePlan(planned.plan.fwd_plan, planned.plan.bwd_plan)

    def _sums(self, plan: StagePlan) -> list[frozenset[frozenset[int]]]:
        """Which layers' gradients of a shared parameter are summed on a device, and which at home.

        Sums in another order differ in their last bits; a plan that is only faster may not do that.
        """
        return [
            frozenset(
                frozenset(layer for layer in group if layer in stage) for stage in plan.bwd_plan
            )
            for group in self._shared
        ]


def plan_from_sizes(
    run_type: str, layers: Sequence[nn.Module], devices: Sequence[Device], num_microbatch: int
) -> ModelExecutePlan:
    """A plan for the time before there are measurements.

    A fused call's stages are those with the shortest simulated iteration, under estimated costs
    and the memory of the smallest device; other calls are cut evenly. Never a wide stage, which
    would change the order in which gradients are summed.
    """
    limit = _stage_limit(devices)
    if run_type != "fused":
        sizes = [layer_bytes(layer) for layer in layers]
        half = None if limit is None else limit // 2  # the other half is for gradients
        return default_plan(run_type, sizes, len(devices), stage_limit=half)
    costs: LayerCosts = estimated_costs(layers, "model")
    machine = Machine.uniform(len(devices))
    workload = Workload(costs, machine, num_microbatch, "fused", "async", rules=ENGINE_RULES)
    limits = PlanLimits(stage_bytes=limit, max_replicas=1, microbatches_per_round=(num_microbatch,))
    plan = plan_iteration(workload, limits, effort=_EFFORT).plan
    return ModelExecutePlan(plan.fwd_plan, plan.bwd_plan)


def _stage_limit(devices: Sequence[Device]) -> int | None:
    """Bytes of a stage: half of what the model may use, as the next one's weights arrive."""
    sizes = [device.memory().total_bytes for device in devices]
    known = [size for size in sizes if size is not None]
    return int(min(known) * MODEL_SHARE_OF_MEMORY / 2) if known else None


def _with_limit(machine: Machine) -> Machine:
    """The machine with the memory that the model may use."""
    devices = tuple(
        device
        if device.memory_bytes is None
        else replace(device, memory_bytes=max(int(MODEL_SHARE_OF_MEMORY * device.memory_bytes), 1))
        for device in machine.devices
    )
    return replace(machine, devices=devices)
