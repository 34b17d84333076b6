"""Which parts of a tree are chosen: for any tree, every parameter has one place."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from roundpipe import RoundPipeRunConfig
from roundpipe.wrapping.choose import (
    ChainSpec,
    Choice,
    Limits,
    PartSpec,
    Wishes,
    choose_parts,
    is_sequence,
    parameter_bytes,
)
from wrapping.nets import Block, Net


class Branch(nn.Module):
    """Children that only its own forward calls."""

    def __init__(self, children: list[nn.Module]) -> None:
        super().__init__()
        for index, child in enumerate(children):
            self.add_module(f"child{index}", child)

    def forward(self, x: Any) -> Any:
        return x


def leaves() -> st.SearchStrategy[nn.Module]:
    return st.integers(0, 64).map(lambda n: nn.Linear(n, 1, bias=False) if n else nn.ReLU())


def trees() -> st.SearchStrategy[nn.Module]:
    return st.recursive(
        leaves(),
        lambda children: st.lists(children, min_size=1, max_size=4).flatmap(
            lambda found: st.sampled_from(
                [nn.Sequential(*found), Branch(found), Branch([nn.ModuleList(found)])]
            )
        ),
        max_leaves=12,
    )


def parts_of(choice: Choice) -> list[PartSpec]:
    found: list[PartSpec] = []
    for spec in choice.values():
        items = spec.items if isinstance(spec, ChainSpec) else (spec,)
        found += [item for item in items if isinstance(item, PartSpec)]
    return found


def test_what_layers_of_a_part_share_counts_once_against_the_threshold() -> None:
    tree = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    tree[1].weight = tree[0].weight
    assert parts_of(choose_parts(tree, Limits(5, 5), Wishes(frozenset()))) == []
    assert len(parts_of(choose_parts(tree, Limits(4, 4), Wishes(frozenset())))) == 1


@settings(deadline=None, max_examples=60)
@given(trees(), st.integers(0, 400), st.integers(0, 400), st.randoms())
def test_every_parameter_has_one_place(tree: nn.Module, lower: int, more: int, random: Any) -> None:
    modules = list(tree.modules())
    # A tie between two modules of equal shape, where there are any.
    linears = [m for m in modules if isinstance(m, nn.Linear)]
    if len(linears) > 1:
        first, second = random.sample(linears, 2)
        second.weight = first.weight
    skipped = random.choice(modules)
    wishes = Wishes(frozenset({id(skipped)}) if random.random() < 0.3 else frozenset())
    parts = parts_of(choose_parts(tree, Limits(lower, lower + more), wishes))

    owners = [{id(p) for layer in part.layers for p in layer.parameters()} for part in parts]
    assert sum(map(len, owners)) == len(set().union(*owners))
    inside = {id(m) for part in parts for layer in part.layers for m in layer.modules()}
    outside = {id(p) for m in modules if id(m) not in inside for p in m.parameters(recurse=False)}
    assert not outside & set().union(*owners)
    for part in parts:
        size = sum({id(p): p.numel() * 4 for m in part.layers for p in m.parameters()}.values())
        assert size >= lower
        assert not any(id(m) in wishes.skipped for layer in part.layers for m in layer.modules())
        for layer in part.layers:
            too_large = parameter_bytes(layer) > lower + more
            if too_large:  # only what cannot be divided further
                assert all(parameter_bytes(child) < lower for child in layer.children()) or not [
                    *layer.children()
                ]


def test_what_is_too_large_is_looked_into() -> None:
    net = Net()
    whole = parameter_bytes(net)
    assert [p.name for p in parts_of(choose_parts(net, Limits(0, whole), Wishes()))] == [""]
    names = [p.name for p in parts_of(choose_parts(net, Limits(2**14, whole // 3), Wishes()))]
    assert names == ["embed", "left.0", "left.1", "right", "head"]
    names = [p.name for p in parts_of(choose_parts(net, Limits(2**14, 2**16), Wishes()))]
    assert names == [
        "embed", "left.0.up", "left.0.down", "left.1.up", "left.1.down",
        "right.0.up", "right.0.down", "right.2.up", "right.2.down", "head",
    ]  # fmt: skip


def test_a_sequence_keeps_what_is_between_its_parts_in_order() -> None:
    net = nn.Sequential(Block(), nn.Sequential(nn.GELU(), Block()), nn.Flatten(), Block())
    inner = net[1]
    assert isinstance(inner, nn.Sequential)
    wishes = Wishes(frozenset({id(net[2])}), {id(inner[1]): RoundPipeRunConfig(num_microbatch=1)})
    choice = choose_parts(net, Limits(1, 2**30), wishes)
    chain = choice[id(net)]
    assert isinstance(chain, ChainSpec)
    found = [i.layers if isinstance(i, PartSpec) else i for i in chain.items]
    assert found == [(net[0], inner[0]), (inner[1],), net[2], (net[3],)]


def test_a_sequence_with_a_forward_or_hooks_of_its_own_is_left_together() -> None:
    class Special(nn.Sequential):
        def forward(self, x: Any) -> Any:
            return super().forward(x) + 1

    assert not is_sequence(Special())
    hooked = nn.Sequential(Block(), Block())
    hooked.register_forward_hook(lambda *_: None)
    special = Special(Block(), Block())
    net = nn.Sequential(hooked, special)
    (part,) = parts_of(choose_parts(net, Limits(1, 2**30), Wishes()))
    assert part.layers == (hooked, special)
