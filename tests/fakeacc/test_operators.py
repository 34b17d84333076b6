"""Operators: queued through their CPU kernels, with the results and refusals of a device."""

from collections.abc import Callable
from copy import deepcopy
from io import BytesIO

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from support import fakeacc

Case = Callable[..., object]


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def spd(size: int) -> torch.Tensor:
    a = values(size, size)
    return a @ a.t() + size * torch.eye(size)


# Name, operation, arguments. All of them differentiable in the floating arguments.
DIFFERENTIABLE: list[tuple[str, Case, tuple[torch.Tensor, ...]]] = [
    ("arithmetic", lambda a, b: (a + b) * a / (b.abs() + 1) - 2, (values(3, 4), values(4))),
    ("matmul", lambda a, b: a @ b, (values(2, 3, 4), values(4, 5))),
    ("addmm", torch.addmm, (values(5), values(3, 4), values(4, 5))),
    ("softmax", lambda a: a.softmax(-1).log().exp(), (values(3, 4),)),
    ("gelu", F.gelu, (values(3, 4),)),
    ("silu", F.silu, (values(3, 4),)),
    (
        "layer_norm",
        lambda a, w, b: F.layer_norm(a, (4,), w, b),
        (values(3, 4), values(4), values(4)),
    ),
    ("rms_norm", lambda a, w: F.rms_norm(a, (4,), w), (values(3, 4), values(4))),
    ("batch_norm", lambda a: F.batch_norm(a, None, None, training=True), (values(8, 3),)),
    ("group_norm", lambda a: F.group_norm(a, 2), (values(3, 4, 5),)),
    ("attention", F.scaled_dot_product_attention, (values(2, 2, 5, 4),) * 3),
    (
        "conv2d",
        lambda a, w, b: F.conv2d(a, w, b, padding=1),
        (values(2, 3, 5, 5), values(4, 3, 3, 3), values(4)),
    ),
    ("conv_transpose1d", F.conv_transpose1d, (values(2, 3, 5), values(3, 4, 2))),
    ("max_pool2d", lambda a: F.max_pool2d(a, 2), (values(2, 3, 6, 6),)),
    ("reductions", lambda a: (a.sum(0), a.mean(), a.amax(1), a.var(1), a.norm()), (values(3, 4),)),
    ("cat and split", lambda a, b: torch.cat([a, b]).split(2), (values(3, 4), values(3, 4))),
    ("views", lambda a: a.t()[1:, ::2].reshape(-1).unfold(0, 2, 1).unsqueeze(0), (values(4, 6),)),
    ("expand", lambda a: a.expand(3, 4).contiguous(), (values(4),)),
    (
        "gather",
        lambda a: a.gather(1, torch.zeros(3, 2, dtype=torch.long, device=a.device)),
        (values(3, 4),),
    ),
    ("index", lambda a: a[torch.tensor([0, 2], device=a.device)], (values(3, 4),)),
    ("host index", lambda a: a[torch.tensor([0, 2])], (values(3, 4),)),
    ("mask", lambda a: a[a > 0], (values(3, 4),)),
    ("where", lambda a, b: torch.where(a > b, a, b), (values(3, 4), values(3, 4, seed=1))),
    ("masked_fill", lambda a: a.masked_fill(a > 0, 0.5), (values(3, 4),)),
    ("sort", lambda a: a.sort(-1), (values(3, 4),)),
    ("topk", lambda a: a.topk(2), (values(3, 4),)),
    ("cumsum", lambda a: a.cumsum(0), (values(3, 4),)),
    ("mse", F.mse_loss, (values(3, 4), values(3, 4, seed=1))),
    ("einsum", lambda a, b: torch.einsum("ij,jk->ik", a, b), (values(3, 4), values(4, 5))),
    ("complex", lambda a: torch.view_as_real(torch.fft.fft(a).conj() * 2), (values(3, 4),)),
    ("cholesky", torch.linalg.cholesky, (spd(3),)),
    ("svdvals", torch.linalg.svdvals, (values(3, 4),)),
    ("unbind", lambda a: a.unbind(0), (values(3, 4),)),
]


def on_device(tree: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.to("fakeacc:0") for tensor in tree)


def floating_leaves(result: object) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(result)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


@pytest.mark.parametrize(
    ("operation", "arguments"),
    [case[1:] for case in DIFFERENTIABLE],
    ids=[case[0] for case in DIFFERENTIABLE],
)
def test_values_and_gradients_agree_with_the_cpu(
    operation: Case, arguments: tuple[torch.Tensor, ...]
) -> None:
    there = tuple(tensor.requires_grad_() for tensor in on_device(arguments))
    here = tuple(tensor.clone().requires_grad_() for tensor in arguments)
    results = floating_leaves(operation(*there))
    expected = floating_leaves(operation(*here))
    assert len(results) == len(expected) > 0
    for result, value in zip(results, expected, strict=True):
        assert result.device == torch.device("fakeacc:0")
        torch.testing.assert_close(result.cpu(), value)
    torch.stack([result.sum() for result in results]).sum().backward()
    torch.stack([value.sum() for value in expected]).sum().backward()
    for tensor, twin in zip(there, here, strict=True):
        assert tensor.grad is not None
        torch.testing.assert_close(tensor.grad.cpu(), twin.grad, atol=1e-4, rtol=1e-4)


