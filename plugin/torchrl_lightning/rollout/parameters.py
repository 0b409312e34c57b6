"""Parameters of buffers and transforms: their checks, and how a constructor passes on what it does not use itself."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from torchrl_lightning.entries import nested_keys


def check_keys(value: Any, name: str) -> Any:
    """Return a list of keys as a tuple.

    Raises:
        TypeError: one of them is no key.
    """
    return nested_keys(value)


def any_object(value: Any, name: str) -> Any:
    """Return the value as it is."""
    return value


def passed_on(base: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Select from a constructor's arguments, its ``locals()``, those that the constructor of ``base`` takes.

    A subclass writes every argument out once, in its signature, for readers, ``help`` and configs, and names only its
    own ones again.

    Example:
        >>> class Point:
        ...     def __init__(self, x, y=0):
        ...         self.x, self.y = x, y
        >>> class Named(Point):
        ...     def __init__(self, name, x, y=0):
        ...         super().__init__(**passed_on(Point, locals()))
        ...         self.name = name
        >>> Named("a", 1, y=2).__dict__
        {'x': 1, 'y': 2, 'name': 'a'}
    """
    return {name: given[name] for name in _argument_names(base) if name in given}


@functools.cache
def _argument_names(base: type) -> tuple[str, ...]:
    return tuple(inspect.signature(base.__init__).parameters)[1:]  # type: ignore[misc]
