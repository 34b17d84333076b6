"""What a plan needs on each device, in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from roundpipe.plan.cost_tables import FORWARD, StageStep
from roundpipe.plan.costs import LayerCost, LayerCosts, Machine


class MemoryNeed(NamedTuple):
    """The moment at which a device is fullest, compared with what it has.

    Attributes:
        device: index of the device.
        step: the stage that runs.
        need_bytes: weights of the stage and of its successor on the device, gradients of the
            stage and of its predecessor (still on their way home), and the activations of one
            microbatch.
        limit_bytes: what the device has.
    """

    device: int
    step: StageStep
    need_bytes: int
    limit_bytes: int

    @property
    def excess_bytes(self) -> int:
        """Bytes above the limit; negative where there is room."""
        return self.need_bytes - self.limit_bytes


class StageBytes(NamedTuple):
    """What one stage holds on its device."""

    weights: int
    gradients: int
    activations: int


def stage_bytes(layers: Sequence[LayerCost], step: StageStep) -> StageBytes:
    """What a stage holds while it runs one microbatch.

    A forward stage needs the working memory of its greediest layer, a backward stage the
    activations of all its layers, and working memory on top.
    """
    mine = layers[step.start : step.stop]
    weights = sum(layer.weight_bytes for layer in mine)
    working = max(layer.forward_bytes for layer in mine)
    if step.phase == FORWARD:
        return StageBytes(weights, 0, working)
    gradients = sum(layer.gradient_bytes for layer in mine)
    return StageBytes(weights, gradients, working + sum(layer.activation_bytes for layer in mine))


def memory_needs(
    machine: Machine, costs: LayerCosts, steps: Sequence[StageStep], repeats: int
) -> list[MemoryNeed]:
    """The fullest moment of each device that has a limit.

    Args:
        machine: the devices.
        costs: the model.
        steps: the stages of one round, in dispatch order.
        repeats: how many rounds follow each other without a pause; 1 if they do not.
    """
    queues = _queues(len(machine), steps, repeats)
    needs = []
    sizes = {step: stage_bytes(costs.layers, step) for step in steps}
    for device, queue in enumerate(queues):
        limit = machine.devices[device].memory_bytes
        if limit is None or not queue:
            continue
        worst: MemoryNeed | None = None
        for index, step in enumerate(queue):
            size = sizes[step]
            need = size.weights + size.gradients + size.activations
            if index + 1 < len(queue):
                need += sizes[queue[index + 1]].weights
            if index > 0:
                need += sizes[queue[index - 1]].gradients
            if worst is None or need > worst.need_bytes:
                worst = MemoryNeed(device, step, need, limit)
        if worst is not None:
            needs.append(worst)
    return needs


def _queues(devices: int, steps: Sequence[StageStep], repeats: int) -> list[list[StageStep]]:
    """The stages of each device, in order."""
    queues: list[list[StageStep]] = [[] for _ in range(devices)]
    cursor = 0
    for _ in range(repeats):
        for step in steps:
            width = min(step.replicas, devices)
            for replica in range(width):
                queues[(cursor + replica) % devices].append(step)
            cursor = (cursor + width) % devices
    return queues
