"""Models put together at random, run through roundpipe and through a plain loop."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import itertools
import logging
import pprint
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe.devices import CheckedPool, CpuChecks, DevicePool, open_cpu_pool
from roundpipe.devices.cpu import CpuDevice
from roundpipe.random_state import draw_call_seed, layer_seed

from . import zoo
from .zoo import Dims, Spec, UnbuildableError

TIED_TOLERANCE = 1e-6  # a tied parameter's gradient is a sum in another order


@dataclass
class Case:
    """One model and how it is run; everything a number or a word, so that it can be printed."""

    seed: int
    layers: list[Spec]
    dims: Dims
    tokens: bool = False
    rows: int = 6
    num_microbatch: int = 2
    devices: int = 2
    checked: bool = False
    grain: str = "stage"
    cuts_forward: list[int] = field(default_factory=list)
    cuts_backward: list[int] = field(default_factory=list)
    calls: list[str] = field(default_factory=lambda: ["fused"])
    whole_state: bool = False  # the first layer gets every entry of the state, some by keyword
    input_grad: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.layers) + self.tokens


@dataclass
class Outcome:
    """What a run leaves behind: named tensors, in order."""

    tensors: dict[str, torch.Tensor | None] = field(default_factory=dict)
    error: str | None = None

    def add(self, name: str, tree: Any) -> None:
        leaves, _ = torch.utils._pytree.tree_flatten(tree)
        for number, leaf in enumerate(leaves):
            known = isinstance(leaf, torch.Tensor)
            value = leaf.detach().clone() if known else torch.tensor(-1 if leaf is None else leaf)
            self.tensors[f"{name}[{number}]"] = value


# --- making cases ---------------------------------------------------------------------------------


ANY_RANK: list[tuple[str, list[str]]] = [
    ("linear", []), ("linear", []), ("residual", []), ("weight norm", []), ("spectral norm", []),
    ("layer norm", []), ("rms norm", []), ("dropout", []), ("tanh", []), ("gelu", []),
    ("checkpoint", []), ("scale", []), ("scale", []), ("flatten", []),
    ("in place", ["relu_", "mul_", "view", "no grad", "clone"]),
    ("running", ["in place", "rebound", "growing"]),
    ("peculiar", ["function", "grad inside", "hook", "detach", "constant", "unused"]),
    ("extra", ["make", "make detached", "alias", "parameter", "empty"]),
    ("extra", ["use", "mask", "ids"]),
]  # fmt: skip
BY_RANK: dict[int, list[tuple[str, list[str]]]] = {
    1: [("batch norm", []), ("batch norm", []), ("fold", [])],
    2: [(kind, []) for kind in ("attention", "multi head", "lstm", "gru", "conv1d", "transpose",
                                "mean")],
    3: [(kind, []) for kind in ("conv2d", "conv2d", "batch norm 2d", "group norm", "max pool")],
}  # fmt: skip


def _draw_layer(choose: random.Random, rank: int, first: bool) -> Spec:
    choices = ANY_RANK + BY_RANK[rank] * 2
    kind, ways = choose.choice(choices)
    while first and kind in ("in place", "peculiar"):
        # The caller's own tensor must not be overwritten by the plain loop.
        kind, ways = choose.choice(choices)
    spec: Spec = {"kind": kind, "form": choose.choice(zoo.FORMS)}
    if ways:
        spec["way"] = choose.choice(ways)
    if kind in ("linear", "weight norm", "spectral norm", "conv1d", "conv2d"):
        spec["out"] = choose.choice([2, 4, 6])
    if kind == "scale":
        spec["weight"] = choose.randrange(2)
    if kind == "checkpoint":
        spec["reentrant"] = choose.random() < 0.3
    if choose.random() < 0.15:
        spec["frozen"] = True
    return spec


def draw_case(seed: int) -> Case:
    """The case with this number."""
    choose = random.Random(seed)
    tokens = choose.random() < 0.2
    dims: Dims = (3,) if tokens else choose.choice([(4,), (4,), (3, 4), (2, 4, 4)])
    case = Case(seed, [], dims, tokens, rows=choose.randint(4, 9))
    shape = (*dims, 4) if tokens else dims
    wanted = choose.randint(2, 8)
    while len(case.layers) < wanted:
        spec = _draw_layer(choose, len(shape), first=not case.layers and not tokens)
        try:
            _, shape = zoo.build_layer(spec, shape, {})
        except UnbuildableError:
            continue
        case.layers.append(spec)
    case.num_microbatch = choose.randint(1, 4)
    case.devices = choose.randint(1, 3)
    case.checked = choose.random() < 0.1
    case.grain = choose.choice(["stage", "layer"])
    inner = range(1, case.num_layers)
    case.cuts_forward = [i for i in inner if choose.random() < 0.5]
    case.cuts_backward = [i for i in inner if choose.random() < 0.5]
    kinds = ["fused", "driven", "eval", "no grad"]
    case.calls = [choose.choice(kinds[:2]), *choose.choices(kinds, k=choose.randint(0, 2))]
    case.whole_state = choose.random() < 0.5
    case.input_grad = not tokens and choose.random() < 0.5
    return case


def _ranges(cuts: list[int], begin: int, end: int) -> list[range]:
    edges = [begin, *(c for c in cuts if begin < c < end), end]
    return [range(a, b) for a, b in itertools.pairwise(edges) if b > a]


def plan_of(case: Case, kind: str) -> ModelExecutePlan:
    """The case's plan, for a call of one kind."""
    layers = case.num_layers
    if kind != "fused":
        return ModelExecutePlan(
            _ranges(case.cuts_forward, 0, layers), _ranges(case.cuts_backward, 0, layers)[::-1]
        )
    backward = _ranges(case.cuts_backward, 0, layers)[::-1]
    return ModelExecutePlan(_ranges(case.cuts_forward, 0, backward[0].start), backward)


