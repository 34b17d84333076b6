"""One test for each private or version-dependent torch name."""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _python_dispatch, _pytree

from roundpipe import compat


def test_pytree_registry_is_live_and_knows_how_to_flatten() -> None:
    class Box:
        def __init__(self, inner: int) -> None:
            self.inner = inner

    registry = compat.pytree_registry()
    assert Box not in registry
    _pytree.register_pytree_node(Box, lambda b: ([b.inner], "c"), lambda v, _: Box(next(iter(v))))
    children, context = registry[Box].flatten_fn(Box(3))
    assert list(children) == [3]
    assert registry[Box].unflatten_fn([4], context).inner == 4


def test_spec_classes_are_torchs_own() -> None:
    classes = compat.spec_classes(load=True)
    assert classes is not None
    assert classes == compat.spec_classes()
    assert classes.chunk(2).split_dim == 2
    assert classes.replicate.__name__ == "_Replicate"
    reducer = classes.reducer(1, max)
    assert (reducer.init_value, reducer.reduce_fn) == (1, max)


def test_spec_classes_need_no_import_to_say_that_there_are_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "torch.distributed.pipelining.microbatch", raising=False)
    assert compat.spec_classes() is None


def test_watch_sees_forward_and_backward_operators_of_the_entering_thread() -> None:
    seen: list[str] = []

    def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen.append(str(operator))
        return operator(*args, **kwargs)

    weight = torch.ones(2, 2, requires_grad=True)
    with compat.watch_operators(run):
        (weight @ weight).sum().backward()
    assert seen.count("aten.mm.default") == 3  # one in the forward, two in the backward
    after = len(seen)
    _ = weight * 2
    assert len(seen) == after


def test_threads_that_watch_at_the_same_time_leave_no_flag_behind() -> None:
    def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return operator(*args, **kwargs)

    first, second = compat.watch_operators(run), compat.watch_operators(run)
    before = _python_dispatch.is_in_torch_dispatch_mode()
    first.__enter__()

    def enter_second() -> None:
        with second:
            entered.set()
            left.wait()

    entered, left = threading.Event(), threading.Event()
    thread = threading.Thread(target=enter_second)
    thread.start()
    entered.wait()
    first.__exit__(None, None, None)
    left.set()
    thread.join()
    assert _python_dispatch.is_in_torch_dispatch_mode() is before


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_what_compiles_itself_works_while_watched() -> None:
    seen: set[str] = set()

    def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen.add(str(operator))
        return operator(*args, **kwargs)

    query = torch.randn(1, 1, 16, 8)
    want = flex_attention(query, query, query)
    with compat.watch_operators(run):
        got = flex_attention(query, query, query)
        compiled = torch.compile(torch.nn.Linear(2, 2), backend="eager")
        compiled(torch.ones(1, 2)).sum().backward()
    assert torch.equal(got, want)
    assert seen


def test_operator_traits_tell_views_and_writes() -> None:
    aten = torch.ops.aten
    assert compat.operator_traits(aten.view.default) == (True, frozenset())
    assert compat.operator_traits(aten.add.Tensor) == (False, frozenset())
    assert compat.operator_traits(aten.add_.Tensor) == (False, frozenset({0}))
    assert compat.operator_traits(aten._foreach_add_.List) == (False, frozenset({0}))
    assert compat.operator_traits(aten.add.out) == (False, frozenset({"out"}))
    assert compat.operator_traits(object()) == (False, frozenset())


def test_total_memory_is_asked_of_whoever_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda d: (1, 2), raising=False)
    assert compat.total_memory_bytes(device) == 2
    monkeypatch.delattr(torch.accelerator, "get_memory_info")
    assert compat.total_memory_bytes(device) is None
    monkeypatch.setattr(torch.cpu, "mem_get_info", lambda d: (3, 4), raising=False)
    assert compat.total_memory_bytes(device) == 4


