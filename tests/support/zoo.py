"""Layers of many kinds, for models put together at random. Needs nothing but torch.

Every layer takes and hands on a :class:`State` in one of several forms; ``build_layer`` makes one
from its description and says what shape it leaves.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

Dims = tuple[int, ...]  # shape of ``State.h`` without its rows
Spec = dict[str, Any]
Operation = Callable[["State"], torch.Tensor]

VOCABULARY = 7


class UnbuildableError(Exception):
    """A layer that does not fit behind the one before it."""


@dataclasses.dataclass
class State:
    """What travels between the layers."""

    h: torch.Tensor
    mask: torch.Tensor  # (rows,) bool
    ids: torch.Tensor  # (rows,) int64
    extra: torch.Tensor | None
    note: int


class Named(NamedTuple):
    h: torch.Tensor
    mask: torch.Tensor
    ids: torch.Tensor
    extra: torch.Tensor | None
    note: int


FORMS = ("tensor", "tuple", "list", "dict", "ordered", "named", "dataclass")


def read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> State:
    """The state in what a layer was called with."""
    if kwargs or len(args) > 1:
        return State(*args, **kwargs)
    (given,) = args
    if isinstance(given, torch.Tensor):
        rows = given.detach().flatten(1).float().sum(1)
        ids = torch.arange(len(given)) % VOCABULARY
        return State(given, rows > 0, ids, None, 3)
    if isinstance(given, State):
        return dataclasses.replace(given)
    return State(**given) if isinstance(given, dict) else State(*given)


def write(state: State, form: str) -> Any:
    """The state in the form in which a layer hands it on."""
    fields = {f.name: getattr(state, f.name) for f in dataclasses.fields(State)}
    if form == "tensor":
        return state.h
    if form == "dict":
        return fields
    if form == "ordered":
        return OrderedDict(fields)
    if form == "named":
        return Named(**fields)
    if form == "dataclass":
        return state
    return tuple(fields.values()) if form == "tuple" else list(fields.values())


class Layer(nn.Module):
    """One operation on ``State.h``, between two forms of the state."""

    def __init__(self, operation: Any, form: str) -> None:
        super().__init__()
        self.operation = operation
        self.form = form

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = read(args, kwargs)
        h = self.operation(state)
        return write(dataclasses.replace(state, h=h), self.form)


class OnH(nn.Module):
    """An ordinary module."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, state: State) -> Any:
        return self.module(state.h)


class Residual(OnH):
    def forward(self, state: State) -> Any:
        return state.h + self.module(state.h)


class InPlace(nn.Module):
    """Overwrites what it was given."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, state: State) -> torch.Tensor:
        h = state.h
        if self.way == "relu_":
            return F.relu_(h)
        if self.way == "mul_":
            return h.mul_(0.5)
        if self.way == "view":
            h[..., :1].mul_(2.0)
            return h
        if self.way == "no grad":
            with torch.no_grad():
                h.clamp_(-2.0, 2.0)
            return h
        y = h.clone()
        y.add_(0.1)
        return y * y


class Scale(nn.Module):
    """Multiplies by a weight that several layers may share."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, state: State) -> torch.Tensor:
        return state.h * self.weight


class Running(nn.Module):
    """Buffers of three kinds that every forward moves and that change what comes out."""

    average: torch.Tensor
    count: torch.Tensor
    seen: torch.Tensor
    late: torch.Tensor | None

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.register_buffer("average", torch.zeros(()))
        self.register_buffer("count", torch.zeros((), dtype=torch.long), persistent=False)
        self.register_buffer("seen", torch.zeros(0))
        self.register_buffer("late", None)

    def forward(self, state: State) -> torch.Tensor:
        mean = state.h.detach().float().mean()
        if self.way == "in place":
            self.average.mul_(0.9).add_(mean, alpha=0.1)
            self.count += 1
        elif self.way == "rebound":
            self.average = 0.9 * self.average + 0.1 * mean
            self.count = self.count + 1
        else:
            self.seen = torch.cat([self.seen, mean[None]])
            self.late = mean if self.late is None else self.late + mean
            return state.h + 0.01 * self.seen.sum() + 0.01 * self.late
        return state.h + self.average * 0.1 * self.count


class _Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 1.5

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        result: torch.Tensor = grad * 1.5 + 0.0 * x
        return result