# --- running them ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Inputs:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    label: torch.Tensor


def _inputs(case: Case, number: int) -> _Inputs:
    torch.manual_seed(1000 * case.seed + number)
    shape = (case.rows, *case.dims)
    x = torch.randint(0, zoo.VOCABULARY, shape) if case.tokens else torch.randn(shape)
    label = torch.randn(case.rows)
    if case.input_grad:
        x.requires_grad_()
    if not case.whole_state:
        return _Inputs((x,), {}, label)
    mask = torch.rand(case.rows) > 0.5
    ids = torch.randint(0, zoo.VOCABULARY, (case.rows,))
    return _Inputs((x, mask), {"ids": ids, "extra": None, "note": 2}, label)


def _piece(tree: Any, microbatch: int, count: int) -> Any:
    return torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda t: t.tensor_split(count)[microbatch], tree
    )


def _finish(outcome: Outcome, model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        outcome.tensors[f"gradient of {name}"] = parameter.grad
    for name, buffer in model.named_buffers():
        outcome.tensors[f"buffer {name}"] = buffer.clone()


def run_plain(case: Case, threads: int) -> Outcome:
    """The plain loop, with the random numbers that roundpipe's layers draw."""
    outcome = Outcome()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = zoo.build_model(case.layers, case.dims, case.tokens, case.seed)
        for number, kind in enumerate(case.calls):
            _plain_call(case, model, number, kind, outcome)
        _finish(outcome, model)
    except (RuntimeError, ValueError) as error:
        outcome.error = str(error)
    finally:
        torch.set_num_threads(before)
    return outcome


def _plain_call(case: Case, model: nn.Sequential, number: int, kind: str, outcome: Outcome) -> None:
    inputs = _inputs(case, number)
    model.train(kind != "eval")
    call_seed = draw_call_seed()
    losses: list[torch.Tensor] = []
    outputs: list[Any] = []
    with torch.set_grad_enabled(kind in ("fused", "driven")):
        for microbatch in range(case.num_microbatch):
            args, kwargs, label = _piece(
                (inputs.args, inputs.kwargs, inputs.label), microbatch, case.num_microbatch
            )
            for index, layer in enumerate(model):
                torch.manual_seed(layer_seed(call_seed, microbatch, index))
                state = layer(*args, **kwargs)
                args, kwargs = (state,), {}
            outputs.append(state)
            losses.append(zoo.loss_fn(state, label))
            if kind == "fused":
                losses[-1].backward()
        if kind == "driven":
            for loss in losses:
                loss.backward()
    _note(outcome, number, losses, outputs, inputs)


def _note(
    outcome: Outcome, number: int, losses: list[torch.Tensor], outputs: list[Any], inputs: _Inputs
) -> None:
    total = losses[0].detach()
    for loss in losses[1:]:
        total = total + loss.detach()
    outcome.add(f"loss of call {number}", total)
    for microbatch, output in enumerate(outputs):
        outcome.add(f"output of call {number}, microbatch {microbatch}", output)
    outcome.add(f"input gradient of call {number}", inputs.args[0].grad)


def run_roundpipe(case: Case, pool: DevicePool) -> Outcome:
    """The same through roundpipe."""
    outcome = Outcome()
    model = zoo.build_model(case.layers, case.dims, case.tokens, case.seed)
    with RoundPipe(model, devices=pool, name="fuzz") as pipe:
        try:
            for number, kind in enumerate(case.calls):
                _roundpipe_call(case, pipe, number, kind, outcome)
            pipe.synchronize()
        except (RuntimeError, ValueError) as error:
            outcome.error = str(error)
        _finish(outcome, model)
    return outcome


def _roundpipe_call(case: Case, pipe: RoundPipe, number: int, kind: str, outcome: Outcome) -> None:
    inputs = _inputs(case, number)
    pipe.train(kind != "eval")
    config = RoundPipeRunConfig(
        num_microbatch=case.num_microbatch, recompute_grain=case.grain,
        execute_plan=plan_of(case, kind), merge_output=list,
    )  # fmt: skip
    if kind == "fused":
        loss, outputs = pipe.forward_backward(
            inputs.args, inputs.kwargs, inputs.label, zoo.loss_fn, return_outputs=True,
            run_config=config,
        )  # fmt: skip
        _note(outcome, number, [loss], outputs, inputs)
        return
    with torch.set_grad_enabled(kind == "driven"):
        outputs = pipe(*inputs.args, **inputs.kwargs, roundpipe_run_config=config)
        labels = inputs.label.tensor_split(case.num_microbatch)
        losses = [zoo.loss_fn(output, label) for output, label in zip(outputs, labels, strict=True)]
        if kind == "driven":
            total = losses[0]
            for loss in losses[1:]:
                total = total + loss
            total.backward()
    _note(outcome, number, losses, outputs, inputs)


# --- comparing ------------------------------------------------------------------------------------


class Pools:
    """The devices of many cases; opened once each."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._pools: dict[tuple[int, bool], DevicePool] = {}

    def __enter__(self) -> Pools:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stack.close()

    def get(self, devices: int, checked: bool) -> DevicePool:
        key = (devices, checked)
        if key not in self._pools:
            pool: DevicePool
            if checked:
                pool = open_cpu_pool(devices, CpuChecks(delay_seed=0, max_delay_s=0.0005))
            else:
                pool = open_cpu_pool(devices)
            self._pools[key] = self._stack.enter_context(pool)
        return self._pools[key]


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """What roundpipe logs meanwhile."""
    messages: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, handler = logging.getLogger("roundpipe"), Collect(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def _tied_names(case: Case) -> set[str]:
    model = zoo.build_model(case.layers, case.dims, case.tokens, case.seed)
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {f"gradient of {group[0]}" for group in names.values() if len(group) > 1}


def _same(mine: torch.Tensor | None, theirs: torch.Tensor | None, tolerance: float) -> bool:
    if mine is None or theirs is None:
        return mine is theirs
    if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
        return False
    if tolerance == 0.0:
        return torch.equal(mine.nan_to_num(), theirs.nan_to_num())
    scale = float(theirs.abs().max()) if theirs.numel() else 1.0
    return bool(((mine - theirs).abs() <= tolerance * scale).all())


def difference(case: Case, pools: Pools) -> str | None:
    """What differs first between roundpipe and the plain loop; None if nothing does."""
    pool = pools.get(case.devices, case.checked)
    device = pool.devices[0]
    threads = device.intraop_threads if isinstance(device, CpuDevice) else 1
    with warnings.catch_warnings(), logged() as complaints:
        # A plain loop over a layer that takes a gradient inside warns, too.
        warnings.filterwarnings("ignore", message=".*None of the inputs have requires_grad.*")
        want, got = run_plain(case, threads), run_roundpipe(case, pool)
    if want.error is not None:
        return None  # where graphs end between layers, what autograd forbids may work
    if got.error is not None:
        return f"roundpipe: {got.error}"
    tied = _tied_names(case)
    for name, theirs in want.tensors.items():
        mine = got.tensors.get(name)
        if not _same(mine, theirs, TIED_TOLERANCE if name in tied else 0.0):
            return f"{name}: {mine} instead of {theirs}"
    if complaints:
        return f"logged: {complaints[0]}"
    reports = pool.reports() if isinstance(pool, CheckedPool) else []
    return "\n".join(reports) or None


# --- shrinking ------------------------------------------------------------------------------------


def _without_layer(case: Case, index: int) -> Case:
    place = index + case.tokens
    cuts = [
        sorted({c - (c > place) for c in cuts} - {0})
        for cuts in (case.cuts_forward, case.cuts_backward)
    ]
    layers = [spec for i, spec in enumerate(case.layers) if i != index]
    return dataclasses.replace(case, layers=layers, cuts_forward=cuts[0], cuts_backward=cuts[1])


def _smaller(case: Case) -> Iterator[Case]:
    change = dataclasses.replace
    for index in reversed(range(len(case.layers))):
        if len(case.layers) > 1:
            yield _without_layer(case, index)
    for index in range(len(case.calls)):
        if len(case.calls) > 1:
            yield change(case, calls=case.calls[:index] + case.calls[index + 1 :])
    for kind in ("forward", "backward"):
        cuts = getattr(case, f"cuts_{kind}")
        for cut in cuts:
            yield change(case, **{f"cuts_{kind}": [c for c in cuts if c != cut]})
    simple = {"devices": 1, "num_microbatch": 1, "checked": False, "grain": "stage",
              "whole_state": False, "input_grad": False, "rows": 4}  # fmt: skip
    for name, value in simple.items():
        if getattr(case, name) != value:
            yield change(case, **{name: value})
    for index, spec in enumerate(case.layers):
        for key, value in (("form", "tensor"), ("frozen", None)):
            if key in spec and spec[key] != value:
                layers = copy.deepcopy(case.layers)
                layers[index][key] = value
                yield change(case, layers=layers)


def shrink(case: Case, fails: Callable[[Case], bool]) -> Case:
    """The smallest case near ``case`` that still fails."""
    progress = True
    while progress:
        progress = False
        for candidate in _smaller(case):
            try:
                failed = fails(candidate)
            except UnbuildableError:
                continue
            if failed:
                case, progress = candidate, True
                break
    return case


def script(case: Case, what: str) -> str:
    """A program that needs torch and roundpipe only and shows the difference."""
    own = inspect.getsource(inspect.getmodule(script) or zoo)
    running = own[own.index("TIED_TOLERANCE =") : own.index("# --- making cases")]
    rest = own[own.index("def _ranges(") : own.index("# --- shrinking")].replace("zoo.", "")
    imports = own[own.index("import contextlib") : own.index("from . import zoo")]
    layers = inspect.getsource(zoo).replace("from __future__ import annotations\n", "")
    literal = f"Case(**{pprint.pformat(dataclasses.asdict(case), sort_dicts=False)})"
    return (
        f'"""Differs from plain PyTorch: {what}"""\n\nfrom __future__ import annotations\n\n'
        f"{imports}\n{layers}\n{running}\n{rest}\nCASE = {literal}\n\n"
        'if __name__ == "__main__":\n    with Pools() as pools:\n'
        "        print(difference(CASE, pools) or 'equal')\n"
    )
