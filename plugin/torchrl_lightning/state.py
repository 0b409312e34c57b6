"""Schemas of saved states: one for each part, checked before anything is changed.

A schema maps each entry to a :data:`Check`, which raises a ``ValueError`` that names the entry, what came and what was
expected. Nothing here changes anything, so that a part can check a state, let the other parts check theirs, and only
then take it over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Check = Callable[[Any, str], None]
"""Refuse a value; the second argument is its name."""

LARGEST = 1 << 60
"""Counters stay below: sums and products with them do not overflow."""


def check_state(state: Any, schema: Mapping[str, Check], owner: str, version: int | None = None) -> None:
    """Refuse a state of ``owner`` that lacks an entry of the schema, or in which one is wrong; others are ignored.

    With a version, ``schema_version`` must be that. The ValueError names the entry, what came and what was expected.
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"The {owner} state is foreign: it is {described(state)}, expected a dict.")
    if version is not None and (type(found := state.get("schema_version")) is not int or found != version):
        raise ValueError(
            f"The {owner} state has schema version {described(found)}, this release reads version {version}."
        )
    if missing := sorted(set(schema) - set(state)):
        found = sorted(map(str, state))
        raise ValueError(f"The {owner} state is foreign: it lacks {', '.join(missing)}; it has {found}.")
    for name, check in schema.items():
        try:
            check(state[name], repr(name))
        except _WrongError as error:
            raise ValueError(f"The {owner} state is foreign: {error}.") from None


class _WrongError(ValueError):
    """An entry is wrong; the message lacks whose."""


def wrong(value: Any, name: str, expected: str) -> ValueError:
    """Return the error of a check: what came, and what was expected."""
    return _WrongError(f"{name} is {described(value)}, expected {expected}")


def described(value: Any) -> str:
    """Describe a value in a few words: tensors by dtype and shape, numbers and texts as they are."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    if value is None or isinstance(value, bool | int | float | str):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:60]}..."
    return f"a {type(value).__name__}"


def whole(low: int = 0, high: int = LARGEST) -> Check:
    """Expect an integer in ``[low, high]``."""

    def check(value: Any, name: str) -> None:
        if type(value) is not int or not low <= value <= high:
            raise wrong(value, name, f"an integer of at least {low}" + (f", at most {high}" if high < LARGEST else ""))

    return check


def number(low: float = -math.inf) -> Check:
    """Expect a finite number of at least ``low``."""

    def check(value: Any, name: str) -> None:
        if type(value) not in (int, float) or not math.isfinite(value) or value < low:
            raise wrong(value, name, "a finite number" + (f" of at least {low}" if low > -math.inf else ""))

    return check


def flag(value: Any, name: str) -> None:
    """Expect True or False."""
    if type(value) is not bool:
        raise wrong(value, name, "True or False")


def anything(value: Any, name: str) -> None:
    """Expect the entry, and check its value elsewhere."""


def mapping(value: Any, name: str) -> None:
    """Expect a dict, whose content another schema checks."""
    if not isinstance(value, Mapping) or any(not isinstance(key, str) for key in value):
        raise wrong(value, name, "a dict with strings as keys")


def sequence(value: Any, name: str) -> None:
    """Expect a list, whose content is checked elsewhere."""
    if not isinstance(value, list | tuple):
        raise wrong(value, name, "a list")


def same(here: Any, owner: str, argument: str | None = None) -> Check:
    """Expect the value that a part, the owner, was built with as ``argument`` (named as the entry by default)."""

    def check(value: Any, name: str) -> None:
        if type(value) is not type(here) or value != here:
            name = name.strip("'")
            raise ValueError(
                f"The state has {name}={described(value)}, this {owner} has {argument or name}={described(here)}; "
                f"build it with {argument or name}={described(value)} or load a matching state."
            )

    return check


def tensor(
    dtype: torch.dtype,
    *shape: int | None,
    low: float | Tensor | None = None,
    high: float | Tensor | None = None,
    anywhere: bool = False,
) -> Check:
    """Expect a tensor of values in ``[low, high]``, where a size may be None for any, on the CPU if not anywhere."""
    sizes = ", ".join("any" if size is None else str(size) for size in shape)
    expected = f"a tensor [{sizes}] of {str(dtype).removeprefix('torch.')}"

    def check(value: Any, name: str) -> None:
        fits = (
            isinstance(value, Tensor)
            and value.layout is torch.strided
            and not value.is_meta
            and value.dtype == dtype
            and (anywhere or value.is_cpu)
            and value.ndim == len(shape)
            and all(size in (None, found) for size, found in zip(shape, value.shape, strict=True))
        )
        if not fits:
            raise wrong(value, name, expected)
        if not value.numel():
            return
        if (low is not None and not (value >= low).all()) or (high is not None and not (value <= high).all()):
            found = f"{value.min().item()} to {value.max().item()}"
            limits = f"{_limit(low)} to {_limit(high)}"
            raise _WrongError(f"{name} holds values from {found}, expected {limits}")

    return check


def _limit(limit: float | Tensor | None) -> str:
    if limit is None:
        return "anything"
    return "what the other entries allow" if isinstance(limit, Tensor) else f"{limit}"


def generator(device: torch.device | str) -> Check:
    """Expect the state of a generator on a device."""

    def check(value: Any, name: str) -> None:
        try:
            torch.Generator(device).set_state(value.cpu())
        except (RuntimeError, TypeError, AttributeError) as error:
            reason = str(error).split("\n")[0]
            raise _WrongError(f"{name} is no state of a random generator on {device} ({reason})") from error

    return check
