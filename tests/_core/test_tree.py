"""Keys in code and in YAML, trees of leaves, and descriptions of their differences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from torchrl_lightning._core.tree import (
    difference,
    entry_of,
    is_below,
    join,
    keyed_leaves,
    nested_key,
    nested_keys,
    next_key,
    schema_difference,
    schema_of,
    to_tensordict,
    tree_of,
)


def data(rows: int = 3) -> TensorDict:
    return TensorDict({"a": torch.zeros(rows, 2), "next": {"b": torch.zeros(rows, dtype=torch.bool)}}, [rows])


@pytest.mark.parametrize("invalid", [3, None, [], ["next", 1], [["next"]], {"next": 1}.items()])
def test_nested_key_rejects_other_types(invalid: Any) -> None:
    with pytest.raises(TypeError, match="A key is a string or a list of strings"):
        nested_key(invalid)


def test_nested_keys_names_the_invalid_key() -> None:
    with pytest.raises(TypeError, match="got 1"):
        nested_keys(["observation", 1])
    with pytest.raises(TypeError, match="Expected a list of keys"):
        nested_keys(3)


def test_keys_below_a_root() -> None:
    assert next_key("a") == ("next", "a")
    assert next_key(("agent", "a")) == ("next", "agent", "a")
    assert is_below(("next", "a"), "next")
    assert not is_below("nexta", "next")
    assert not is_below("next", ("next", "a"))
    assert join("a", ()) == "a"
    assert join(("a", "b"), ("c",)) == ("a", "b", "c")


def test_tree_round_trip() -> None:
    assert list(dict(keyed_leaves(data()))) == ["a", ("next", "b")]
    assert dict(keyed_leaves(data())).keys() == dict(keyed_leaves(tree_of(data()))).keys()
    assert (to_tensordict(tree_of(data()), torch.Size([3])) == data()).all()
    assert entry_of(data(), ("next", "b")) is not None
    assert entry_of(data(), ("next", "b", "c")) is None


def test_entries_of_only_some_rows_raise() -> None:
    lazy = LazyStackedTensorDict(TensorDict({"a": torch.zeros(1)}), TensorDict({}), stack_dim=0)
    with pytest.raises(TypeError, match=r"Only some rows have the entries \['a'\]"):
        tree_of(lazy)


@pytest.mark.parametrize("leaf", ["text", torch.zeros(3, 1).to_sparse()])
def test_entry_other_than_a_dense_tensor_raises_with_its_name(leaf: Any) -> None:
    bad = data()
    bad["next", "c"] = leaf
    with pytest.raises(TypeError, match=r"\('next', 'c'\)"):
        tree_of(bad)


def test_difference_names_every_leaf() -> None:
    other = TensorDict({"a": torch.zeros(3, 2).double(), "c": torch.zeros(3)}, [3])
    assert schema_difference(schema_of(data(), 1), schema_of(other, 1)) == (
        "'a' is [2] torch.float64, stored is [2] torch.float32; 'c' is new; ('next', 'b') is missing"
    )
    assert difference(tree_of(data()), data(5)) == ""
    assert "on cpu, stored is [2] torch.float32 on cpu" in difference(tree_of(data()), other)
