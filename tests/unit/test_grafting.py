"""Copies of containers with other modules in place of some parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from roundpipe.grafting import graft


class Outer(nn.Module):
    """Knows a part under a second name, in a list, and by a bound method."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.other = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.zeros(1))
        self.shortcuts: Any = [self.inner]
        self.run = self.step

    def step(self) -> Outer:
        return self


def test_only_what_leads_to_a_replaced_part_is_copied() -> None:
    model = Outer()
    new = nn.Identity()
    grafted = graft(model, {id(model.inner[0]): new})
    root: Any = grafted.root
    assert root is not model
    assert root.inner is not model.inner
    assert root.inner[0] is new
    assert root.inner[1] is model.inner[1]
    assert root.other is model.other
    assert root.scale is model.scale
    assert root.shortcuts == [root.inner]
    assert root.run() is root
    assert model.run() is model
    assert isinstance(model.inner[0], nn.Linear)
    assert {id(original) for _, original in grafted.copies} == {id(model), id(model.inner)}


def test_nothing_is_copied_where_nothing_is_replaced() -> None:
    model = Outer()
    assert graft(model, {}).root is model


def test_parameters_can_be_left_out() -> None:
    model = Outer()
    root: Any = graft(model, {id(model.other): nn.Identity()}, lambda _: False).root
    assert not hasattr(root, "scale")
    assert hasattr(model, "scale")


def test_attributes_and_buffers_go_both_ways() -> None:
    model: Any = Outer()
    grafted = graft(model, {id(model.inner[0]): nn.Identity()})
    root: Any = grafted.root
    model.eval()
    model.limit, model.seen = 3, torch.ones(1)
    model.late = [model.inner]
    grafted.pull()
    assert not root.training
    assert root.limit == 3
    assert root.seen is model.seen
    assert root.late == [root.inner]
    root.limit, root.seen = 4, torch.full((1,), 2.0)
    root.count = 1
    grafted.push()
    assert (model.limit, model.count) == (4, 1)
    assert model.seen.item() == 2
    assert model.late == [model.inner]
