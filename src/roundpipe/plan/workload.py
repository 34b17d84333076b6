"""What is to be planned: a model's costs, the machine, the microbatches and the limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from statistics import median

from roundpipe.errors import InvalidTypeError, InvalidValueError
from roundpipe.plan.costs import LayerCosts, Machine
from roundpipe.plan.stage_plan import check_run_type

MODES = ("sync", "layerwise", "async")
"""When a call may use updated parameters.

``sync``: the step follows the iteration, and the next iteration follows the step. ``layerwise``:
the same numbers, but layers are updated one by one, and uploads of the next iteration wait only for
their own layers; when the updates begin is one of the :class:`EngineRules`. ``async``: call t uses
the step that followed call t - 2, so that the step overlaps with a whole iteration.
"""

HEAVY_FACTOR = 1.2
"""A layer that takes more than so many times the median may get a wide stage."""


@dataclass(frozen=True)
class EngineRules:
    """How the engine orders work, where engines may differ.

    Attributes:
        early_recompute: whether the recompute of a microbatch may start before its gradient has
            arrived.
        overlap_calls: whether the caller's program runs ahead of the devices, so that a call may
            start before the last one has ended. Such an engine also knows of a layerwise step
            beforehand, and updates a layer as soon as its own gradients are home; one that does
            not is told of the step when the iteration's last call has ended, and goes up the
            layers from there. The published figures are of an engine that does.
        early_fused_forward: treat the fused stage's forward as a recompute, that is, let it start
            before its input is there. No engine can; the published simulation did.
    """

    early_recompute: bool = True
    overlap_calls: bool = True
    early_fused_forward: bool = False


ENGINE_RULES = EngineRules(early_recompute=False, overlap_calls=False)
"""How this package's engine orders work: a call returns when its last stage has ended, and its
gradients are home.

Costs files without rules are read so. The defaults of :class:`EngineRules` are those of the
published figures.
"""


@dataclass(frozen=True)
class Workload:
    """One training iteration (or inference call) of one model on one machine.

    Attributes:
        costs: the model.
        machine: the devices.
        microbatches: in one iteration, over all its rounds.
        run_type: ``"infer"``, ``"train"`` or ``"fused"``.
        mode: one of :data:`MODES`; for ``"infer"``, which has no step, ``"sync"`` is one call after
            another, and the others are many in a row.
        costs_by_kind: costs of this model on devices of a kind; other kinds use ``costs``.
        rules: how the engine orders work.

    Raises:
        InvalidValueError: an unknown run type or mode, fewer than one microbatch, or costs of a
            kind with another number of layers.
    """

    costs: LayerCosts
    machine: Machine
    microbatches: int
    run_type: str = "fused"
    mode: str = "sync"
    costs_by_kind: Mapping[str, LayerCosts] = field(default_factory=dict)
    rules: EngineRules = EngineRules()

    def __post_init__(self) -> None:
        check_run_type(self.run_type)
        if self.mode not in MODES:
            raise InvalidValueError(f"mode {self.mode!r} is unknown; expected one of {MODES}")
        check_count("microbatches", self.microbatches)
        for kind, costs in self.costs_by_kind.items():
            if len(costs) != len(self.costs):
                raise InvalidValueError(
                    f"costs of kind {kind!r} have {len(costs)} layers; expected {len(self.costs)}, "
                    "as the model has"
                )

    @property
    def optimizer_ms(self) -> float:
        """Time of a whole step."""
        return sum(layer.optimizer_ms for layer in self.costs.layers)

    def costs_on(self, device: int) -> LayerCosts:
        """Costs on a device, before its speed is applied."""
        return self.costs_by_kind.get(self.machine.devices[device].kind, self.costs)


@dataclass(frozen=True)
class PlanLimits:
    """What a plan must keep to, besides the memory of the devices.

    Attributes:
        forward_layers: most layers of a forward stage; None for no limit.
        backward_layers: most layers of a backward stage that is not fused.
        fused_layers: most layers of the fused stage.
        stage_bytes: most bytes of weights, and in backward of gradients, of a stage; a single layer
            may be above it.
        stage_ms: most milliseconds per microbatch of a stage on a device of speed 1; a single
            layer may be above it.
        min_stages: fewest stages of a call, as far as there are layers.
        max_replicas: most devices of a wide stage; 1 for none; None for all devices.
        heavy_layers: layers that may get a wide stage; None for those whose backward
            stage takes more than 1.2 times the median. Each replica uploads weights and downloads
            gradients, so widening everything would lose what a pipeline is for.
        microbatches_per_round: the choices; None for every divisor of the microbatches.
    """

    forward_layers: int | None = None
    backward_layers: int | None = None
    fused_layers: int | None = None
    stage_bytes: int | None = None
    stage_ms: float | None = None
    min_stages: int = 1
    max_replicas: int | None = None
    heavy_layers: frozenset[int] | None = None
    microbatches_per_round: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name in ("stage_ms", "heavy_layers", "microbatches_per_round"):
                continue
            if value is not None:
                check_count(item.name, value)

    def rounds_of(self, microbatches: int) -> tuple[int, ...]:
        """The sizes of a round to choose from, largest first.

        Raises:
            InvalidValueError: a size that does not divide the number of microbatches.
        """
        divisors = tuple(n for n in range(microbatches, 0, -1) if microbatches % n == 0)
        if self.microbatches_per_round is None:
            return divisors
        for size in self.microbatches_per_round:
            if size not in divisors:
                raise InvalidValueError(
                    f"microbatches_per_round has {size}; expected divisors of the "
                    f"{microbatches} microbatches: {divisors[::-1]}"
                )
        return tuple(sorted(set(self.microbatches_per_round), reverse=True))

    def heavy(self, costs: LayerCosts) -> frozenset[int]:
        """The layers that may get a wide stage."""
        if self.heavy_layers is not None:
            return self.heavy_layers
        if len(costs) < 2:
            return frozenset()
        times = [layer.again_ms + layer.backward_ms for layer in costs.layers]
        bound = HEAVY_FACTOR * median(times)
        return frozenset(index for index, time in enumerate(times) if time > bound)


def check_count(what: str, value: object) -> None:
    """Refuse anything but an int of at least 1.

    Raises:
        InvalidTypeError: not an int.
        InvalidValueError: below 1.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidTypeError(f"{what} is {value!r}; expected an int of at least 1")
    if value < 1:
        raise InvalidValueError(f"{what} is {value}; expected at least 1")
