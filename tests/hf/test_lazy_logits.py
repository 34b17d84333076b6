"""Logits that are computed only when needed, and losses taken without them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.loss.loss_utils import ForCausalLMLoss

from roundpipe.errors import StateError
from roundpipe.hf.chunked_loss import ChunkedLoss, chunked_cross_entropy, rows_per_chunk
from roundpipe.hf.lazy_logits import LazyLogits, project_lazily
from roundpipe.microbatch.tree import flatten

VOCABULARY, FEATURES = 50, 8
Steps = tuple[Callable[[Tensor], Tensor], ...]


def capped(logits: Tensor) -> Tensor:
    return torch.tanh(logits / 3.0) * 3.0


def parts(dtype: torch.dtype = torch.float32, rows: tuple[int, ...] = (13,)) -> list[Tensor]:
    """Hidden state, weight and bias."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((*rows, FEATURES), (VOCABULARY, FEATURES), (VOCABULARY,))
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [tensor.requires_grad_() for tensor in made]


def targets(*rows: int) -> Tensor:
    target = torch.randint(0, VOCABULARY, rows, generator=torch.Generator().manual_seed(1))
    target[0] = -100
    return target


# --- the loss -------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_rows", [1, 5, 13, 99])
@pytest.mark.parametrize("steps", [(), (capped,), (lambda x: x.double(), lambda x: 0.1 * x)])
def test_in_chunks_and_at_once_are_equal(chunk_rows: int, steps: Steps) -> None:
    hidden, weight, bias = parts()
    target = targets(13)
    logits = F.linear(hidden, weight, bias)
    for step in steps:
        logits = step(logits)
    expected = F.cross_entropy(logits, target, reduction="sum")
    grads = torch.autograd.grad(expected * 0.3, (hidden, weight, bias))

    loss = chunked_cross_entropy(hidden, weight, bias, target, ChunkedLoss(steps, -100, chunk_rows))
    assert loss.dtype is expected.dtype
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for got, grad in zip(
        torch.autograd.grad(loss * 0.3, (hidden, weight, bias)), grads, strict=True
    ):
        torch.testing.assert_close(got, grad, rtol=1e-5, atol=1e-6)


def test_16_bit_weights_get_gradients_summed_in_32() -> None:
    hidden, weight, _ = parts(torch.bfloat16, (512,))
    target = targets(512)
    exact = F.cross_entropy(F.linear(hidden.double(), weight.double()), target, reduction="sum")
    (wanted,) = torch.autograd.grad(exact, weight)
    steps = (lambda x: x.float(),)
    loss = chunked_cross_entropy(hidden, weight, None, target, ChunkedLoss(steps, -100, 2))
    assert loss.dtype is torch.float32
    (got,) = torch.autograd.grad(loss, weight)
    assert got.dtype is torch.bfloat16
    full = F.cross_entropy(F.linear(hidden, weight).float(), target, reduction="sum")
    (reference,) = torch.autograd.grad(full, weight)
    error = (got.double() - wanted.double()).norm()
    assert error <= 1.5 * (reference.double() - wanted.double()).norm()
    torch.testing.assert_close(loss, full, rtol=1e-6, atol=0)