class Peculiar(nn.Module):
    """What layers do to autograd."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.weight = nn.Parameter(torch.tensor(0.9))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, state: State) -> torch.Tensor:
        h = state.h
        if self.way == "function":
            tripled: torch.Tensor = _Triple.apply(h * self.weight)
            return tripled
        if self.way == "grad inside":
            with torch.enable_grad():
                x = h if h.requires_grad else h.detach().requires_grad_()
                energy = torch.tanh(self.weight * x).sum()
                (slope,) = torch.autograd.grad(energy, x, create_graph=True)
            sloped: torch.Tensor = h + (slope if torch.is_grad_enabled() else slope.detach())
            return sloped
        if self.way == "hook":
            y = h * self.weight
            if y.requires_grad:
                y.register_hook(lambda grad: grad * 0.5)
            return y
        if self.way == "detach":
            return h.detach() * self.weight
        if self.way == "constant":
            return torch.ones_like(h) * self.weight
        return h


class Checkpointed(nn.Module):
    """Recomputes inside the recompute, with dropout."""

    def __init__(self, module: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.module = module
        self.reentrant = reentrant

    def forward(self, state: State) -> Any:
        if self.reentrant and not (torch.is_grad_enabled() and state.h.requires_grad):
            return self.module(state.h)
        return checkpoint(self.module, state.h, use_reentrant=self.reentrant)


class Extra(nn.Module):
    """Makes, uses and passes the other entries of the state."""

    def __init__(self, way: str, features: int) -> None:
        super().__init__()
        self.way = way
        if way == "parameter":
            self.weight = nn.Parameter(torch.full((1,), 0.3))
        elif way == "ids":
            self.embedding = nn.Embedding(VOCABULARY, features)

    def forward(self, state: State) -> torch.Tensor:
        h = state.h
        rows = (-1, *(1,) * (h.dim() - 1))
        if self.way == "make":
            state.extra = h.flatten(1)[:, :1] * 0.5
        elif self.way == "make detached":
            state.extra = h.detach().flatten(1)[:, :1] + 1.0
        elif self.way == "alias":
            state.extra = h
        elif self.way == "parameter":
            state.extra = self.weight
        elif self.way == "empty":
            state.extra = h.new_zeros(0)
        elif self.way == "use" and state.extra is not None and state.extra.numel():
            extra = state.extra
            h = h + (extra.flatten(1).mean(1).view(rows) if extra.dim() > 1 else extra.mean())
        elif self.way == "mask":
            h = h * state.mask.view(rows)
            state.mask = ~state.mask
        elif self.way == "ids":
            h = h + self.embedding(state.ids).view(len(h), *(1,) * (h.dim() - 2), -1)
            state.ids = (state.ids + 1) % VOCABULARY
            state.note += 1
        return h


class Attention(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(features, 3 * features)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(h).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class MultiHead(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(features, 1, batch_first=True)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        out, _ = self.attention(h, h, h, need_weights=False)
        return torch.as_tensor(out)


class Recurrent(nn.Module):
    def __init__(self, features: int, lstm: bool) -> None:
        super().__init__()
        kind = nn.LSTM if lstm else nn.GRU
        self.cell = kind(features, features, batch_first=True)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.cell(h)[0])


class Shape(nn.Module):
    def __init__(self, way: str, dims: Dims) -> None:
        super().__init__()
        self.way = way
        self.dims = dims

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        if self.way == "transpose":
            return h.transpose(1, 2)
        if self.way == "mean":
            return h.mean(1)
        return h.reshape(len(h), *self.dims)


def _plain(kind: str, dims: Dims, spec: Spec) -> tuple[Any, Dims] | None:
    """Modules that work on the last dimension, whatever is in front of it."""
    last = dims[-1]
    out = int(spec.get("out", 4))
    modules: dict[str, Callable[[], tuple[Any, Dims]]] = {
        "linear": lambda: (OnH(nn.Linear(last, out)), (*dims[:-1], out)),
        "weight norm": lambda: (
            OnH(parametrizations.weight_norm(nn.Linear(last, out))), (*dims[:-1], out),
        ),
        "spectral norm": lambda: (
            OnH(parametrizations.spectral_norm(nn.Linear(last, out))), (*dims[:-1], out),
        ),
        "residual": lambda: (Residual(nn.Linear(last, last)), dims),
        "layer norm": lambda: (OnH(nn.LayerNorm(last)), dims),
        "rms norm": lambda: (OnH(nn.RMSNorm(last)), dims),
        "dropout": lambda: (OnH(nn.Dropout(0.3)), dims),
        "tanh": lambda: (OnH(nn.Tanh()), dims),
        "gelu": lambda: (OnH(nn.GELU()), dims),
        "checkpoint": lambda: (
            Checkpointed(
                nn.Sequential(nn.Linear(last, last), nn.Dropout(0.4)), bool(spec.get("reentrant"))
            ), dims,
        ),
    }  # fmt: skip
    return modules[kind]() if kind in modules else None


def _shaped(kind: str, dims: Dims, spec: Spec) -> tuple[Any, Dims] | None:
    """Modules that need a certain number of dimensions."""
    rank = len(dims)
    size = 1
    for number in dims:
        size *= number
    out = int(spec.get("out", 4))
    made: tuple[int, Callable[[], tuple[Any, Dims]]] | None = {
        "batch norm": (1, lambda: (nn.BatchNorm1d(dims[0]), dims)),
        "fold": (1, lambda: (Shape("reshape", (2, size // 2)), (2, size // 2))),
        "attention": (2, lambda: (Attention(dims[1]), dims)),
        "multi head": (2, lambda: (MultiHead(dims[1]), dims)),
        "lstm": (2, lambda: (Recurrent(dims[1], True), dims)),
        "gru": (2, lambda: (Recurrent(dims[1], False), dims)),
        "conv1d": (2, lambda: (nn.Conv1d(dims[0], out, 3, padding=1), (out, dims[1]))),
        "transpose": (2, lambda: (Shape("transpose", ()), (dims[1], dims[0]))),
        "mean": (2, lambda: (Shape("mean", ()), (dims[1],))),
        "conv2d": (3, lambda: (nn.Conv2d(dims[0], out, 3, padding=1), (out, *dims[1:]))),
        "batch norm 2d": (3, lambda: (nn.BatchNorm2d(dims[0]), dims)),
        "group norm": (3, lambda: (nn.GroupNorm(1, dims[0]), dims)),
        "max pool": (
            3,
            lambda: (
                nn.MaxPool2d(2, ceil_mode=True), (dims[0], *((d + 1) // 2 for d in dims[1:])),
            ),
        ),
        "flatten": (rank, lambda: (Shape("reshape", (size,)), (size,))),
    }.get(kind)  # fmt: skip
    if made is None:
        return None
    wanted, make = made
    if rank != wanted or (kind == "fold" and size % 2):
        raise UnbuildableError(f"{kind} behind {dims}")
    module, after = make()
    return OnH(module), after


def build_layer(spec: Spec, dims: Dims, shared: dict[int, nn.Parameter]) -> tuple[Layer, Dims]:
    """The layer that ``spec`` describes, behind one that leaves rows of shape ``dims``.

    Args:
        spec: ``kind``, ``form``, and what the kind needs.
        dims: see above.
        shared: the weights that "scale" layers share, by number.

    Returns:
        The layer and the shape of its rows.

    Raises:
        UnbuildableError: it does not fit.
    """
    kind, way = str(spec["kind"]), str(spec.get("way", ""))
    made = _plain(kind, dims, spec) or _shaped(kind, dims, spec)
    if made is None:
        operation: nn.Module
        if kind == "scale":
            number = int(spec["weight"])
            operation = Scale(shared.setdefault(number, nn.Parameter(torch.tensor(0.7 + number))))
        elif kind == "extra":
            operation = Extra(way, dims[-1])
        else:
            operation = {"in place": InPlace, "running": Running, "peculiar": Peculiar}[kind](way)
        made = operation, dims
    layer = Layer(made[0], str(spec["form"]))
    if spec.get("frozen"):
        layer.requires_grad_(False)
    return layer, made[1]


class Tokens(nn.Module):
    """An embedding of the first argument."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, features)

    def forward(self, state: State) -> Any:
        return self.embedding(state.h)


def build_model(layers: list[Spec], dims: Dims, tokens: bool, seed: int) -> nn.Sequential:
    """A model of these layers, behind an embedding if its input is tokens.

    Raises:
        UnbuildableError: the layers do not fit together.
    """
    torch.manual_seed(seed)
    shared: dict[int, nn.Parameter] = {}
    built: list[nn.Module] = []
    if tokens:
        built.append(Layer(Tokens(4), "dict"))
        dims = (*dims, 4)
    for spec in layers:
        layer, dims = build_layer(spec, dims, shared)
        built.append(layer)
    return nn.Sequential(*built)


def loss_fn(output: Any, label: torch.Tensor) -> torch.Tensor:
    """Depends on everything floating-point in the output."""
    state = read((output,), {})
    error = state.h.flatten(1).mean(1) - label
    loss = (error * error).sum()
    if state.extra is not None and state.extra is not state.h and state.extra.numel():
        loss = loss + 0.1 * state.extra.sum()
    return loss
