"""How batches are cut and outputs merged, seen through whole calls."""

from __future__ import annotations

import dataclasses
from collections import UserDict, namedtuple
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils import _pytree as pytree
from transformers.modeling_outputs import BaseModelOutput

from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.errors import InvalidValueError
from roundpipe.microbatch import MicrobatchWarning, Replicate, TensorChunkSpec
from support.cases import STAGES, fused_plan


def build(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2), nn.Tanh()).to(dtype)


def mean_loss(out: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return ((out - label) ** 2).mean()


def mean_losses(out: torch.Tensor, label: torch.Tensor) -> list[torch.Tensor]:
    return [mean_loss(out, label), out.abs().mean()]


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    scale = want.abs().max()
    torch.testing.assert_close(got / scale, want / scale, rtol=0, atol=1e-6)


# --- loss_reduction="mean" ------------------------------------------------------------------------


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize(("rows", "num_microbatch"), [(8, 3), (11, 4), (7, 7), (5, 1), (64, 9)])
def test_the_mean_is_that_of_the_whole_batch_however_it_is_cut(
    rows: int, num_microbatch: int, stages: int, several: bool
) -> None:
    model, plain = build(), build()
    x, label = torch.randn(rows, 3), torch.randn(rows, 2)
    loss_fn: Any = mean_losses if several else mean_loss
    want = loss_fn(plain(x), label)
    (want[0] + want[1] if several else want).backward()
    config = RoundPipeRunConfig(
        num_microbatch=num_microbatch, execute_plan=fused_plan(4, stages), loss_reduction="mean"
    )
    with RoundPipe(model, devices="cpu:2", model_run_config=config) as pipe:
        got = pipe.forward_backward((x,), label=label, loss_fn=loss_fn)
        pipe.synchronize()
    for mine, theirs in zip(got if several else [got], want if several else [want], strict=True):
        close(mine, theirs.detach())
    for mine_p, theirs_p in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine_p.grad is not None
        assert theirs_p.grad is not None
        close(mine_p.grad, theirs_p.grad)


def test_an_epoch_ends_with_a_smaller_batch_and_an_even_smaller_one() -> None:
    """10 rows in batches of 4: the last batch has 2 rows, fewer than the 3 microbatches."""
    model, plain = build(), build()
    x, label = torch.randn(10, 3), torch.randn(10, 2)
    config = RoundPipeRunConfig(num_microbatch=3, loss_reduction="mean")
    losses = []
    with RoundPipe(model, devices="cpu:2", model_run_config=config) as pipe:
        for part, goal in zip(x.split(4), label.split(4), strict=True):
            if len(part) == 4:
                losses.append(pipe.forward_backward((part,), label=goal, loss_fn=mean_loss))
            else:
                with pytest.warns(MicrobatchWarning, match=r"2 rows.*fewer than num_microbatch=3"):
                    losses.append(pipe.forward_backward((part,), label=goal, loss_fn=mean_loss))
        # Once per model: warnings are errors here.
        pipe.forward_backward((x[:1],), label=label[:1], loss_fn=mean_loss)
        pipe.zero_grad()
        for part, goal in zip(x.split(4), label.split(4), strict=True):
            pipe.forward_backward((part,), label=goal, loss_fn=mean_loss)
        pipe.synchronize()
    for got, part, goal in zip(losses, x.split(4), label.split(4), strict=True):
        want = mean_loss(plain(part), goal)
        want.backward()
        close(got, want.detach())
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        close(mine.grad, theirs.grad)


def test_a_mean_needs_rows() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, number: int) -> torch.Tensor:
            return self.weight * number

    config = RoundPipeRunConfig(num_microbatch=2, loss_reduction="mean")
    with RoundPipe(nn.Sequential(Constant()), devices="cpu:1", model_run_config=config) as pipe:
        with pytest.raises(InvalidValueError, match="needs to know how many rows each microbatch"):
            pipe.forward_backward((3,))


# --- inputs and labels that disagree ---------------------------------------------------------


