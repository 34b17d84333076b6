"""The modules' imports against the table of levels, and what importing the package may not do.

The modules are parsed, not run: an import inside a function or under ``TYPE_CHECKING`` counts too.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import roundpipe

ROOT = Path(roundpipe.__file__).parent

# Lowest first. A module imports from rows above its own only; a package also from itself, as long
# as its modules make no cycle. The longest entry that fits a module decides (`devices.base` before
# `devices`).
ROWS: tuple[tuple[str, ...], ...] = (
    ("errors", "compat", "trace"),
    ("workers", "plan", "microbatch", "devices.base"),
    ("plot",),
    (
        "devices",
        "config",
        "costs",
        "profile",
        "random_state",
        "context",
        "replicas",
        "grafting",
        "pinning",
        "admission",
        "binding",
        "gradients",
    ),
    ("records",),
    ("parameters",),
    ("transfer",),
    ("arrivals",),
    ("stage_weights",),
    ("stepping",),
    ("sharing",),
    ("layerwise",),
    ("calls",),
    ("habits", "recompute"),
    ("stage_state",),
    ("buffer_watch",),
    ("layer_run",),
    ("compute",),
    ("dispatch",),
    ("autograd", "facade"),
    ("results", "measuring"),
    ("in_flight",),
    ("pipeline",),
    # Who uses the engine; the engine knows nothing of them.
    ("optim", "grad_scaler", "verification"),
    ("hf",),
    ("wrapping",),
    ("cli",),
)
PACKAGES = (
    "plan",
    "microbatch",
    "devices",
    "costs",
    "optim",
    "plot",
    "hf",
    "wrapping",
    "verification",
    "cli",
)
EXPORTS = "__init__"  # roundpipe/__init__.py: names of the engine, for users and for `cli`

Problems = Iterator[str]


def sources() -> dict[str, str]:
    """Each module of the package by its dotted name within it, with its text."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        found[name] = path.read_text(encoding="utf-8")
    return found


def is_package(module: str) -> bool:
    return (ROOT / module.replace(".", "/") / "__init__.py").exists()


def imports_of(module: str, text: str, known: frozenset[str]) -> list[str]:
    """The modules of the package that ``text`` imports, anywhere in it."""
    within = module.split(".") if module != EXPORTS else []
    parents = within if module != EXPORTS and is_package(module) else within[:-1]
    found = []
    for node in ast.walk(ast.parse(text)):
        names: list[list[str]] = []
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module.split(".") if node.module else []
            if node.level:
                base = ["roundpipe", *parents[: len(parents) - node.level + 1], *base]
            # What is imported from a package may be one of its modules, or a name in it.
            submodules = [[*base, alias.name] for alias in node.names]
            names = [n if ".".join(n[1:]) in known else base for n in submodules]
        found += [".".join(n[1:]) or EXPORTS for n in names if n[0] == "roundpipe"]
    return found


