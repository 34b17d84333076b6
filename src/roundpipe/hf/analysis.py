"""From a watched forward: where to cut, and what each part of the model is needed for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

from roundpipe.hf import private
from roundpipe.hf.probe import Enter, Leave, ModuleCall, Probe, Use
from roundpipe.hf.refusal import CutRefusedError, class_name

# A second stack of layers is cut too if it is not much smaller than the largest one.
_SHARE_OF_LARGEST = 0.3


@dataclass
class Guests:
    """Modules around the layers, called by the code that the skeletons run.

    A guest is the outermost called module that contains no layer.

    Attributes:
        before: calls before the first layer, by module id, in order.
        between: ids of modules called between layers.
        after: ids of modules called after the last layer.
        raw_before: ids of parameters used outside of any guest or layer before the first layer.
        raw_between: the same between layers.
        raw_after: the same after the last layer.
    """

    before: dict[int, list[ModuleCall]] = field(default_factory=lambda: defaultdict(list))
    between: set[int] = field(default_factory=set)
    after: set[int] = field(default_factory=set)
    raw_before: set[int] = field(default_factory=set)
    raw_between: set[int] = field(default_factory=set)
    raw_after: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Analysis:
    """Where a model is cut.

    Attributes:
        elements: the layers, in order of their first call.
        element_names: their names in the model.
        calls: calls of layers in one forward, in order.
        guests: everything else that was called.
    """

    elements: list[nn.Module]
    element_names: tuple[str, ...]
    calls: list[ModuleCall]
    guests: Guests


def candidate_lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    """Outermost lists of modules that have parts, by name.

    Lists of plain projections are no lists of layers, unless a model that is none of transformers
    has no others.
    """
    found: dict[str, nn.ModuleList] = {}
    plain: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(outer + ".") for outer in found)
        if isinstance(module, nn.ModuleList) and not inside:
            if _holds_layers(module):
                found[name] = module
            elif _holds_plain_layers(module):
                plain[name] = module
    return found or ({} if any(map(private.is_pretrained, model.modules())) else plain)


def _holds_layers(found: nn.ModuleList) -> bool:
    return len(found) > 0 and all(any(True for _ in element.children()) for element in found)


def _holds_plain_layers(found: nn.ModuleList) -> bool:
    embeddings = (nn.Embedding, nn.EmbeddingBag)
    weighty = any(True for _ in found.parameters())
    return weighty and not any(isinstance(element, embeddings) for element in found)


def analyse(model: nn.Module, probe: Probe, excluded: frozenset[str] = frozenset()) -> Analysis:
    """Choose the lists to cut and sort what happened around them.

    Args:
        model: the model.
        probe: its watched forward.
        excluded: names of lists that must stay whole.

    Raises:
        CutRefusedError: no list of layers was called.
    """
    called = {id(event.call.module) for event in probe.events if isinstance(event, Enter)}
    lists = {
        name: [element for element in found if id(element) in called]
        for name, found in candidate_lists(model).items()
        if name not in excluded
    }
    sizes = {name: _parameter_count(elements) for name, elements in lists.items() if elements}
    if not sizes:
        raise CutRefusedError(
            class_name(model),
            f"it has no list of layers that its forward calls one by one ({_lists_seen(model)})",
        )
    limit = _SHARE_OF_LARGEST * max(sizes.values())
    names = {
        id(element): f"{name}.{key}"
        for name, size in sizes.items()
        if size >= limit
        for key, element in candidate_lists(model)[name].named_children()
        if id(element) in called
    }
    calls = list(_calls_of(probe, names))
    elements = list({id(call.module): call.module for call in calls}.values())
    return Analysis(
        elements,
        tuple(names[id(element)] for element in elements),
        calls,
        _guests(model, probe, set(names), len(calls)),
    )


def _lists_seen(model: nn.Module) -> str:
    """What there is instead, for the message."""
    names = [
        name or "itself"
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) > 0
    ]
    if not names:
        return "it has no nn.ModuleList at all"
    layers = candidate_lists(model)
    if not layers:
        return f"the modules in {', '.join(names)} have no modules of their own"
    return f"the example's forward called no module of {', '.join(layers)}"


def _parameter_count(modules: list[nn.Module]) -> int:
    parameters = {id(p): p.numel() for module in modules for p in module.parameters()}
    return sum(parameters.values())


def _calls_of(probe: Probe, cut: dict[int, str]) -> Iterator[ModuleCall]:
    """Calls of layers that are not inside the call of a layer."""
    inside: ModuleCall | None = None
    for event in probe.events:
        if isinstance(event, Enter) and inside is None and id(event.call.module) in cut:
            inside = event.call
            yield event.call
        elif isinstance(event, Leave) and event.call is inside:
            inside = None


def _guests(model: nn.Module, probe: Probe, cut: set[int], num_calls: int) -> Guests:
    containers = {
        id(module)
        for module in model.modules()
        if any(id(part) in cut for part in module.modules() if part is not module)
    }
    guests = Guests()
    inside: ModuleCall | None = None
    calls_begun = 0
    for event in probe.events:
        if isinstance(event, Leave):
            inside = None if event.call is inside else inside
            continue
        if inside is not None:
            continue
        if isinstance(event, Use):
            raw = (guests.raw_before, guests.raw_between, guests.raw_after)
            raw[_phase(calls_begun, num_calls)].add(id(event.parameter))
            continue
        key = id(event.call.module)
        if key in cut:
            calls_begun += 1
            inside = event.call
        elif key not in containers:
            inside = event.call
            phase = _phase(calls_begun, num_calls)
            if phase == 0:
                guests.before[key].append(event.call)
            else:
                (guests.between, guests.after)[phase - 1].add(key)
    return guests


def _phase(calls_begun: int, num_calls: int) -> int:
    return 0 if calls_begun == 0 else 1 if calls_begun < num_calls else 2
