"""Checks of a buffer's parameters, the same when it is built and when they are changed."""

from __future__ import annotations

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