def test_a_cross_entropy_model_with_an_embedding_trains() -> None:
    def train(device: str) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(11, 8), torch.nn.Linear(8, 11)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        tokens = torch.arange(11).to(device)
        losses = []
        for _ in range(5):
            loss = F.cross_entropy(model(tokens), tokens.flip(0))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        return losses

    there, here = train("fakeacc:1"), train("cpu")
    assert there == pytest.approx(here, rel=1e-4)
    assert there[-1] < there[0]


def test_results_in_given_outputs_resize_them() -> None:
    a = torch.ones(3, 4, device="fakeacc:0")
    out = torch.empty(0, device="fakeacc:0")
    assert torch.add(a, a, out=out) is out
    assert out.tolist() == [[2.0] * 4] * 3
    strided = torch.zeros(4, 3, device="fakeacc:0").t()
    torch.mul(a, 3, out=strided)
    assert strided.tolist() == [[3.0] * 4] * 3
    scalar = torch.empty((), device="fakeacc:0")
    F.mse_loss(a, torch.zeros_like(a))
    torch.ops.aten.mse_loss.out(a, torch.zeros_like(a), 1, out=scalar)
    assert scalar.item() == 1.0


def test_in_place_operators_write_through_views() -> None:
    x = torch.zeros(4, 6, device="fakeacc:0")
    x[1:3, ::2].add_(1)
    x.t()[0].copy_(torch.full((4,), 5.0))
    x[3, torch.tensor([1, 2])] = 7.0
    expected = torch.zeros(4, 6)
    expected[1:3, ::2] = 1
    expected[:, 0] = 5
    expected[3, 1:3] = 7
    assert torch.equal(x.cpu(), expected)


def test_numbers_and_scalars_of_the_host_take_part() -> None:
    x = torch.ones(3, device="fakeacc:0")
    scale = torch.tensor(4.0)
    with fakeacc.hold(torch.accelerator.current_stream()):
        y = x * scale + 1
        scale.fill_(100.0)  # the value at the call counts
    assert y.tolist() == [5.0] * 3


def test_shapes_that_depend_on_the_data() -> None:
    x = torch.tensor([0, 3, 0, 3, 5], device="fakeacc:0")
    assert x.nonzero().flatten().tolist() == [1, 3, 4]
    assert x.unique().tolist() == [0, 3, 5]
    assert torch.repeat_interleave(x).numel() == 11
    assert torch.equal(x, x.clone())
    assert bool((x == 3).any())
    assert x.max().item() == 5


def test_factories_and_dtypes() -> None:
    assert torch.arange(5, device="fakeacc:0").tolist() == [0, 1, 2, 3, 4]
    assert torch.eye(2, dtype=torch.bfloat16, device="fakeacc:1").tolist() == [[1, 0], [0, 1]]
    assert torch.tril_indices(2, 2, device="fakeacc:0").tolist() == [[0, 1, 1], [0, 0, 1]]
    assert sorted(torch.randperm(6, device="fakeacc:0").tolist()) == list(range(6))
    assert torch.linspace(0, 1, 3, device="fakeacc:0").half().tolist() == [0.0, 0.5, 1.0]


@pytest.mark.parametrize(
    "call",
    [
        lambda x, y: x + y,
        lambda x, y: torch.addmm(x, y.reshape(1, 2), x.reshape(2, 1)),
        lambda x, y: torch.cat([x, y]),
        lambda x, y: torch.add(y, y, out=x),
    ],
)
def test_two_devices_in_one_call_are_refused_by_the_caller(
    call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    x = torch.ones(2, device="fakeacc:0")
    for y in (torch.ones(2), torch.ones(2, device="fakeacc:1")):
        with pytest.raises(RuntimeError, match=r"Expected all tensors to be on the same device"):
            call(x, y)


def test_wrong_shapes_are_refused_by_the_caller() -> None:
    x = torch.ones(2, 3, device="fakeacc:0")
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        x @ x
    with pytest.raises(RuntimeError, match="must match the size"):
        x + torch.ones(2, 2, device="fakeacc:0")


def test_an_operator_without_a_cpu_kernel_is_refused_by_the_caller() -> None:
    x = torch.ones(2, 12, device="fakeacc:0")
    with pytest.raises(NotImplementedError, match=r"through its CPU kernel, but it has none"):
        torch.ops.aten._thnn_fused_gru_cell(x, x, torch.ones(2, 4, device="fakeacc:0"))


def test_save_load_and_deepcopy() -> None:
    x = torch.arange(6.0, device="fakeacc:1").reshape(2, 3)
    assert torch.equal(deepcopy(x), x)
    buffer = BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    assert torch.load(buffer).device == torch.device("fakeacc:1")
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, map_location="cpu"), x.cpu())


def test_inference_mode() -> None:
    layer = torch.nn.Linear(4, 4).to("fakeacc:0")
    with torch.inference_mode():
        x = torch.ones(2, 4, device="fakeacc:0")
        x.add_(1)
        x[0].zero_()
        y = layer(x).to("fakeacc:1").cpu()
    with torch.no_grad():
        expected = layer(torch.tensor([[0.0] * 4, [2.0] * 4], device="fakeacc:0"))
    assert torch.equal(y, expected.cpu())
