"""Layout of rollouts: leaves, schemas, and the time dimension."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, cast

import torch
from tensordict import TensorDictBase, is_non_tensor
from tensordict.utils import NestedKey
from torch import Tensor

Schema = dict[NestedKey, tuple[torch.Size, torch.dtype]]


def nested_key(key: Any) -> NestedKey:
    """Read a key from YAML or code: a string, or a list or tuple of strings.

    Raises:
        TypeError: it is something else.

    Example:
        >>> nested_key(["next", "reward"]), nested_key(["action"]), nested_key("action")
        (('next', 'reward'), 'action', 'action')
    """
    parts = (key,) if isinstance(key, str) else tuple(key) if isinstance(key, Collection) else ()
    if not parts or not all(isinstance(part, str) for part in parts):
        raise TypeError(f"A key is a string or a list of strings, got {key!r}.")
    return cast(NestedKey, parts[0] if len(parts) == 1 else parts)


def nested_keys(keys: Any) -> tuple[NestedKey, ...]:
    """Read a list of keys; a string alone is a list of one.

    Example:
        >>> nested_keys(["h", ["state", "c"]]), nested_keys("h")
        (('h', ('state', 'c')), ('h',))
    """
    return (keys,) if isinstance(keys, str) else tuple(nested_key(key) for key in keys)


def leaves_of(data: TensorDictBase) -> Iterator[tuple[NestedKey, Tensor]]:
    """Yield every leaf with its (possibly nested) key.

    Raises:
        TypeError: a leaf is not a tensor.
    """
    for key, value in data.items():
        if isinstance(value, TensorDictBase) and not is_non_tensor(value):
            for inner, leaf in leaves_of(value):
                yield (key, *((inner,) if isinstance(inner, str) else inner)), leaf
        elif isinstance(value, Tensor):
            yield key, value
        else:
            raise TypeError(f"Entry {key!r} is a {type(value).__name__}; rollouts hold tensors only.")


def describe(data: TensorDictBase, batch_dims: int) -> Schema:
    """Return feature shape and dtype of every leaf after the first ``batch_dims`` dimensions."""
    return {key: (value.shape[batch_dims:], value.dtype) for key, value in leaves_of(data)}


def schema_difference(stored: Schema, given: Schema) -> str:
    """Describe how ``given`` differs from ``stored``."""
    parts = [f"{key!r} is missing" for key in stored.keys() - given.keys()]
    parts += [f"{key!r} is new" for key in given.keys() - stored.keys()]
    parts += [
        f"{key!r} is {list(given[key][0])} {given[key][1]}, stored is {list(stored[key][0])} {stored[key][1]}"
        for key in stored.keys() & given.keys()
        if stored[key] != given[key]
    ]
    return "; ".join(sorted(parts))


def time_axis(data: TensorDictBase, time_dim: int | None) -> int:
    """Find the time dimension: the explicit one, else the one named ``"time"``; never a guess.

    Raises:
        ValueError: ``time_dim`` is out of range, or there is neither an explicit nor a named dimension.
    """
    if time_dim is not None:
        if not -data.ndim <= time_dim < data.ndim:
            raise ValueError(f"time_dim={time_dim} does not exist in batch size {list(data.shape)}.")
        return time_dim % data.ndim
    if "time" in data.names:
        return int(data.names.index("time"))
    raise ValueError(
        f"Cannot tell which dimension of batch size {list(data.shape)} is time (names {data.names}). "
        'Name it, e.g. rollout.names = [None, "time"], or pass time_dim=.'
    )


def time_major(data: TensorDictBase, time_dim: int | None) -> TensorDictBase:
    """View ``data`` as ``[T, N]``; a single time dimension ``[T]`` becomes ``[T, 1]``.

    Raises:
        ValueError: time is unknown, or there are more than two batch dimensions.
    """
    axis = time_axis(data, time_dim)
    if data.ndim == 1:
        return data.unsqueeze(1)
    if data.ndim != 2:
        raise ValueError(f"Expected a rollout [N, T] or [T, N], got batch size {list(data.shape)}.")
    return data if axis == 0 else data.transpose(0, 1)
