"""Where the package waits on an accelerator, found in its sources, and leaving one place out.

Three kinds: a *stream wait* makes later work of a stream start after an event, a *record_stream*
keeps memory until a stream is through with it, a *host wait* blocks the calling thread. The modules
above the back end ask for them through `Device` and `Event`; the back end hands them to torch.
"""

import ast
import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import roundpipe
from roundpipe.devices import accelerator
from roundpipe.devices.accelerator import AcceleratorDevice, AcceleratorEvent

PACKAGE = Path(roundpipe.__file__).parent
BACK_END = "devices.accelerator"
# Methods of the interface, or of torch in the back end, by kind.
_KINDS = {
    "wait": "stream wait",
    "wait_event": "stream wait",
    "wait_stream": "stream wait",
    "mark_use": "record_stream",
    "record_stream": "record_stream",
    "synchronize": "host wait",
}


@dataclass(frozen=True)
class Site:
    """One call that waits, or keeps memory.

    Attributes:
        module: below `roundpipe`.
        function: qualified by its class.
        kind: "stream wait", "record_stream" or "host wait".
        number: which of its kind in the function, from 1.
        lines: of the call.
    """

    module: str
    function: str
    kind: str
    number: int
    lines: range

    @property
    def name(self) -> str:
        """Names it in the table; does not change when lines move."""
        suffix = f" {self.number}" if self.number > 1 else ""
        return f"{self.module}.{self.function}: {self.kind}{suffix}"


def find_sites() -> dict[str, Site]:
    """All of the package that concern an accelerator, by name."""
    found: dict[str, Site] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        text = path.read_text()
        is_above = not module.startswith("devices.") and _uses_interface(text)
        if is_above or module == BACK_END:
            for site in _Finder(module).find(ast.parse(text)):
                found[site.name] = site
    return found


def _uses_interface(text: str) -> bool:
    return any(
        isinstance(node, ast.ImportFrom)
        and (node.module or "").endswith("devices.base")
        and {alias.name for alias in node.names} & {"Device", "Event"}
        for node in ast.walk(ast.parse(text))
    )


class _Finder(ast.NodeVisitor):
    def __init__(self, module: str) -> None:
        self._module = module
        self._scope: list[str] = []
        self._found: list[Site] = []

    def find(self, tree: ast.Module) -> list[Site]:
        self.visit(tree)
        return self._found

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._inside(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._inside(node)

    def _inside(self, node: ast.ClassDef | ast.FunctionDef) -> None:
        self._scope.append(node.name)
        self.generic_visit(node)
        self._scope.pop()

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        if not isinstance(node.func, ast.Attribute):
            return
        kind = _KINDS.get(node.func.attr)
        if kind is None or (node.func.attr == "wait" and not _names_a_stream(node)):
            return
        function = ".".join(self._scope)
        before = [s for s in self._found if (s.function, s.kind) == (function, kind)]
        lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        self._found.append(Site(self._module, function, kind, len(before) + 1, lines))


def _names_a_stream(call: ast.Call) -> bool:
    """Whether it is `Device.wait`; counters and threads wait, too."""
    return bool(call.args) and ast.unparse(call.args[0]).split(".")[0].lower() == "stream"


@contextlib.contextmanager
def left_out(site: Site) -> Iterator[None]:
    """Within it, the wait is not there.

    A place in the back end is left out for whoever asks for it; one above it, where it asks.
    """
    name = {"stream wait": "wait", "record_stream": "mark_use", "host wait": "synchronize"}
    method = name[site.kind]
    is_primitive = site.module == BACK_END and site.function.endswith("." + method)
    owners: list[Any] = [AcceleratorDevice, AcceleratorEvent]
    if is_primitive:
        owners = [getattr(accelerator, site.function.split(".")[0])]
    with contextlib.ExitStack() as stack:
        for owner in owners:
            if method in vars(owner):
                stack.enter_context(_skipping(owner, method, None if is_primitive else site))
        yield


@contextlib.contextmanager
def _skipping(owner: Any, method: str, site: Site | None) -> Iterator[None]:
    original = vars(owner)[method]

    def skipping(self: Any, *args: Any) -> Any:
        if site is not None and not _is_at(sys._getframe(1), site):
            return original(self, *args)
        return None

    setattr(owner, method, skipping)
    try:
        yield
    finally:
        setattr(owner, method, original)


def _is_at(frame: FrameType, site: Site) -> bool:
    code: CodeType = frame.f_code
    path = PACKAGE.joinpath(*site.module.split(".")).with_suffix(".py")
    return Path(code.co_filename) == path and frame.f_lineno in site.lines