class Sums(nn.Module):
    """One number per row; says which rows it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.rows: list[int] = []

    def forward(self, x: torch.Tensor, **_kwargs: Any) -> torch.Tensor:
        self.rows.append(len(x))
        return x.sum(1) * self.weight


def fit(out: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (out - label).sum()


@pytest.mark.parametrize(
    ("label_rows", "text"),
    [
        (3, r"label has shape \(3,\), but the batch has 8 rows.*3 rows cannot be cut into 4"),
        (0, r"label has shape \(0,\), but the batch has 8 rows"),
    ],
)
def test_labels_that_cannot_be_cut_like_the_inputs_fail_before_anything_runs(
    label_rows: int, text: str
) -> None:
    layer = Sums()
    config = RoundPipeRunConfig(num_microbatch=4)
    with RoundPipe(nn.Sequential(layer), devices="cpu:2", model_run_config=config) as pipe:
        with pytest.raises(InvalidValueError, match=text):
            pipe.forward_backward((torch.ones(8, 2),), label=torch.ones(label_rows), loss_fn=fit)
        assert layer.rows == []


def test_labels_of_another_size_that_can_be_cut_are_warned_about() -> None:
    """A pair of labels for each row: meant, and cut evenly all the same."""
    layer = Sums()
    config = RoundPipeRunConfig(num_microbatch=4)

    def pairs(out: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return (out[:, None] - label.view(-1, 2)).sum()

    with RoundPipe(nn.Sequential(layer), devices="cpu:2", model_run_config=config) as pipe:
        with pytest.warns(MicrobatchWarning, match=r"label has shape \(16,\), but the batch has 8"):
            loss = pipe.forward_backward((torch.ones(8, 2),), label=torch.ones(16), loss_fn=pairs)
        assert loss.item() == 16.0
        pipe.forward_backward((torch.ones(8, 2),), label=torch.ones(16), loss_fn=pairs)


def test_specs_for_inputs_and_labels_reach_the_layers_and_the_loss() -> None:
    class TimeMajor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            assert table.shape == (100, 3)
            return (x * table[:3].sum()).sum((0, 2)) * self.weight

    x, table, y = torch.randn(16, 4, 3), torch.randn(100, 3), torch.randn(4)
    weights = torch.tensor([0.5, 2.0])

    def loss_fn(out: torch.Tensor, label: dict[str, torch.Tensor]) -> torch.Tensor:
        assert torch.equal(label["class_weights"], weights)
        return ((out - label["y"]) * label["class_weights"].sum()).sum()

    config = RoundPipeRunConfig(
        num_microbatch=2,
        split_input=((TensorChunkSpec(-2),), {"table": Replicate}),
        split_label={"y": TensorChunkSpec(0), "class_weights": Replicate()},
    )
    with RoundPipe(nn.Sequential(TimeMajor()), devices="cpu:2", model_run_config=config) as pipe:
        label = {"y": y, "class_weights": weights}
        loss, out = pipe.forward_backward(
            (x,), {"table": table}, label, loss_fn, return_outputs=True
        )
    want = (x * table[:3].sum()).sum((0, 2))
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(loss, ((want - y) * 2.5).sum())


# --- structures through the engine ----------------------------------------------------------------


@dataclasses.dataclass
class State:
    h: torch.Tensor
    k: int


Pair = namedtuple("Pair", ["left", "right"])


class Passes(nn.Module):
    """Hands on what it gets; keeps the classes of what it saw."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, tree: Any) -> Any:
        self.seen.append(tree)
        return tree


def test_structures_keep_their_types_and_the_users_containers_are_never_modified() -> None:
    x = torch.arange(8.0).view(4, 2)
    given: dict[str, Any] = {
        "pair": Pair(x, x + 1), "list": [x, None, [], {}, (), "a", 3], "state": State(x, 7),
        "output": BaseModelOutput(last_hidden_state=x),
    }  # fmt: skip
    leaves, spec = pytree.tree_flatten(given)

    class Vandal(nn.Module):
        def forward(self, tree: dict[str, Any]) -> dict[str, Any]:
            tree["list"].append("mine")
            tree["state"].k = 8
            tree["more"] = tree.pop("pair")
            tree["output"]["last_hidden_state"] = tree["output"]["last_hidden_state"] * 2
            return tree

    seen: list[Any] = []
    model = nn.Sequential(Passes(seen), Vandal(), Passes([]))
    config = RoundPipeRunConfig(num_microbatch=2)
    with RoundPipe(model, devices="cpu:2", model_run_config=config) as pipe, torch.no_grad():
        got = pipe(given)
    after, spec_after = pytree.tree_flatten(given)
    assert spec_after == spec
    assert all(a is b for a, b in zip(leaves, after, strict=True))
    assert given["list"][1:] == [None, [], {}, (), "a", 3]
    assert given["state"].k == 7
    assert list(got) == ["list", "state", "output", "more"]
    assert isinstance(got["more"], Pair)
    assert torch.equal(got["more"].right, x + 1)
    assert got["list"][1:] == [None, [], {}, (), "a", 3, "mine"]
    assert isinstance(got["state"], State)
    assert got["state"].k == 8
    output = got["output"]
    assert isinstance(output, BaseModelOutput)
    for access in (output.last_hidden_state, output["last_hidden_state"], output[0]):
        assert torch.equal(access, x * 2)
    assert {type(tree["pair"]) for tree in seen} == {Pair}


