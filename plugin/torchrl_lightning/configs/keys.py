"""Convert nested keys from YAML, which has lists but no tuples."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from tensordict.utils import NestedKey

T = TypeVar("T")


def nested_key(key: Any) -> NestedKey:
    """Convert a key of a config to a TensorDict key: a list of strings becomes a tuple, a string stays a string.

    Raises:
        TypeError: the key is neither a string nor a non-empty sequence of strings.

    Example:
        >>> nested_key(["next", "reward"]), nested_key(["action"]), nested_key("action")
        (('next', 'reward'), 'action', 'action')
    """
    if isinstance(key, str):
        return key
    if not isinstance(key, list | tuple) or not key or not all(isinstance(part, str) for part in key):
        raise TypeError(f"a key is a string or a list of strings, such as [next, reward]; got {key!r}.")
    return key[0] if len(key) == 1 else tuple(key)


def nested_keys(keys: Any) -> tuple[NestedKey, ...]:
    """Convert a list of keys to a tuple of TensorDict keys; each element is a key of its own.

    Raises:
        TypeError: ``keys`` is not a list, or one of its elements is not a key.

    Example:
        >>> nested_keys(["recurrent_state", ["agent", "recurrent_state"]])
        ('recurrent_state', ('agent', 'recurrent_state'))
    """
    if not isinstance(keys, list | tuple):
        raise TypeError(f"expected a list of keys, such as [observation, [next, reward]]; got {keys!r}.")
    return tuple(nested_key(key) for key in keys)


def with_keys(component: Callable[..., T]) -> Callable[..., T]:
    """Wrap a constructor so that its ``*_key`` and ``*_keys`` arguments may come from YAML.

    Example:
        >>> make = with_keys(lambda **kwargs: kwargs)
        >>> make(reward_key=["next", "reward"], recurrent_keys=["h", ["h", "c"]], gamma=0.9)
        {'reward_key': ('next', 'reward'), 'recurrent_keys': ('h', ('h', 'c')), 'gamma': 0.9}
    """

    @functools.wraps(component, updated=())
    def make(*args: Any, **kwargs: Any) -> T:
        for name, value in kwargs.items():
            if value is None:
                continue
            if name.endswith("_key"):
                kwargs[name] = nested_key(value)
            elif name.endswith("_keys"):
                kwargs[name] = nested_keys(value)
        return component(*args, **kwargs)

    return make
