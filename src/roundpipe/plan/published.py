"""Published costs, partitions and makespans of five models, to plan for and to compare with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import files
from itertools import accumulate, pairwise
from typing import Any

from roundpipe.errors import InvalidValueError
from roundpipe.plan.costs import LayerCost, LayerCosts, Machine
from roundpipe.plan.stage_plan import StagePlan
from roundpipe.plan.workload import EngineRules, PlanLimits, Workload


@dataclass(frozen=True)
class PublishedModel:
    """One of the models.

    Attributes:
        name: as published.
        devices: number of devices.
        microbatches: of an iteration.
        microbatches_per_round: of the published partition.
        numbers: the model's entry in ``published.json``.
    """

    name: str
    devices: int
    microbatches: int
    microbatches_per_round: int
    numbers: Mapping[str, Any]

    @cached_property
    def costs(self) -> LayerCosts:
        """The layers and, after the last, the head."""
        numbers = self.numbers
        head = LayerCost(numbers["head_forward_ms"], numbers["head_backward_ms"])
        return LayerCosts.uniform(
            numbers["layers"], numbers["forward_ms"], numbers["backward_ms"], head, name=self.name
        )

    def workload(self, mode: str = "sync", *, early_fused_forward: bool = False) -> Workload:
        """An iteration of the model.

        Args:
            mode: ``"sync"``, ``"layerwise"`` or ``"async"``.
            early_fused_forward: let the head's forward start before its input is there. No engine
                can, but with it all five published makespans come out to the digit, so the
                published simulation must have treated the head's forward like a recompute.
        """
        rules = replace(EngineRules(), early_fused_forward=early_fused_forward)
        machine = Machine.uniform(self.devices, self.numbers["hop_ms"])
        return Workload(self.costs, machine, self.microbatches, mode=mode, rules=rules)

    @cached_property
    def plan(self) -> StagePlan:
        """The published partition."""
        layers = self.numbers["layers"]
        down = accumulate((-count for count in self.numbers["backward_stages"]), initial=layers)
        up = accumulate(self.numbers["forward_stages"], initial=0)
        return StagePlan(
            [range(a, b) for a, b in pairwise(up)],
            [range(layers, layers + 1), *(range(b, a) for a, b in pairwise(down))],
        )

    @property
    def limits(self) -> PlanLimits:
        """Stages no larger than the published ones, which are known to fit the devices."""
        return PlanLimits(
            forward_layers=max(self.numbers["forward_stages"]),
            backward_layers=max(self.numbers["backward_stages"]),
            fused_layers=1,
        )

    @property
    def makespan_ms(self) -> float:
        """The published makespan of an iteration."""
        return float(self.numbers["makespan_ms"])

    def published_bubble_percent(self, mode: str) -> float:
        """The published bubble of ``"sync"`` or ``"async"`` iterations."""
        return float(self.numbers[f"bubble_{mode}_percent"])


def published_names() -> tuple[str, ...]:
    """The names of the models."""
    return tuple(_document()["models"])


def published_model(name: str) -> PublishedModel:
    """A model by its name.

    Raises:
        InvalidValueError: there is none of this name; with the names there are.
    """
    document = _document()
    if name not in document["models"]:
        raise InvalidValueError(
            f"no published model is called {name!r}; expected one of {', '.join(published_names())}"
        )
    return PublishedModel(
        name,
        document["devices"],
        document["microbatches"],
        document["microbatches_per_round"],
        document["models"][name],
    )


def _document() -> dict[str, Any]:
    text = files("roundpipe.plan").joinpath("published.json").read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    return document
