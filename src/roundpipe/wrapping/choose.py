"""Which parts of a module tree are wrapped, by their size.

A tree is walked from its root. What is small stays in host memory; what is not too large becomes a
part; what is too large is looked into. A ``nn.Sequential`` gives its children as layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from roundpipe.config import RoundPipeRunConfig

# A module that holds at least this share of its parameters itself gains nothing from being divided.
_SHARE_OF_ITS_OWN = 0.5


@dataclass(frozen=True)
class PartSpec:
    """Modules that are wrapped together.

    Attributes:
        name: where they are in the model.
        layers: the modules; the first takes the arguments, the last returns the output.
        config: options of their own.
    """

    name: str
    layers: tuple[nn.Module, ...]
    config: RoundPipeRunConfig | None = None


@dataclass(frozen=True)
class ChainSpec:
    """What takes the place of a ``nn.Sequential`` that is not one part as a whole.

    Attributes:
        items: parts, and modules that are run as they are (or as what replaces parts of them).
    """

    items: tuple[PartSpec | nn.Module, ...]


@dataclass(frozen=True)
class Limits:
    """Sizes in bytes of parameters.

    Attributes:
        lower_bytes: what is smaller stays in host memory.
        upper_bytes: what is larger is looked into.
    """

    lower_bytes: int
    upper_bytes: int


@dataclass(frozen=True)
class Wishes:
    """What the user wants for single modules, by ``id``.

    Attributes:
        skipped: these stay in host memory, with all in them.
        configs: these become parts with options of their own.
    """

    skipped: frozenset[int] = frozenset()
    configs: Mapping[int, RoundPipeRunConfig] = field(default_factory=dict)


Choice = dict[int, PartSpec | ChainSpec]  # by id of the module that is replaced


def choose_parts(model: nn.Module, limits: Limits, wishes: Wishes) -> Choice:
    """Choose what is wrapped.

    Parameters that two parts would share, or a part and what is around it, stay in host memory:
    each part has its own copies on the devices, and gradients of its own.

    Args:
        model: the root.
        limits: sizes.
        wishes: exceptions.
    """
    while True:
        chooser = _Chooser(model, limits, wishes)
        chooser.visit(model, "")
        shared = _owners_of_shared(model, chooser.parts())
        if shared <= wishes.skipped:
            return chooser.choice
        wishes = Wishes(wishes.skipped | shared, wishes.configs)


def parameter_bytes(module: nn.Module) -> int:
    """Bytes of the parameters of a module and all in it, shared ones counted once."""
    return sum(p.numel() * p.element_size() for p in module.parameters())


def is_sequence(module: nn.Module) -> bool:
    """Whether it calls its children one after the other and does nothing else."""
    if not isinstance(module, nn.Sequential):
        return False
    # One that holds a None fails in its own forward, and shall fail there.
    is_whole = all(child is not None for child in module._modules.values())
    return is_whole and type(module).forward is nn.Sequential.forward


class _Chooser:
    """One walk."""

    def __init__(self, model: nn.Module, limits: Limits, wishes: Wishes) -> None:
        self.choice: Choice = {}
        self._limits = limits
        self._wishes = wishes
        self._special = wishes.skipped | set(wishes.configs)
        self._bytes = {id(module): parameter_bytes(module) for module in model.modules()}

    def parts(self) -> list[PartSpec]:
        """All parts."""
        found: list[PartSpec] = []
        for spec in self.choice.values():
            items = spec.items if isinstance(spec, ChainSpec) else (spec,)
            found += [item for item in items if isinstance(item, PartSpec)]
        return found

    def visit(self, module: nn.Module, name: str) -> None:
        """Decide about a module that is called from outside."""
        key = id(module)
        if key in self._wishes.skipped or key in self.choice:
            return
        if is_sequence(module) and not _has_hooks(module):
            self._visit_sequence(module, name)
        elif self._is_one_part(module) and self._is_worth_it(module):
            self.choice[key] = PartSpec(name, (module,), self._wishes.configs.get(key))
        else:
            for child_name, child in module.named_children():
                self.visit(child, f"{name}.{child_name}" if name else child_name)

    def _is_worth_it(self, module: nn.Module) -> bool:
        return id(module) in self._wishes.configs or (
            self._bytes[id(module)] >= self._limits.lower_bytes
        )

    def _is_one_part(self, module: nn.Module) -> bool:
        """Whether it can be called as a whole, on a device, and should be."""
        others = (m for m in module.modules() if m is not module)
        if any(id(other) in self._special for other in others) or not _is_callable(module):
            return False
        if id(module) in self._wishes.configs:
            return True
        size = self._bytes[id(module)]
        return size <= self._limits.upper_bytes or not self._is_divisible(module, size)

    def _is_divisible(self, module: nn.Module, size: int) -> bool:
        own = sum(p.numel() * p.element_size() for p in module.parameters(recurse=False))
        children = (self._bytes[id(child)] for child in module.children())
        return own < _SHARE_OF_ITS_OWN * size and any(
            child >= self._limits.lower_bytes for child in children
        )

    def _visit_sequence(self, module: nn.Module, name: str) -> None:
        runs: list[tuple[RoundPipeRunConfig | None, list[tuple[str, nn.Module]]]] = []
        for path, item in _flattened(module, name, self._special):
            as_layer = id(item) not in self._wishes.skipped and self._is_one_part(item)
            if not as_layer:
                self.visit(item, path)
                runs.append((None, [(path, item)]))
                continue
            config = self._wishes.configs.get(id(item), self._wishes.configs.get(id(module)))
            joins = runs and runs[-1][0] is config and self._is_layer(runs[-1][1][-1][1])
            if joins:
                runs[-1][1].append((path, item))
            else:
                runs.append((config, [(path, item)]))
        items: list[PartSpec | nn.Module] = []
        for config, run in runs:
            layers = tuple(layer for _, item in run for layer in _layers(item))
            size = parameter_bytes(nn.ModuleList(layers))  # what layers share counts once
            if self._is_layer(run[0][1]) and (config or size >= self._limits.lower_bytes):
                items.append(PartSpec(run[0][0], layers, config))
            else:
                items += (item for _, item in run)
        first = items[0] if items else None
        if len(items) == 1 and isinstance(first, PartSpec):
            self.choice[id(module)] = PartSpec(name, first.layers, first.config)
        elif any(isinstance(item, PartSpec) or self._is_changed(item) for item in items):
            self.choice[id(module)] = ChainSpec(tuple(items))

    def _is_layer(self, item: nn.Module) -> bool:
        return id(item) not in self._wishes.skipped and self._is_one_part(item)

    def _is_changed(self, item: nn.Module) -> bool:
        return any(id(part) in self.choice for part in item.modules())


def _flattened(
    module: nn.Module, name: str, special: frozenset[int]
) -> list[tuple[str, nn.Module]]:
    """The modules that a sequence calls, with those of sequences in it."""
    found: list[tuple[str, nn.Module]] = []
    for child_name, child in module._modules.items():
        path = f"{name}.{child_name}" if name else child_name
        assert child is not None  # `is_sequence` has seen to that
        if is_sequence(child) and not _has_hooks(child) and id(child) not in special:
            found += _flattened(child, path, special)
        else:
            found.append((path, child))
    return found


def _layers(item: nn.Module) -> list[nn.Module]:
    if is_sequence(item) and not _has_hooks(item):
        return [layer for _, layer in _flattened(item, "", frozenset())]
    return [item]


def _is_callable(module: nn.Module) -> bool:
    """Whether it has a forward; lists of modules have none."""
    return type(module).forward is not nn.Module.forward


def _has_hooks(module: nn.Module) -> bool:
    return any(
        vars(module).get(name)
        for name in (
            "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
        )
    )  # fmt: skip


def _owners_of_shared(model: nn.Module, parts: list[PartSpec]) -> frozenset[int]:
    """Modules that hold a parameter which two parts, or a part and its surroundings, would use."""
    inside = {
        id(module): index
        for index, part in enumerate(parts)
        for layer in part.layers
        for module in layer.modules()
    }
    users: dict[int, set[int]] = defaultdict(set)
    holders: dict[int, set[int]] = defaultdict(set)
    for index, part in enumerate(parts):
        for layer in part.layers:
            for parameter in layer.parameters():
                users[id(parameter)].add(index)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders[id(parameter)].add(id(module))
            if id(module) not in inside:
                users[id(parameter)].add(-1)
    return frozenset(
        holder for key, found in users.items() if len(found) > 1 for holder in holders[key]
    )
