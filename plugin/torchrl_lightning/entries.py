"""Nested keys, trees of leaves, and how they differ: nested dicts of tensors that start with one batch dimension."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_non_tensor
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning._compat import entries_of

Tree = dict[str, Any]
"""Nested dict whose leaves are tensors."""
Path = tuple[str, ...]
"""Keys from the root of a tree to one leaf."""


def leaves_of(tree: Tree, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Yield every leaf with its path, in order."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves_of(value, (*path, key))
        else:
            yield (*path, key), value


def map_leaves(function: Callable[[Tensor], Any], tree: Tree) -> Tree:
    """Apply a function to every leaf."""
    return {k: map_leaves(function, leaf) if isinstance(leaf, dict) else function(leaf) for k, leaf in tree.items()}


def level_of(data: TensorDictBase) -> dict[str, Any]:
    """Return the entries of one level, for reading only.

    Raises:
        TypeError: only some rows of a lazy stack have an entry.
    """
    # A lazy stack shows only what all of its rows have.
    if type(data) is not TensorDict and isinstance(data, LazyStackedTensorDict):
        lost = set().union(*(row.keys() for row in data.tensordicts)) - set(data.keys())
        if lost:
            raise TypeError(f"Only some rows have the entries {sorted(lost)}; give them to all or to none.")
    return entries_of(data)


def tree_of(data: TensorDictBase, path: Path = ()) -> Tree:
    """Build the nested dict of the leaves of ``data``.

    Raises:
        TypeError: a leaf is not a dense tensor, or only some rows have it.
    """
    tree: Tree = {}
    for key, value in level_of(data).items():
        if isinstance(value, TensorDictBase) and not is_non_tensor(value):
            tree[key] = tree_of(value, (*path, key))
        elif isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested:
            tree[key] = value
        else:
            kind = "sparse or nested tensor" if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"Entry {name_of((*path, key))} is a {kind}; a replay buffer stores dense tensors only.")
    return tree


def to_tensordict(tree: Tree, batch: torch.Size, device: torch.device | None = None) -> TensorDict:
    """Build a TensorDict over the leaves of a tree."""
    entries = {k: to_tensordict(v, batch, device) if isinstance(v, dict) else v for k, v in tree.items()}
    return TensorDict(entries, batch, device=device)


def name_of(path: Path) -> str:
    """Write a path as the key that a user types."""
    return repr(path[0] if len(path) == 1 else path)


def is_tensordict(value: Any) -> TypeGuard[TensorDictBase]:
    """Return whether a value is a TensorDict, without the slow check of the abstract class for plain ones."""
    return type(value) is TensorDict or isinstance(value, TensorDictBase)


def check_tensordict(data: Any) -> None:
    """Refuse anything but a TensorDict.

    Raises:
        TypeError: says what it is, and how it becomes one.
    """
    if not is_tensordict(data):
        kind = "a plain tensor" if isinstance(data, Tensor) else f"a {type(data).__name__}"
        raise TypeError(
            f"Expected a TensorDict, got {kind}; name the entries and the rows, "
            'e.g. TensorDict({"observation": tensor}, [len(tensor)]).'
        )


def entry_of(data: TensorDictBase, key: NestedKey) -> Tensor | None:
    """Look an entry up without the checks of ``get``; None if there is none."""
    node: Any = data
    for part in (key,) if isinstance(key, str) else key:
        node = entries_of(node).get(part) if is_tensordict(node) else None
    return node


def moved(value: Tensor, device: torch.device | str) -> Tensor:
    """Move a tensor to a device; asking where it is costs a tenth of a move that moves nothing."""
    return value if value.device == device else value.to(device)


Plan = list[tuple[str, Any, Any, Any]]
"""One level of what rows must look like: key, then a plan, or dtype, device and shape of a leaf."""


def plan_of(tree: Tree, rows: int) -> Plan:
    """Describe ``rows`` rows that fit a tree, prepared for :func:`match`."""
    return [
        (key, plan_of(leaf, rows), None, None)
        if isinstance(leaf, dict)
        else (key, leaf.dtype, leaf.device, torch.Size((rows, *leaf.shape[1:])))
        for key, leaf in tree.items()
    ]


def match(plan: Plan, entries: dict[str, Any], found: list[Tensor]) -> bool:
    """Return whether entries have the planned keys, shapes, dtypes and devices; appends the leaves in order."""
    if len(entries) != len(plan):
        return False
    for key, dtype, device, shape in plan:
        value = entries.get(key)
        if shape is None:
            if not is_tensordict(value) or not match(dtype, level_of(value), found):
                return False
        elif (
            isinstance(value, Tensor)
            and value.dtype is dtype
            and value.layout is torch.strided
            and value.shape == shape
            and value.device == device
        ):
            found.append(value.detach() if value.requires_grad else value)
        else:
            return False
    return True


def difference(tree: Tree, data: TensorDictBase, *, devices: bool = True) -> str:
    """Describe in words how the leaves of ``data`` differ from those that are stored."""
    stored, given = dict(leaves_of(tree)), dict(leaves_of(tree_of(data)))
    parts = [f"{name_of(path)} is missing" for path in stored.keys() - given.keys()]
    parts += [f"{name_of(path)} is new" for path in given.keys() - stored.keys()]
    for path in stored.keys() & given.keys():
        here, there = _describe(stored[path], devices), _describe(given[path], devices)
        if here != there:
            parts.append(f"{name_of(path)} is {there}, stored is {here}")
    return "; ".join(sorted(parts))


def _describe(leaf: Tensor, devices: bool) -> str:
    return f"{list(leaf.shape[1:])} {leaf.dtype}" + (f" on {leaf.device}" if devices else "")


def row_bytes(tree: Tree) -> int:
    """Count the bytes that one row of all leaves takes."""
    return sum(leaf[:1].numel() * leaf.element_size() for _, leaf in leaves_of(tree))
