"""What layers cost: estimates from their sizes, as numbers for the planner."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from .devices.base import Device
from .plan import (
    ENGINE_RULES,
    MODEL_SHARE_OF_MEMORY,
    DeviceSpec,
    LayerCost,
    LayerCosts,
    Machine,
    ModelExecutePlan,
    PlanLimits,
    Workload,
    default_plan,
    plan_iteration,
)

# Times are estimated from bytes, so only their ratios mean something: a megabyte of weights counts
# as a millisecond for a microbatch, backward as twice forward, and a layer without weights as a
# little, for what it computes and for being dispatched.
_BYTES_PER_MS = 1e6
_LEAST_MS = 0.02
_BACKWARD_FACTOR = 2.0

_EFFORT = 2000  # simulated stages: a fraction of a second, for estimates that deserve no more


def layer_bytes(layer: nn.Module) -> int:
    """Bytes of the parameters and buffers of a layer, shared ones counted once."""
    tensors = {id(tensor): tensor for tensor in [*layer.parameters(), *layer.buffers()]}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def multiplied_bytes(layer: nn.Module) -> int:
    """Bytes of the parameters that every row is multiplied with: an embedding's are only read."""
    looked_up = {
        id(module.weight)
        for module in layer.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }
    return sum(p.numel() * p.element_size() for p in layer.parameters() if id(p) not in looked_up)


def estimated_costs(layers: Sequence[nn.Module], name: str) -> LayerCosts:
    """Costs of ``layers`` as far as their sizes tell."""
    costs = []
    for layer in layers:
        forward_ms = _LEAST_MS + multiplied_bytes(layer) / _BYTES_PER_MS
        trained = sum(p.numel() * p.element_size() for p in layer.parameters() if p.requires_grad)
        costs.append(
            LayerCost(
                forward_ms,
                _BACKWARD_FACTOR * forward_ms,
                weight_bytes=layer_bytes(layer),
                gradient_bytes=trained,
            )
        )
    return LayerCosts(tuple(costs), name)


def machine_of(devices: Sequence[Device]) -> Machine:
    """The devices as the planner sees them, with all of their memory."""
    return Machine(
        tuple(
            DeviceSpec(device.name, device.torch_device.type, 1.0, device.memory().total_bytes)
            for device in devices
        )
    )


def plan_from_sizes(
    run_type: str, layers: Sequence[nn.Module], devices: Sequence[Device], num_microbatch: int
) -> ModelExecutePlan:
    """The plan of a call for which the user gave none.

    A fused call's stages are those with the shortest simulated iteration, under the estimate above
    and the memory of the smallest device; other calls are cut evenly. Never a wide stage, which
    would change the order in which gradients are summed.
    """
    known = [size for size in (d.memory().total_bytes for d in devices) if size is not None]
    # Half of what the model may use, since the next stage's weights arrive meanwhile.
    limit = int(min(known) * MODEL_SHARE_OF_MEMORY / 2) if known else None
    if run_type != "fused":
        sizes = [layer_bytes(layer) for layer in layers]
        half = None if limit is None else limit // 2  # the other half is for gradients
        return default_plan(run_type, sizes, len(devices), stage_limit=half)
    costs = estimated_costs(layers, "model")
    machine = Machine.uniform(len(devices))
    workload = Workload(costs, machine, num_microbatch, "fused", "async", rules=ENGINE_RULES)
    limits = PlanLimits(stage_bytes=limit, max_replicas=1, microbatches_per_round=(num_microbatch,))
    plan = plan_iteration(workload, limits, effort=_EFFORT).plan
    return ModelExecutePlan(plan.fwd_plan, plan.bwd_plan)
