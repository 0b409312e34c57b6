"""Nested keys, trees (nested dicts of tensors with one leading batch dimension), and differences between trees."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, TypeGuard, cast

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_non_tensor
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning._core.torchrl_compat import entries_of, new_tensordict

Tree = dict[str, Any]
"""Nested dict with tensors as leaves."""
Path = tuple[str, ...]
"""Keys from the root of a tree to one leaf."""
Key = Annotated[NestedKey, lambda key, name: nested_key(key)]
"""A setting that is a key."""
Keys = Annotated[tuple[NestedKey, ...], lambda keys, name: nested_keys(keys)]
"""A setting that is a list of keys."""
Schema = dict[NestedKey, tuple[Any, ...]]
"""Feature shape and dtype of each leaf, and optionally its device."""


def nested_key(key: Any) -> NestedKey:
    """Convert a string or a sequence of strings to a key; raise TypeError for other types."""
    if isinstance(key, str):
        return key
    if not isinstance(key, Sequence) or not key or not all(isinstance(part, str) for part in key):
        raise TypeError(f"A key is a string or a list of strings, such as [next, reward]; got {key!r}.")
    return cast(NestedKey, key[0] if len(key) == 1 else tuple(key))


def nested_keys(keys: Any) -> tuple[NestedKey, ...]:
    """Convert a string or a collection of keys to a tuple of keys; raise TypeError for other types."""
    if isinstance(keys, str):
        return (keys,)
    if not isinstance(keys, Collection):
        raise TypeError(f"Expected a list of keys, such as [observation, [next, reward]]; got {keys!r}.")
    return tuple(nested_key(key) for key in keys)


def path_of(key: NestedKey) -> Path:
    """Return a key as a tuple of strings."""
    return (key,) if isinstance(key, str) else tuple(key)


def next_key(key: NestedKey) -> Path:
    """Return the path of a key with ``next`` in front."""
    return ("next", key) if isinstance(key, str) else ("next", *key)


def is_below(key: NestedKey, root: NestedKey) -> bool:
    """Return whether ``key`` is ``root`` or nested below it."""
    if isinstance(key, str):
        return key == root or root == (key,)
    path = (root,) if isinstance(root, str) else root
    return key[: len(path)] == path


def join(root: NestedKey, suffix: Path) -> NestedKey:
    """Append ``suffix`` to ``root``; return a string if the result has only one part."""
    if not suffix and isinstance(root, str):
        return root
    joined = path_of(root) + suffix
    return joined[0] if len(joined) == 1 else joined


def leaves_of(tree: Tree) -> list[tuple[Path, Tensor]]:
    """Return every leaf with its path, in order."""
    leaves: list[tuple[Path, Tensor]] = []
    _collect(tree, (), leaves)
    return leaves


def _collect(tree: Tree, path: Path, leaves: list[tuple[Path, Tensor]]) -> None:
    for key, value in tree.items():
        if isinstance(value, dict):
            _collect(value, (*path, key), leaves)
        else:
            leaves.append(((*path, key), value))


def keyed_leaves(data: TensorDictBase | Tree) -> list[tuple[NestedKey, Tensor]]:
    """Return every leaf with its key; keys of one part are strings. Raise TypeError like :func:`tree_of`."""
    leaves = leaves_of(data if isinstance(data, dict) else tree_of(data))
    return [(path[0] if len(path) == 1 else path, leaf) for path, leaf in leaves]


def keys_below(data: TensorDictBase, root: NestedKey) -> list[NestedKey]:
    """Return the keys of all leaves at or below ``root``; an empty list if ``root`` is missing."""
    entry = data.get(root, None)
    if entry is None:
        return []
    return [join(root, path) for path, _ in leaves_of(tree_of(entry))] if is_tensordict(entry) else [join(root, ())]


def map_leaves(function: Callable[[Tensor], Any], tree: Tree) -> Tree:
    """Apply a function to every leaf."""
    return {k: map_leaves(function, leaf) if isinstance(leaf, dict) else function(leaf) for k, leaf in tree.items()}


def raw_items(data: TensorDictBase) -> dict[str, Any]:
    """Return the entries of one level, read-only; raise TypeError if some rows of a lazy stack lack an entry."""
    # A lazy stack lists only the keys that all of its rows have.
    if type(data) is not TensorDict and isinstance(data, LazyStackedTensorDict):
        missing = set().union(*(row.keys() for row in data.tensordicts)) - set(data.keys())
        if missing:
            raise TypeError(f"Only some rows have the entries {sorted(missing)}; add them to all rows, or to none.")
    return entries_of(data)


def tree_of(data: TensorDictBase, path: Path = ()) -> Tree:
    """Build the nested dict of leaves; raise TypeError if a leaf is not a dense tensor or is missing in some rows."""
    tree: Tree = {}
    for key, value in (entries_of if type(data) is TensorDict else raw_items)(data).items():
        if isinstance(value, TensorDictBase) and not is_non_tensor(value):
            tree[key] = tree_of(value, (*path, key))
        elif isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested:
            tree[key] = value
        else:
            type_name = "sparse or nested tensor" if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"Entry {key_text((*path, key))} is a {type_name}; a buffer stores only dense tensors.")
    return tree


def to_tensordict(tree: Tree, batch: torch.Size, device: torch.device | None = None) -> TensorDict:
    """Build a TensorDict from the leaves of a tree."""
    entries = {k: to_tensordict(v, batch, device) if isinstance(v, dict) else v for k, v in tree.items()}
    return TensorDict(entries, batch, device=device)


def tensordict_of(
    entries: Mapping[Path, Tensor], batch: torch.Size, names: Sequence[str | None] | None = None
) -> TensorDict:
    """Build a TensorDict from entries and their paths, without checks."""
    level: dict[str, Any] = {}
    for (name, *rest), value in entries.items():
        if rest:
            level.setdefault(name, {})[tuple(rest)] = value
        else:
            level[name] = value
    nested = {key: tensordict_of(part, batch, names) if isinstance(part, dict) else part for key, part in level.items()}
    return new_tensordict(nested, batch, names)


def key_text(path: Path) -> str:
    """Return a path as the key that a user types."""
    return repr(path[0] if len(path) == 1 else path)


def is_tensordict(value: Any) -> TypeGuard[TensorDictBase]:
    """Return whether a value is a TensorDict; skip the slow check of the abstract class for a plain TensorDict."""
    return type(value) is TensorDict or isinstance(value, TensorDictBase)


def check_tensordict(data: Any) -> None:
    """Validate that a value is a TensorDict; raise TypeError with a remedy if it is not."""
    if not is_tensordict(data):
        type_name = "a plain tensor" if isinstance(data, Tensor) else f"a {type(data).__name__}"
        raise TypeError(
            f"Expected a TensorDict, got {type_name}; name the entries and the rows, "
            'e.g. TensorDict({"observation": tensor}, [len(tensor)]).'
        )


def entry_of(data: TensorDictBase, key: NestedKey) -> Tensor | None:
    """Return an entry, or None if it is missing, without the checks of ``get``."""
    node: Any = data
    for part in (key,) if isinstance(key, str) else key:
        node = entries_of(node).get(part) if is_tensordict(node) else None
    return node


def to_device(value: Tensor, device: torch.device | str) -> Tensor:
    """Move a tensor to a device if it is on another device; the comparison takes a tenth of the time of ``to``."""
    return value if value.device == device else value.to(device)


def cast_rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast values to another dtype; if it is an integer dtype, first round and clamp floating-point values.

    Examples:
        >>> cast_rounded(torch.tensor([-1.0, 2.6, 256.0]), torch.uint8).tolist()
        [0, 3, 255]
    """
    if dtype.is_floating_point or not values.is_floating_point():
        return values.to(dtype)
    if dtype is torch.bool:
        return values > 0.5
    limits = torch.iinfo(dtype)
    return values.round().long().clamp(limits.min, limits.max).to(dtype)


