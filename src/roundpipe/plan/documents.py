"""Workloads and plans as JSON documents, for files and for commands.

A costs file holds what a workload is made of::

    {
      "name": "my model",
      "layers": [{"forward_ms": 7.4, "backward_ms": 15.8, "weight_bytes": 100000000}, ...],
      "machine": {"devices": 8, "hop_ms": 1.6, "upload_bytes_per_ms": 25000000},
      "microbatches": 16,
      "mode": "async",
      "rules": {"early_recompute": false, "overlap_calls": false}
    }

``devices`` is a number of equal devices, described beside it, or a list of objects, one per device.
``rules`` say how the engine orders work, this package's own where they are left out. What
else a model writes beside its costs (:data:`REMARKS`) does not change a plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from roundpipe.errors import InvalidTypeError, InvalidValueError
from roundpipe.plan.costs import DeviceSpec, LayerCosts, Machine
from roundpipe.plan.stage_plan import StagePlan
from roundpipe.plan.workload import ENGINE_RULES, EngineRules, Workload, check_count

REMARKS = frozenset({"kind", "source", "layer_names"})
"""Entries of a costs file that tell where the numbers are from."""

_SPEC_FIELDS = {item.name for item in fields(DeviceSpec)}


def workload_from_document(document: Mapping[str, Any]) -> Workload:
    """Read a costs file.

    Raises:
        InvalidTypeError: an entry of the wrong type.
        InvalidValueError: a missing or unknown entry, or an impossible number.
    """
    known = {"name", "layers", "machine", "microbatches", "mode", "run_type", "rules"}
    _check_names("a costs document", document, known | REMARKS)
    machine = machine_from_document(document.get("machine", {"devices": 1}))
    costs = LayerCosts.from_document(
        {"layers": document.get("layers"), "name": document.get("name", "model")}
    )
    return Workload(
        costs,
        machine,
        document.get("microbatches", len(machine) + 1),
        document.get("run_type", "fused"),
        document.get("mode", "sync"),
        rules=_rules(document.get("rules", {})),
    )


def machine_from_document(document: Mapping[str, Any]) -> Machine:
    """Read the ``machine`` of a costs file.

    Raises:
        InvalidTypeError: an entry of the wrong type.
        InvalidValueError: a missing or unknown entry, or an impossible number.
    """
    if not isinstance(document, Mapping):
        raise InvalidTypeError(f"machine is {document!r}; expected an object with 'devices'")
    _check_names("machine", document, {"devices", "hop_ms", "links", "stage_ms", *_SPEC_FIELDS})
    devices, hop_ms = document.get("devices"), document.get("hop_ms", 0.0)
    links, stage_ms = document.get("links", {}), document.get("stage_ms", 0.0)
    if isinstance(devices, list):
        for index, entry in enumerate(devices):
            _check_names(f"machine.devices[{index}]", entry, _SPEC_FIELDS)
        specs = [
            DeviceSpec(**{"name": f"device:{index}", **entry})
            for index, entry in enumerate(devices)
        ]
        return Machine(tuple(specs), hop_ms, links, stage_ms)
    check_count("machine.devices", devices)
    shared = {name: value for name, value in document.items() if name in _SPEC_FIELDS}
    like = DeviceSpec(**shared)
    return Machine.uniform(int(devices or 0), hop_ms, like=like, links=links, stage_ms=stage_ms)


def machine_to_document(machine: Machine) -> dict[str, Any]:
    """The ``machine`` of a costs file; values at their default are left out."""
    devices = [
        {
            item.name: getattr(spec, item.name)
            for item in fields(DeviceSpec)
            if item.name == "name" or getattr(spec, item.name) != item.default
        }
        for spec in machine.devices
    ]
    document: dict[str, Any] = {"devices": devices}
    for name in ("hop_ms", "stage_ms"):
        if getattr(machine, name):
            document[name] = getattr(machine, name)
    if machine.links:
        document["links"] = dict(machine.links)
    return document


def plan_to_document(plan: StagePlan) -> dict[str, Any]:
    """Stages as ``[first, last + 1]``, and replicas, forward then backward."""
    return {
        "forward": [[stage.start, stage.stop] for stage in plan.fwd_plan],
        "backward": [[stage.start, stage.stop] for stage in plan.bwd_plan],
        "replicas": [*plan.fwd_replicas, *plan.bwd_replicas],
    }


def plan_from_document(document: Mapping[str, Any]) -> StagePlan:
    """Read what :func:`plan_to_document` wrote; replicas may be left out.

    Raises:
        InvalidTypeError: stages that are not pairs of numbers.
        InvalidValueError: not as many replicas as stages.
    """
    forward = _stages(document, "forward")
    backward = _stages(document, "backward")
    replicas = document.get("replicas") or [1] * (len(forward) + len(backward))
    if len(replicas) != len(forward) + len(backward):
        raise InvalidValueError(
            f"'replicas' has {len(replicas)} entries for {len(forward)} forward and "
            f"{len(backward)} backward stages; expected one per stage"
        )
    return StagePlan(
        forward, backward, list(replicas[: len(forward)]), list(replicas[len(forward) :])
    )


def _stages(document: Mapping[str, Any], name: str) -> list[range]:
    stages = []
    for index, pair in enumerate(document.get(name) or []):
        is_pair = isinstance(pair, (list, tuple)) and len(pair) == 2
        if not is_pair or not all(isinstance(bound, int) for bound in pair):
            raise InvalidTypeError(f"{name}[{index}] is {pair!r}; expected [first, last + 1]")
        stages.append(range(*pair))
    return stages


def _rules(document: object) -> EngineRules:
    _check_names("rules", document, {item.name for item in fields(EngineRules)})
    chosen = dict(document) if isinstance(document, Mapping) else {}
    for name, value in chosen.items():
        if not isinstance(value, bool):
            raise InvalidTypeError(f"rules.{name} is {value!r}; expected true or false")
    return replace(ENGINE_RULES, **chosen)


def _check_names(what: str, document: object, known: set[str]) -> None:
    if not isinstance(document, Mapping):
        raise InvalidTypeError(f"{what} is {document!r}; expected an object")
    foreign = sorted(set(document) - known)
    if foreign:
        raise InvalidValueError(f"{what} has {foreign[0]!r}; known names are {sorted(known)}")
