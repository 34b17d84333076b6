"""Building the two skeletons from what the probe saw."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from roundpipe.grafting import Graft
from roundpipe.hf.analysis import Analysis
from roundpipe.hf.skeleton import build_skeleton
from roundpipe.hf.stubs import Absent, HeldStub, LayerStub, Watched


def prefix_skeleton(model: nn.Module, analysis: Analysis, held: Collection[int]) -> Graft:
    """The skeleton that runs up to the last layer.

    Args:
        model: the original.
        analysis: where it is cut.
        held: ids of the modules that the tail will not run again.
    """
    guests = analysis.guests
    parameters = guests.raw_before | guests.raw_between
    needed = set(guests.before) | guests.between
    names = {id(module): name for name, module in model.named_modules()}
    replacements: dict[int, nn.Module] = _layer_stubs(analysis)
    for key in held:
        module = guests.before[key][0].module
        replacements[key] = Watched(module, names[key])
    _absent(model, "", needed, parameters, replacements)
    return build_skeleton(model, replacements, lambda p: id(p) in parameters)


def tail_skeleton(model: nn.Module, analysis: Analysis, held: Collection[int]) -> Graft:
    """The skeleton that runs from the arguments to the output, without layers.

    Args:
        model: the original.
        analysis: where it is cut.
        held: ids of the modules whose work the prefix has done.
    """
    guests = analysis.guests
    parameters = guests.raw_before | guests.raw_between | guests.raw_after
    needed = (set(guests.before) - set(held)) | guests.between | guests.after
    names = {id(module): name for name, module in model.named_modules()}
    replacements: dict[int, nn.Module] = _layer_stubs(analysis)
    for key in held:
        module = guests.before[key][0].module
        keep = key in needed or _uses(module, needed, parameters)
        replacements[key] = HeldStub(module, names[key], keep=keep)
    _absent(model, "", needed, parameters, replacements)
    return build_skeleton(model, replacements, lambda p: id(p) in parameters)


def _layer_stubs(analysis: Analysis) -> dict[int, nn.Module]:
    pairs = zip(analysis.elements, analysis.element_names, strict=True)
    return {id(m): LayerStub(m, name, index) for index, (m, name) in enumerate(pairs)}


def _absent(
    module: nn.Module,
    name: str,
    needed: set[int],
    parameters: set[int],
    replacements: dict[int, nn.Module],
) -> None:
    """Replace the largest parts of ``module`` that are not needed and have weights."""
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        if id(child) in replacements or id(child) in needed:
            continue
        replaced = any(id(part) in replacements for part in child.modules())
        if replaced or _uses(child, needed, parameters):
            _absent(child, path, needed, parameters, replacements)
        elif any(True for _ in child.parameters()) or any(True for _ in child.buffers()):
            replacements[id(child)] = Absent(child, path)


def _uses(module: nn.Module, needed: set[int], parameters: set[int]) -> bool:
    """Whether a part of ``module`` is needed, or a parameter of it is used from outside."""
    return any(id(part) in needed for part in module.modules()) or any(
        id(parameter) in parameters for parameter in module.parameters()
    )