def test_backward_tells_whether_its_graph_is_kept() -> None:
    told: list[bool] = []

    class Ask(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            told.append(compat.backward_keeps_graph())
            return grad

    out = Ask.apply(torch.ones(1, requires_grad=True))
    out.backward(retain_graph=True)
    out.backward()
    assert told == [True, False]


def test_a_compiled_module_is_looked_into_and_made_again_with_its_options() -> None:
    graphs: list[int] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(1)
        return graph.forward

    plain, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    compiled: Any = torch.compile(plain, backend=backend)
    assert compat.compiled_module_of(plain) is None
    assert compat.compiled_module_of(compiled) is plain
    again = compat.recompile_like(compiled, other)
    assert compat.compiled_module_of(again) is other
    x = torch.ones(1, 2)
    assert torch.equal(again(x), other(x))
    assert graphs == [1]  # the same backend compiled it
    torch.compiler.reset()


def test_without_the_compiler_no_module_is_a_compiled_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo.eval_frame", raising=False)
    assert compat.compiled_module_of(torch.nn.Linear(1, 1)) is None


def test_a_gradient_may_have_another_dtype_than_its_leaf() -> None:
    assert compat.grad_dtype_is_settable() == hasattr(torch.Tensor, "grad_dtype")
    leaf = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    leaf.grad_dtype = torch.float32
    leaf.grad = torch.ones(1)
    (leaf * 2).sum().backward()
    assert leaf.grad.dtype is torch.float32


@pytest.mark.parametrize(("answer", "is_locked"), [(0, True), (1, False)])
def test_page_locking_asks_the_devices_runtime(
    answer: int, is_locked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []

    class Runtime:
        def cudaHostRegister(self, address: int, nbytes: int, _flags: int) -> int:  # noqa: N802
            asked.append((address, nbytes))
            return answer

    class WithRuntime:
        cudart = staticmethod(Runtime)

    monkeypatch.setattr(torch, "get_device_module", lambda _device: WithRuntime)
    tensor = torch.ones(3)
    assert compat.host_register(tensor, torch.device("cpu")) is is_locked
    assert asked == [(tensor.data_ptr(), 12)]
    assert compat.host_register(torch.ones(0), torch.device("cpu"))
    monkeypatch.setattr(torch, "get_device_module", lambda _device: object())
    assert not compat.host_register(tensor, torch.device("cpu"))


def test_graphs_of_the_compiler_are_counted_and_a_compiled_call_follows_a_replica() -> None:
    def backend(graph: Any, _inputs: Any) -> Any:
        return graph.forward

    class Double(torch.nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor(factor))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    original, replica = Double(2.0), Double(3.0)
    assert not compat.is_compiled(original)
    compat.compile_call_like(original, replica)
    assert not compat.is_compiled(replica)
    original.compile(backend=backend)
    replica.__dict__["_compiled_call_impl"] = original.__dict__["_compiled_call_impl"]
    compat.compile_call_like(original, replica)
    assert compat.is_compiled(original)
    assert compat.is_compiled(replica)
    before = compat.compiled_graphs()
    assert replica(torch.ones(2)).tolist() == [3.0, 3.0]
    assert compat.compiled_graphs() == before + 1
    torch._dynamo.reset()


def test_operators_that_draw_are_seen_in_backward_too() -> None:
    class Noise(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad + torch.rand_like(grad)

    x = torch.ones(1, requires_grad=True)
    with compat.watch_random_operators() as drawn:
        y: torch.Tensor = Noise.apply(x)
        assert drawn == []
        y.backward()
    assert len(drawn) == 1
    assert "rand_like" in drawn[0]


def test_a_gradient_may_have_any_dtype_once_it_was_allowed() -> None:
    weight = nn.Parameter(torch.ones(2))
    assert not compat.allows_any_grad_dtype(weight)
    compat.allow_any_grad_dtype(weight)
    if compat.grad_dtype_is_settable():
        assert compat.allows_any_grad_dtype(weight)
        weight.grad = torch.ones(2, dtype=torch.bfloat16)
        weight.grad = torch.ones(2)


def test_who_else_uses_a_tensors_memory() -> None:
    tensor = torch.ones(3)
    assert not compat.storage_is_shared(tensor)
    same = tensor
    assert not compat.storage_is_shared(same)
    weight = nn.Parameter(torch.ones(3))
    weight.grad = tensor.detach()
    assert compat.storage_is_shared(tensor)
    row = weight.grad[0]
    weight.grad = None
    assert compat.storage_is_shared(tensor)
    del row
    assert not compat.storage_is_shared(tensor)


def test_hooks_of_an_optimizer_and_of_all_optimizers() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    assert not compat.has_step_hooks(optimizer)
    with contextlib.ExitStack() as stack:
        handle = optimizer.register_step_post_hook(lambda *_: None)
        stack.callback(handle.remove)
        assert compat.has_step_hooks(optimizer)
    assert not compat.has_step_hooks(optimizer)
    with contextlib.ExitStack() as stack:
        handle = register_optimizer_step_pre_hook(lambda *_: None)
        stack.callback(handle.remove)
        assert compat.has_step_hooks(optimizer)


def test_hooks_of_a_leaf_can_be_seen_and_shared() -> None:
    one, other = (torch.ones(1, requires_grad=True) for _ in range(2))
    assert compat.hooks_of(one) is None
    compat.share_hooks(one, other)
    assert compat.hooks_of(other) is None
    one.register_hook(lambda grad: grad * 2)
    compat.share_hooks(one, other)
    (other * 3).backward()
    assert other.grad is not None
    assert other.grad.item() == 6.0
    assert not compat.has_post_accumulate_hooks(one)
    one.register_post_accumulate_grad_hook(lambda _: None)
    assert compat.has_post_accumulate_hooks(one)


def test_a_backward_tells_for_which_leaves_it_is() -> None:
    asked: list[tuple[bool, bool]] = []
    one, other = (torch.ones(1, requires_grad=True) for _ in range(2))

    class Ask(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            asked.append((compat.backward_reaches(one), compat.backward_reaches(other)))
            return grad, grad

    def result() -> torch.Tensor:
        summed: torch.Tensor = Ask.apply(one, other)
        return summed

    result().backward()
    result().backward(inputs=[one])
    torch.autograd.grad(result(), other)
    assert asked == [(True, True), (True, False), (False, True)]


def test_tensor_subclasses_are_taken_apart_and_plain_tensors_are_not() -> None:
    plain = torch.ones(2)
    assert compat.flatten_subclass(plain) is None
    assert compat.flatten_subclass(torch.nn.Parameter(plain)) is None
    assert compat.storage_addresses(plain) == {plain.untyped_storage().data_ptr()}
    assert compat.storage_addresses(plain.to_sparse()) == set()