def schema_of(data: TensorDictBase | Tree, batch_dims: int, *, devices: bool = False) -> Schema:
    """Return shape, dtype and optionally device of every leaf; the shape omits the first ``batch_dims`` dimensions."""
    return {
        key: (leaf.shape[batch_dims:], leaf.dtype, *((leaf.device,) if devices else ()))
        for key, leaf in keyed_leaves(data)
    }


def schema_difference(stored: Schema, received: Schema) -> str:
    """Describe in words how ``received`` differs from ``stored``."""

    def format_leaf(shape: torch.Size, *dtype_and_device: Any) -> str:
        return f"{list(shape)} {' on '.join(map(str, dtype_and_device))}"

    parts = [f"{key!r} is missing" for key in stored.keys() - received.keys()]
    parts += [f"{key!r} is new" for key in received.keys() - stored.keys()]
    parts += [
        f"{key!r} is {format_leaf(*received[key])}, stored is {format_leaf(*stored[key])}"
        for key in stored.keys() & received.keys()
        if stored[key] != received[key]
    ]
    return "; ".join(sorted(parts))


def difference(tree: Tree, data: TensorDictBase, *, devices: bool = True) -> str:
    """Describe in words how the leaves of ``data`` differ from the stored leaves in ``tree``."""
    return schema_difference(schema_of(tree, 1, devices=devices), schema_of(tree_of(data), 1, devices=devices))


def row_bytes(tree: Tree) -> int:
    """Return the number of bytes in one row of all leaves."""
    return sum(leaf[:1].numel() * leaf.element_size() for _, leaf in leaves_of(tree))