def row_of(module: str) -> tuple[int, str]:
    """The row of a module and the entry of the table that puts it there."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        entry = ".".join(parts[:length])
        for row, entries in enumerate(ROWS):
            if entry in entries:
                return row, entry
    raise LookupError(f"{module} has no row in the table of levels; give it one, here and in docs")


def upward_imports(module: str, imported: list[str]) -> Problems:
    """The imports of a module that the table does not allow."""
    row, entry = row_of(module)
    engine_ends = row_of("pipeline")[0]
    for other in imported:
        if other == EXPORTS:
            if row <= engine_ends:
                yield f"{module} imports the package itself, which imports the engine"
            continue
        other_row, other_entry = row_of(other)
        own_package = entry == other_entry and entry in PACKAGES
        if other_row >= row and not own_package:
            yield f"{module} (row {row}) imports {other} (row {other_row})"


def cycle_in(graph: dict[str, list[str]]) -> list[str]:
    """Modules that import each other in a circle, if there are any."""
    done: set[str] = set()

    def visit(module: str, trail: list[str]) -> list[str]:
        if module in trail:
            return [*trail[trail.index(module) :], module]
        if module in done:
            return []
        for other in graph.get(module, []):
            if circle := visit(other, [*trail, module]):
                return circle
        done.add(module)
        return []

    return next((circle for module in graph if (circle := visit(module, []))), [])


def torch_names(text: str) -> Iterator[str]:
    """Every dotted name of torch that ``text`` spells out: in imports and in expressions."""
    tree = ast.parse(text)
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
                bound = alias.asname or alias.name.split(".")[0]
                aliases[bound] = alias.name if alias.asname else bound
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield f"{node.module}.{alias.name}"
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and node.id in aliases:
            yield ".".join([aliases[node.id], *parts])


def is_of_torch(name: str) -> bool:
    return f"{name}.".startswith("torch.")


def is_private(name: str) -> bool:
    return any(p.startswith("_") and not p.endswith("__") for p in name.split("."))


def printing(text: str) -> Iterator[int]:
    """Lines that print, write to a standard stream, or end the process."""
    forbidden = ("print", "exit", "quit", "sys.stdout", "sys.stderr", "sys.exit", "os._exit")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) in forbidden:
            yield node.lineno


SOURCES = sources()
KNOWN = frozenset(SOURCES)
IMPORTS = {name: imports_of(name, text, KNOWN) for name, text in SOURCES.items()}


@pytest.mark.parametrize("module", [name for name in SOURCES if name != EXPORTS])
def test_a_module_imports_from_lower_levels_only(module: str) -> None:
    assert list(upward_imports(module, IMPORTS[module])) == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert cycle_in(IMPORTS) == []


def test_the_package_itself_shows_nothing_of_the_command_line() -> None:
    assert [m for m in IMPORTS[EXPORTS] if m.split(".")[0] == "cli"] == []
    assert "pipeline" in IMPORTS[EXPORTS]


@pytest.mark.parametrize("module", SOURCES)
def test_only_one_module_names_a_vendor_and_one_names_private_parts_of_torch(module: str) -> None:
    names = [name for name in torch_names(SOURCES[module]) if is_of_torch(name)]
    if module != "devices.accelerator":
        assert [name for name in names if f"{name}.".startswith("torch.cuda.")] == []
    if module != "compat":
        assert [name for name in names if is_private(name)] == []


@pytest.mark.parametrize("module", [name for name in SOURCES if name.split(".")[0] != "cli"])
def test_only_the_command_line_prints_or_exits(module: str) -> None:
    assert list(printing(SOURCES[module])) == []


# --- the checks themselves --------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "from .pipeline import RoundPipe",
        "from roundpipe.pipeline import RoundPipe",
        "import roundpipe.pipeline",
        "from . import pipeline",
        "from roundpipe import pipeline",
        "def f():\n    from .pipeline import RoundPipe",
        "if TYPE_CHECKING:\n    from .pipeline import RoundPipe",
    ],
)
def test_every_way_to_import_upward_is_seen(text: str) -> None:
    imported = imports_of("workers", text, KNOWN)
    assert imported == ["pipeline"]
    assert list(upward_imports("workers", imported)) == [
        f"workers (row 1) imports pipeline (row {row_of('pipeline')[0]})"
    ]


def test_what_the_table_allows_and_refuses() -> None:
    assert list(upward_imports("devices.pool", ["devices.base", "workers", "devices.cpu"])) == []
    assert list(upward_imports("stage_weights", ["transfer"])) == []
    assert len(list(upward_imports("devices.base", ["devices.pool"]))) == 1
    assert len(list(upward_imports("transfer", ["stage_weights"]))) == 1
    assert len(list(upward_imports("config", ["costs"]))) == 1
    assert len(list(upward_imports("pipeline", ["optim.adam", "hf", "cli.job"]))) == 3
    assert len(list(upward_imports("pipeline", [EXPORTS]))) == 1
    assert list(upward_imports("cli.job", [EXPORTS, "hf", "pipeline"])) == []
    with pytest.raises(LookupError, match="nonsense has no row in the table of levels"):
        row_of("nonsense")


def test_imports_within_a_package_are_resolved_from_where_the_module_is() -> None:
    assert imports_of("devices.pool", "from .base import Device", KNOWN) == ["devices.base"]
    assert imports_of("devices", "from .base import Device", KNOWN) == ["devices.base"]
    assert imports_of("devices.pool", "from ..errors import X", KNOWN) == ["errors"]
    assert imports_of("devices.pool", "import torch, os", KNOWN) == []


def test_a_circle_is_found() -> None:
    assert cycle_in({"a": ["b"], "b": ["c"], "c": ["b"]}) == ["b", "c", "b"]
    assert cycle_in({"a": ["b", "c"], "b": ["c"], "c": []}) == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import torch\ntorch._C._autograd.f()", "torch._C._autograd.f"),
        ("from torch._dynamo import eval_frame", "torch._dynamo.eval_frame"),
        ("from torch.utils import _pytree", "torch.utils._pytree"),
        ("from torch import nn\nnn.modules._functions", "torch.nn.modules._functions"),
        ("import torch.utils._pytree as tree", "torch.utils._pytree"),
    ],
)
def test_private_names_of_torch_are_seen(text: str, name: str) -> None:
    assert name in torch_names(text)
    assert is_private(name)
    assert not is_private("torch.__version__")
    assert not is_private("torch.nn.Module")


def test_printing_is_seen() -> None:
    text = "print(1)\nimport sys\nsys.stdout.write('x')\nsys.exit(1)\nlogger.info('fine')"
    assert sorted(printing(text)) == [1, 3, 4]


# --- importing ----------------------------------------------------------------------------------

PROGRAM = """
import sys, threading, warnings
import torch
before = set(sys.modules), list(warnings.filters), threading.enumerate(), sys.getswitchinterval()
threads, seed = torch.get_num_threads(), torch.initial_seed()
import roundpipe
new = set(sys.modules) - before[0]
assert "roundpipe.pipeline" in new
heavy = ("transformers", "torch.distributed.pipelining", "torch.distributed.tensor", "matplotlib",
         "roundpipe.cli")
assert not [m for m in new if m.startswith(heavy)], sorted(m for m in new if m.startswith(heavy))
assert warnings.filters == before[1], "a warning filter changed"
assert threading.enumerate() == before[2], "a thread was started"
assert sys.getswitchinterval() == before[3]
assert (torch.get_num_threads(), torch.initial_seed()) == (threads, seed)
assert not torch.cuda.is_initialized()
assert "roundpipe.optim" not in new
assert "optim" in dir(roundpipe)
assert "hf" in dir(roundpipe)
assert roundpipe.optim.AdamW.__module__ == "roundpipe.optim.adam"
"""


def test_only_packages_of_its_own_are_imported_on_demand() -> None:
    with pytest.raises(AttributeError, match="module 'roundpipe' has no attribute 'optimizers'"):
        roundpipe.optimizers  # noqa: B018


def test_importing_the_package_does_nothing_else() -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(ROOT.parent), "OMP_NUM_THREADS": "1"},
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
