"""The stages of one model: the record and its rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from roundpipe.errors import InvalidTypeError, InvalidValueError

RUN_TYPES = ("infer", "train", "fused")
"""``infer``: forward only; ``train``: forward, later backward; ``fused``: both in one call."""


def check_run_type(run_type: str) -> None:
    """Refuse a run type other than ``"infer"``, ``"train"`` and ``"fused"``.

    Raises:
        InvalidValueError: naming the run types there are.
    """
    if run_type not in RUN_TYPES:
        raise InvalidValueError(
            f"run type {run_type!r} is unknown; expected one of 'infer', 'train', 'fused'"
        )


@dataclass(frozen=True)
class StagePlan:
    """Stages of one model, in dispatch order.

    A wide stage runs on several devices at once: its microbatch m runs on replica m mod r. A stage
    that runs the forward of layers with buffers takes one device whatever is said here, since a
    microbatch may find in them what the one before has left.

    Attributes:
        fwd_plan: forward stages, ascending. In a fused run they end where ``bwd_plan[0]`` starts.
        bwd_plan: backward stages, descending. In a fused run the first one is also run forward.
        fwd_replicas: how many devices run each forward stage; all 1 unless given.
        bwd_replicas: how many devices run each backward stage; all 1 unless given.

    Raises:
        InvalidTypeError: a stage is not a ``range``, or a number of replicas not an ``int``.
        InvalidValueError: a stage without layers, or with a step; a number of replicas below 1; not
            as many numbers of replicas as stages.
    """

    fwd_plan: list[range]
    bwd_plan: list[range] = field(default_factory=list)
    fwd_replicas: list[int] = field(default_factory=list)
    bwd_replicas: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("fwd", "bwd"):
            stages = _checked_stages(getattr(self, f"{name}_plan"), f"{name}_plan")
            replicas = _checked_replicas(
                getattr(self, f"{name}_replicas"), len(stages), f"{name}_replicas"
            )
            object.__setattr__(self, f"{name}_plan", stages)
            object.__setattr__(self, f"{name}_replicas", replicas)

    @property
    def is_wide(self) -> bool:
        """Whether any stage runs on more than one device at once."""
        return any(count > 1 for count in (*self.fwd_replicas, *self.bwd_replicas))

    def check_valid(self, num_layers: int, run_type: str) -> None:
        """Check that the plan covers the layers as a run of this type needs it.

        Args:
            num_layers: how many layers the model has.
            run_type: ``"infer"`` (the backward plan may be empty), ``"train"`` or ``"fused"``.

        Raises:
            InvalidValueError: saying which layer is missing, doubled, out of order or not a layer
                of the model.
        """
        check_run_type(run_type)
        if run_type == "fused":
            if not self.bwd_plan:
                raise InvalidValueError(
                    "bwd_plan is empty; a fused run needs at least the stage that ends with the "
                    f"last layer, as in bwd_plan=[range(0, {num_layers})]"
                )
            fused_start = self.bwd_plan[0].start
            where = f"; bwd_plan[0] is fused and starts at layer {fused_start}"
            _check_cover("fwd_plan", self.fwd_plan, fused_start, where)
        else:
            _check_cover("fwd_plan", self.fwd_plan, num_layers, "")
        if run_type != "infer" or self.bwd_plan:
            _check_cover("bwd_plan", self.bwd_plan[::-1], num_layers, "", descending=True)


def _checked_stages(stages: Sequence[range], name: str) -> list[range]:
    for index, stage in enumerate(stages):
        if not isinstance(stage, range):
            raise InvalidTypeError(
                f"{name}[{index}] is {stage!r}; expected a range of layers, as range(0, 4)"
            )
        if stage.step != 1 or len(stage) == 0:
            raise InvalidValueError(
                f"{name}[{index}] is {stage!r}; expected at least one layer and step 1"
            )
    return list(stages)


def _checked_replicas(replicas: Sequence[int], stages: int, name: str) -> list[int]:
    if not replicas:
        return [1] * stages
    if len(replicas) != stages:
        raise InvalidValueError(
            f"{name} has {len(replicas)} entries for {stages} stages; expected one per stage"
        )
    for index, count in enumerate(replicas):
        if not isinstance(count, int) or isinstance(count, bool):
            raise InvalidTypeError(f"{name}[{index}] is {count!r}; expected an int")
        if count < 1:
            raise InvalidValueError(f"{name}[{index}] is {count}; expected at least 1")
    return list(replicas)


def _check_cover(
    name: str, ascending: Sequence[range], num_layers: int, where: str, *, descending: bool = False
) -> None:
    """Check that the stages cover layers 0 to ``num_layers`` - 1 once each and in order."""
    counts = Counter(layer for stage in ascending for layer in stage)
    expected = (
        f"expected each of the layers 0..{num_layers - 1} once"
        if num_layers
        else ("expected no stages")
    )
    foreign = sorted(layer for layer in counts if not 0 <= layer < num_layers)
    if foreign:
        raise InvalidValueError(f"{name} has layer {foreign[0]}; {expected}{where}")
    doubled = sorted(layer for layer, count in counts.items() if count > 1)
    if doubled:
        raise InvalidValueError(f"{name} has layer {doubled[0]} more than once; {expected}{where}")
    missing = [layer for layer in range(num_layers) if layer not in counts]
    if missing:
        raise InvalidValueError(f"{name} lacks layer {missing[0]}; {expected}{where}")
    order = "descending" if descending else "ascending"
    for before, after in pairwise(ascending):
        if after.start != before.stop:
            layer = before.start if descending else after.start
            raise InvalidValueError(
                f"{name} has layer {layer} out of order; expected the stages in {order} order"
            )
