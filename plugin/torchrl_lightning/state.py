"""Checks of saved states, before anything is changed: the vocabulary of :class:`~torchrl_lightning.stated.Stated`.

A schema maps each entry to a :data:`Check`, which returns what is taken over for a value, or raises a ``ValueError``
that names the entry, what came and what was expected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

Check = Callable[..., Any]
"""Return what is taken over for a value, or refuse it; called with the value, its name, and :class:`Here`."""

Bound = Any
"""A bound of a check: itself, the name of an attribute of the part, or a function of the part and its state."""

LARGEST = 1 << 60
"""Counters stay below: sums and products with them do not overflow."""


class Here(NamedTuple):
    """Where a value is checked: the part that is to take it, and the whole state."""

    part: Any = None
    state: Mapping[str, Any] = {}

    def __call__(self, bound: Bound) -> Any:
        """Return the value of a bound."""
        if isinstance(bound, str):
            return getattr(self.part, bound)
        return bound(self.part, self.state) if callable(bound) else bound


NOWHERE = Here()


def check_state(
    state: Any, schema: Mapping[str, Check], owner: str, version: int | None = None, part: Any = None
) -> dict[str, Any]:
    """Refuse a state of ``owner`` that lacks an entry of the schema, or in which one is wrong; others are ignored.

    With a version, ``schema_version`` must be that. The ValueError names the entry, what came and what was expected.
    Return what is taken over for each entry. Bounds may refer to the part and to the state's earlier entries.
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
    here, values = (Here(part, state),) if part is not None else (), {}
    for name, check in schema.items():
        try:
            values[name] = check(state[name], repr(name), *here)
        except _WrongError as error:
            raise ValueError(f"The {owner} state is foreign: {error}.") from None
    return values


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


def whole(low: Bound = 0, high: Bound = LARGEST) -> Check:
    """Expect an integer in ``[low, high]``."""

    def check(value: Any, name: str, here: Here = NOWHERE) -> int:
        least, most = here(low), here(high)
        if type(value) is not int or not least <= value <= most:
            expected = f"an integer of at least {least}" + (f", at most {most}" if most < LARGEST else "")
            raise wrong(value, name, expected)
        return value

    return check


def number(low: Bound = -math.inf, high: Bound = math.inf) -> Check:
    """Expect a finite number in ``[low, high]``, and return it as a float."""

    def check(value: Any, name: str, here: Here = NOWHERE) -> float:
        least, most = here(low), here(high)
        if type(value) not in (int, float) or not math.isfinite(value) or not least <= value <= most:
            expected = "a finite number" + (f" of at least {least}" if least > -math.inf else "")
            raise wrong(value, name, expected + (f", at most {most}" if most < math.inf else ""))
        return float(value)

    return check


def flag(value: Any, name: str, here: Here = NOWHERE) -> bool:
    """Expect True or False."""
    if type(value) is not bool:
        raise wrong(value, name, "True or False")
    return value


def anything(value: Any, name: str, here: Here = NOWHERE) -> Any:
    """Expect the entry, and check its value elsewhere."""
    return value


def mapping(value: Any, name: str, here: Here = NOWHERE) -> Mapping[str, Any]:
    """Expect a dict, whose content another schema checks."""
    if not isinstance(value, Mapping) or any(not isinstance(key, str) for key in value):
        raise wrong(value, name, "a dict with strings as keys")
    return value


def sequence(value: Any, name: str, here: Here = NOWHERE) -> list[Any] | tuple[Any, ...]:
    """Expect a list, whose content is checked elsewhere."""
    if not isinstance(value, list | tuple):
        raise wrong(value, name, "a list")
    return value


def same(own: Any, owner: str, argument: str | None = None) -> Check:
    """Expect the value that a part, the owner, was built with as ``argument`` (named as the entry by default)."""

    def check(value: Any, name: str, here: Here = NOWHERE) -> Any:
        if type(value) is not type(own) or value != own:
            name = name.strip("'")
            raise ValueError(
                f"The state has {name}={described(value)}, this {owner} has {argument or name}={described(own)}; "
                f"build it with {argument or name}={described(value)} or load a matching state."
            )
        return value

    return check


def tensor(
    dtype: torch.dtype | str,
    *shape: Bound,
    low: Bound = None,
    high: Bound = None,
    anywhere: bool = False,
) -> Check:
    """Expect a tensor of values in ``[low, high]``, where a size may be None for any, on the CPU if not anywhere."""

    def check(value: Any, name: str, here: Here = NOWHERE) -> Tensor:
        kind, sizes, least, most = here(dtype), [here(size) for size in shape], here(low), here(high)
        fits = (
            isinstance(value, Tensor)
            and value.layout is torch.strided
            and not value.is_meta
            and value.dtype == kind
            and (anywhere or value.is_cpu)
            and value.ndim == len(sizes)
            and all(size in (None, found) for size, found in zip(sizes, value.shape, strict=True))
        )
        if not fits:
            expected = ", ".join("any" if size is None else str(size) for size in sizes)
            raise wrong(value, name, f"a tensor [{expected}] of {str(kind).removeprefix('torch.')}")
        found: Tensor = value
        if not found.numel():
            return found
        if (least is not None and not (found >= least).all()) or (most is not None and not (found <= most).all()):
            limits = f"{_limit(least)} to {_limit(most)}"
            raise _WrongError(
                f"{name} holds values from {found.min().item()} to {found.max().item()}, expected {limits}"
            )
        return found

    return check


def array(dtype: torch.dtype, *shape: Bound, low: Bound = None, high: Bound = None) -> Check:
    """Expect a tensor as :func:`tensor` does, and return it as an array."""
    check_tensor = tensor(dtype, *shape, low=low, high=high)

    def check(value: Any, name: str, here: Here = NOWHERE) -> NDArray[Any]:
        found: NDArray[Any] = check_tensor(value, name, here).numpy()
        return found

    return check


def _limit(limit: float | Tensor | None) -> str:
    if limit is None:
        return "anything"
    return "what the other entries allow" if isinstance(limit, Tensor) else f"{limit}"


def generator(device: torch.device | str) -> Check:
    """Expect the state of a generator on a device."""

    def check(value: Any, name: str, here: Here = NOWHERE) -> Tensor:
        try:
            state: Tensor = value.cpu()
            torch.Generator(device).set_state(state)
        except (RuntimeError, TypeError, AttributeError) as error:
            reason = str(error).split("\n")[0]
            raise _WrongError(f"{name} is no state of a random generator on {device} ({reason})") from error
        return state

    return check