def test_under_autocast() -> None:
    hidden, weight, bias = parts()
    target = targets(13)
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.cross_entropy(F.linear(hidden, weight, bias), target, reduction="sum")
        loss = chunked_cross_entropy(hidden, weight, bias, target, ChunkedLoss((), -100, 4))
    assert loss.dtype is expected.dtype
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=0)
    grads = torch.autograd.grad(expected, (hidden, weight, bias))
    for got, grad in zip(torch.autograd.grad(loss, (hidden, weight, bias)), grads, strict=True):
        assert got.dtype is grad.dtype
        torch.testing.assert_close(got, grad, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("frozen", [(0,), (1,), (1, 2), (0, 1)])
def test_what_is_frozen_gets_no_gradient(frozen: tuple[int, ...]) -> None:
    tensors = parts()
    for index in frozen:
        tensors[index].requires_grad_(False)
    hidden, weight, bias = tensors
    loss = chunked_cross_entropy(hidden, weight, bias, targets(13), ChunkedLoss((), -100, 5))
    loss.backward()
    assert [t.grad is None for t in tensors] == [index in frozen for index in range(3)]


def test_without_gradients_none_are_formed() -> None:
    hidden, weight, bias = parts()
    with torch.no_grad():
        loss = chunked_cross_entropy(hidden, weight, bias, targets(13), ChunkedLoss((), -100, 5))
    assert not loss.requires_grad
    expected = F.cross_entropy(F.linear(hidden, weight, bias), targets(13), reduction="sum")
    torch.testing.assert_close(loss, expected.detach())


def test_a_second_backward_is_refused() -> None:
    hidden, weight, bias = parts()
    loss = chunked_cross_entropy(hidden, weight, bias, targets(13), ChunkedLoss((), -100, 5))
    loss.backward(retain_graph=True)
    with pytest.raises(StateError, match="ran a second time through a loss without logits"):
        loss.backward()


def test_rows_that_do_not_count_may_be_infinite() -> None:
    hidden, weight, _ = parts()
    with torch.no_grad():
        hidden[0] = torch.inf
    loss = chunked_cross_entropy(hidden, weight, None, targets(13), ChunkedLoss((), -100, 5))
    assert loss.isfinite()
    (grad,) = torch.autograd.grad(loss, hidden)
    assert grad.isfinite().all()


class PeakBytes(TorchDispatchMode):
    """The largest number of bytes that tensors made inside have at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in flatten(result)[0]:
            if isinstance(leaf, Tensor):
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        address, nbytes = storage.data_ptr(), storage.nbytes()
        if address in self._known:
            return
        self._known.add(address)
        self.now += nbytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, address, nbytes)

    def _drop(self, address: int, nbytes: int) -> None:
        self._known.discard(address)
        self.now -= nbytes


def test_memory_is_that_of_a_chunk() -> None:
    rows, vocabulary = 256, 8000
    full_bytes = 4 * rows * vocabulary
    hidden = torch.randn(rows, 4, requires_grad=True)
    weight = torch.randn(vocabulary, 4, requires_grad=True)
    target = torch.randint(0, vocabulary, (rows,))
    peaks = []
    for chunk_rows in (4, rows):
        with PeakBytes() as measured:
            loss = chunked_cross_entropy(
                hidden, weight, None, target, ChunkedLoss((capped,), -100, chunk_rows)
            )
            loss.backward()
        peaks.append(measured.peak)
    assert peaks[1] > 2 * full_bytes  # what would be seen if chunks were not dropped
    assert peaks[0] < 0.15 * full_bytes + 3 * 4 * weight.numel()
    assert rows_per_chunk(128_000, hidden.device) * 128_000 * 4 <= 32 * 2**20


# --- the stand-in ---------------------------------------------------------------------------------


def both(rows: tuple[int, ...] = (2, 6)) -> tuple[LazyLogits, Tensor]:
    """Lazy logits, and the same ones in full."""
    hidden, weight, bias = parts(rows=rows)
    return project_lazily(hidden, weight, bias), F.linear(hidden, weight, bias)


STAYS_LAZY: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda x: (x.shape, x.dtype, x.device, x.dim(), x.size(-1), len(x), x.ndim, x.numel()),
    "requires_grad": lambda x: x.requires_grad,
    "scaling": lambda x: 0.5 * (x / 2.0) + 1,
    "capping": lambda x: torch.tanh(x / 30.0) * 30.0,
    "casts": lambda x: x.float().to(torch.bfloat16).double(),
    "contiguous": lambda x: x.contiguous(),
    "view": lambda x: x.view(-1, VOCABULARY),
    "reshape": lambda x: x.reshape(3, 4, VOCABULARY),
    "flatten": lambda x: x.flatten(0, 1),
    "shift": lambda x: x[..., :-1, :].contiguous(),
    "last": lambda x: x[:, -1],
    "rows": lambda x: x[1, 2:4, :],
    "mask": lambda x: x[torch.tensor([[True] * 6, [False] * 6])],
    "numbers": lambda x: x[torch.tensor([1, 0, 1])],
}
COMPUTES: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda x: x.sum(),
    "argmax": lambda x: x.argmax(-1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "columns": lambda x: x[..., :7],
    "one column": lambda x: x[:, :, 3],
    "a mask of columns": lambda x: x[torch.ones(2, 6, VOCABULARY, dtype=torch.bool)],
    "transpose": lambda x: x.transpose(1, 2),
    "another width": lambda x: x.view(2, -1),
    "a tensor": lambda x: x + torch.arange(VOCABULARY),
    "two of them": lambda x: x + x,
    "detach": lambda x: x.detach(),
    "in place": lambda x: x.detach().clone().mul_(2),
    "list": lambda x: torch.cat([x, x]),
    "text": repr,
    "values": lambda x: x.tolist(),
    "smoothing": lambda x: F.cross_entropy(x[0], targets(6), label_smoothing=0.1),
    "class weights": lambda x: F.cross_entropy(x[0], targets(6), torch.ones(VOCABULARY)),
    "each row": lambda x: F.cross_entropy(x[0], targets(6), reduction="none"),
    "dimensions": lambda x: F.cross_entropy(x.transpose(1, 2), targets(2, 6)),
}


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[LazyLogits]:
    """The logits that were computed in full."""
    from roundpipe.hf import lazy_logits

    seen: list[LazyLogits] = []
    original = lazy_logits.computed

    def noting(lazy: LazyLogits) -> Tensor:
        seen.append(lazy)
        return original(lazy)

    monkeypatch.setattr(lazy_logits, "computed", noting)
    return seen


@pytest.mark.parametrize("name", STAYS_LAZY)
def test_what_needs_no_logits(name: str, computed: list[LazyLogits]) -> None:
    lazy, full = both()
    got, expected = STAYS_LAZY[name](lazy), STAYS_LAZY[name](full)
    assert not computed
    if not isinstance(expected, Tensor):
        assert got == expected
        return
    assert isinstance(got, LazyLogits)
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(got, expected)  # computes them


@pytest.mark.parametrize("name", COMPUTES)
def test_what_needs_logits_gets_them(name: str, computed: list[LazyLogits]) -> None:
    lazy, full = both()
    got, expected = COMPUTES[name](lazy), COMPUTES[name](full)
    assert computed
    if not isinstance(expected, Tensor):
        assert got == expected
        return
    assert type(got) is Tensor
    assert torch.equal(got, expected)
    assert got.requires_grad == expected.requires_grad


def test_logits_are_computed_once() -> None:
    lazy, _ = both()
    first = lazy.sum()
    lazy.exp()
    whole = lazy.whole
    assert whole is not None
    assert torch.equal(first, whole.sum())
    lazy.softmax(-1)
    assert lazy.whole is whole


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_librarys_loss_needs_no_logits(reduction: str, computed: list[LazyLogits]) -> None:
    lazy, full = both()
    labels = targets(2, 6)
    labels[0, :4] = labels[1, :3] = 7
    items = {} if reduction == "mean" else {"num_items_in_batch": torch.tensor(9)}
    expected = ForCausalLMLoss(full, labels, VOCABULARY, **items)
    loss = ForCausalLMLoss(lazy, labels, VOCABULARY, **items)
    assert not computed
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