def test_a_class_that_is_registered_after_the_model_was_wrapped() -> None:
    class Bag:
        def __init__(self, x: torch.Tensor, name: str) -> None:
            self.x, self.name = x, name

    class Doubles(nn.Module):
        def forward(self, bag: Bag) -> Bag:
            return Bag(bag.x * 2, bag.name)

    x = torch.arange(4.0)
    config = RoundPipeRunConfig(num_microbatch=2)
    model = nn.Sequential(Doubles(), Doubles())
    with RoundPipe(model, devices="cpu:2", model_run_config=config) as pipe, torch.no_grad():
        pytree.register_pytree_node(
            Bag, lambda bag: ([bag.x], bag.name), lambda xs, name: Bag(next(iter(xs)), name)
        )
        got = pipe(Bag(x, "a"))
    assert isinstance(got, Bag)
    assert torch.equal(got.x, x * 4)
    assert got.name == "a"


def test_a_container_that_nobody_knows_goes_whole_with_a_warning() -> None:
    class Ids(nn.Module):
        def forward(self, x: torch.Tensor, more: Any) -> torch.Tensor:
            return x + len(more["ids"])

    x = torch.zeros(4, 1)
    config = RoundPipeRunConfig(num_microbatch=2)
    with RoundPipe(nn.Sequential(Ids()), devices="cpu:2", model_run_config=config) as pipe:
        with torch.no_grad(), pytest.warns(MicrobatchWarning, match=r"args\[1\] is a UserDict"):
            assert pipe(x, UserDict(ids=x)).flatten().tolist() == [4.0] * 4


def rules_of(masks: Iterable[BlockMask], rows: int) -> list[list[int]]:
    """For each mask and row, how many positions of the first query a row may see."""
    one, zero = torch.tensor(1), torch.tensor(0)
    return [
        [int(sum(int(m.mask_mod(one * b, zero, zero, one * k)) for k in range(4)))
         for b in range(rows)]
        for m in masks
    ]  # fmt: skip


@pytest.mark.parametrize("made_for", [4, None])
def test_a_block_mask_goes_through_the_stages(made_for: int | None) -> None:
    seen: list[BlockMask] = []

    class Keeps(nn.Module):
        def forward(self, x: torch.Tensor, mask: BlockMask) -> tuple[torch.Tensor, BlockMask]:
            return x + 1, mask

    class Sees(nn.Module):
        def forward(self, pair: tuple[torch.Tensor, BlockMask]) -> Any:
            seen.append(pair[1])
            return pair

    rule = (lambda b, _h, _q, k: k <= b) if made_for else (lambda _b, _h, _q, k: k <= 1)
    mask = create_block_mask(
        rule, B=made_for, H=None, Q_LEN=4, KV_LEN=4, device="cpu", BLOCK_SIZE=2
    )
    x = torch.zeros(4, 1)
    for merge_output in (None, False):
        seen.clear()
        config = RoundPipeRunConfig(num_microbatch=2, merge_output=merge_output)
        model = nn.Sequential(Keeps(), Sees())
        with RoundPipe(model, devices="cpu:2", model_run_config=config) as pipe, torch.no_grad():
            _, merged = pipe(x, mask)
        masks = sorted(seen, key=lambda m: rules_of([m], 1))
        assert all(isinstance(m, BlockMask) for m in masks)
        assert rules_of(masks, 2) == ([[1, 2], [3, 4]] if made_for else [[2, 2], [2, 2]])
        if merge_output is None:
            assert isinstance(merged, BlockMask)
        else:
            assert [type(m) for m in merged] == [BlockMask, BlockMask]


# --- where outputs go -----------------------------------------------------------------------------


def test_merged_outputs_go_to_the_output_device_and_gradients_come_back() -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {"y": self.linear(x), "n": 3}

    config = RoundPipeRunConfig(num_microbatch=2, output_device="meta")
    with RoundPipe(nn.Sequential(Pairs()), devices="cpu:2", model_run_config=config) as pipe:
        out = pipe(torch.ones(4, 3))
        assert (out["y"].device.type, out["y"].shape, out["n"]) == ("meta", (4, 2), 3)
        assert out["y"].requires_grad
        _, merged = pipe.forward_backward(
            (torch.ones(4, 3),), loss_fn=lambda o, _l: o["y"].sum(), return_outputs=True
        )
        assert merged["y"].device.type == "meta"
        here = pipe(torch.ones(4, 3), roundpipe_run_config=RoundPipeRunConfig(output_device="cpu"))
        assert here["y"].device.type == "cpu"
