"""Trees come apart and go together again; every container keeps its type and is left alone."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, deque, namedtuple
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree

from roundpipe.errors import InvalidValueError
from roundpipe.microbatch.tree import LEAF, flatten, flatten_with_paths, unflatten


class Point(NamedTuple):
    x: Any
    y: Any


Pair = namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class Plain:
    h: Any
    k: Any = 7


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    h: Any


@dataclasses.dataclass
class Doubling:
    """Its initialiser changes what it is given, so it must not run again on rebuilding."""

    value: Any
    scale: dataclasses.InitVar[int] = 2
    twice: Any = dataclasses.field(init=False)

    def __post_init__(self, scale: int) -> None:
        self.value = self.value * scale
        self.twice = self.value * 2
        self.note = "not a field"


@pytest.mark.parametrize(
    "tree",
    [
        (),
        [],
        {},
        (1, None, "a"),
        [torch.zeros(2), [None, ()]],
        {"a": 1, 3: (2, [])},
        OrderedDict(b=1, a=(2,)),
        Point(1, [2]),
        Pair(1, Pair(2, 3)),
        Plain(torch.ones(1)),
        Frozen({"x": 1}),
        deque([1, 2], maxlen=3),
        torch.ones(3, 2).max(0),
        torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)]),
    ],
    ids=lambda tree: type(tree).__name__,
)
def test_every_container_comes_back_with_its_type(tree: Any) -> None:
    leaves, structure = flatten(tree)
    rebuilt = unflatten(structure, leaves)
    assert type(rebuilt) is type(tree)
    again, same = flatten(rebuilt)
    assert same == structure
    assert len(again) == len(leaves) == structure.num_leaves
    assert all(a is b for a, b in zip(again, leaves, strict=True))


@pytest.mark.parametrize("leaf", [None, 3, "text", torch.ones(2), object(), Plain, torch.Size([1])])
def test_anything_else_is_a_leaf(leaf: Any) -> None:
    leaves, structure = flatten(leaf)
    assert leaves[0] is leaf
    assert structure is LEAF
    assert structure.is_leaf
    assert unflatten(structure, leaves) is leaf


def test_a_subclass_of_list_that_nobody_registered_is_a_leaf() -> None:
    class Special(list[int]):
        pass

    special = Special([1, 2])
    assert flatten((special,))[0][0] is special


def test_a_module_that_is_also_a_dataclass_is_a_leaf() -> None:
    @dataclasses.dataclass(eq=False)
    class Layer(torch.nn.Module):
        size: int

    layer = object.__new__(Layer)
    assert flatten([layer])[0][0] is layer


def test_a_defaultdict_keeps_its_factory() -> None:
    tree = defaultdict(list, {"a": [1]})
    leaves, structure = flatten(tree)
    rebuilt = unflatten(structure, leaves)
    assert rebuilt == tree
    assert rebuilt.default_factory is list
    assert structure != flatten({"a": [1]})[1]
    assert repr(structure) == "Structure(defaultdict({'a': [*]}))"
    assert structure.paths("d") == ["d['a'][0]"]


def test_a_dataclass_is_rebuilt_without_running_its_initialiser() -> None:
    tree = Doubling(3)
    leaves, structure = flatten(tree)
    assert leaves == [6, 12, "not a field"]
    rebuilt = unflatten(structure, leaves)
    assert (rebuilt.value, rebuilt.twice, rebuilt.note) == (6, 12, "not a field")


def test_a_dataclass_with_a_deleted_field_comes_back_without_it() -> None:
    tree = Doubling(3)
    del tree.twice
    leaves, structure = flatten(tree)
    assert leaves == [6, "not a field"]
    assert not hasattr(unflatten(structure, leaves), "twice")


def test_a_class_registered_late_becomes_a_container() -> None:
    class Box:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

    box = Box([1, 2])
    assert flatten(box)[0] == [box]
    _pytree.register_pytree_node(Box, lambda b: ([b.inner], None), lambda v, _: Box(*v))
    leaves, structure = flatten(box)
    assert leaves == [1, 2]
    assert unflatten(structure, [3, 4]).inner == [3, 4]
    assert repr(structure) == "Structure(Box([*, *]))"
    assert structure.paths("box") == ["box[0][0]", "box[0][1]"]


def test_a_registered_dataclass_follows_its_registration() -> None:
    @dataclasses.dataclass
    class Partly:
        data: Any
        note: str

    _pytree.register_pytree_node(
        Partly, lambda p: ([p.data], p.note), lambda v, n: Partly(next(iter(v)), n)
    )
    leaves, structure = flatten(Partly(1, "n"))
    assert leaves == [1]
    assert unflatten(structure, [2]) == Partly(2, "n")
    assert structure != flatten(Partly(1, "other"))[1]


def test_contexts_that_cannot_be_compared_count_as_different() -> None:
    class Held:
        def __init__(self, value: Any, table: torch.Tensor) -> None:
            self.value, self.table = value, table

    _pytree.register_pytree_node(
        Held, lambda h: ([h.value], h.table), lambda v, table: Held(next(iter(v)), table)
    )
    table = torch.ones(2)
    first = flatten(Held(1, table))[1]
    assert first == flatten(Held(2, table))[1]
    assert first != flatten(Held(1, torch.ones(2)))[1]


def test_a_model_output_is_rebuilt_with_attribute_key_and_index_access() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    logits = torch.ones(1, 2)
    tree = outputs.CausalLMOutputWithPast(logits=logits, hidden_states=(logits,))
    paths, leaves, structure = flatten_with_paths(tree, "out")
    assert paths == ["out['logits']", "out['hidden_states'][0]"]
    rebuilt = unflatten(structure, leaves)
    assert type(rebuilt) is type(tree)
    assert rebuilt.logits is logits
    assert rebuilt["logits"] is logits
    assert rebuilt[0] is logits
    assert rebuilt.loss is None


def test_a_block_mask_is_a_container_of_its_tensors() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    mask = create_block_mask(lambda b, h, q, k: q >= k, 2, 1, 4, 4, device="cpu", BLOCK_SIZE=2)
    paths, leaves, structure = flatten_with_paths(mask, "mask")
    assert "mask.kv_indices" in paths
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    rebuilt = unflatten(structure, [leaf.clone() for leaf in leaves])
    assert rebuilt.shape == mask.shape
    assert rebuilt.mask_mod is mask.mask_mod
    assert torch.equal(rebuilt.to_dense(), mask.to_dense())
    assert flatten(mask, block_masks_are_leaves=True)[0] == [mask]


def test_the_users_containers_stay_as_they_are() -> None:
    inner = {"k": None, "pair": [1, 2]}
    tree = [inner, (inner,)]
    leaves, structure = flatten(tree)
    rebuilt = unflatten(structure, leaves)
    rebuilt[0]["pair"].append(3)
    rebuilt[1][0]["new"] = 1
    assert tree == [{"k": None, "pair": [1, 2]}, ({"k": None, "pair": [1, 2]},)]
    assert tree[0] is inner


def test_structures_differ_by_container_keys_order_and_class() -> None:
    trees = [
        1,
        (1,),
        [1],
        (1, 2),
        ((1,),),
        {"a": 1},
        {"b": 1},
        OrderedDict(a=1),
        Plain(1),
        Point(1, 2),
    ]
    structures = [flatten(tree)[1] for tree in trees]
    for i, a in enumerate(structures):
        for j, b in enumerate(structures):
            assert (a == b) is (i == j)
    assert flatten({"a": 1, "b": 2})[1] != flatten({"b": 2, "a": 1})[1]
    assert structures[0] != 1
    assert structures[1].same_node(flatten(([],))[1])
    assert not structures[1].same_node(structures[2])


def test_text_of_structures_and_paths() -> None:
    tree = {"a": (1,), 2: [Point(1, Plain(1)), ()]}
    paths, leaves, structure = flatten_with_paths(tree, "kwargs")
    assert repr(structure) == "Structure({'a': (*,), 2: [Point(x=*, y=Plain(h=*, k=*)), ()]})"
    assert paths == ["kwargs['a'][0]", "kwargs[2][0].x", "kwargs[2][0].y.h", "kwargs[2][0].y.k"]
    assert len(leaves) == 4
    assert repr(flatten(OrderedDict(a=(1, 2)))[1]) == "Structure(OrderedDict({'a': (*, *)}))"
    assert LEAF.keys() == []
    assert LEAF.children == ()


def test_a_wrong_number_of_leaves_is_refused() -> None:
    _, structure = flatten({"a": (1, 2)})
    with pytest.raises(InvalidValueError, match=r"1 leaves .* \{'a': \(\*, \*\)\}, which has 2"):
        unflatten(structure, [1])


def test_a_structure_that_contains_itself_is_refused() -> None:
    tree: list[Any] = [1]
    tree.append(tree)
    with pytest.raises(InvalidValueError, match=r"a list .* contains itself"):
        flatten(tree)


trees = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=4),
        st.dictionaries(st.text(max_size=2), inner, max_size=4).map(OrderedDict),
        st.builds(Point, inner, inner),
        st.builds(Plain, inner, inner),
        st.builds(Frozen, inner),
    ),
    max_leaves=20,
)


@given(trees)
def test_flatten_and_unflatten_are_inverse(tree: Any) -> None:
    leaves, structure = flatten(tree)
    rebuilt = unflatten(structure, leaves)
    assert rebuilt == tree
    assert flatten(rebuilt)[1] == structure
    assert len(structure.paths()) == len(leaves)
    numbered = unflatten(structure, list(range(len(leaves))))
    assert flatten(numbered)[0] == list(range(len(leaves)))
    assert flatten(numbered)[1] == structure
