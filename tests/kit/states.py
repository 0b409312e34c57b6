"""Saved states: comparison, a round trip through a file, and mutations as in an edited file or another release."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import reduce
from operator import getitem
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDictBase, is_tensorclass
from torch import Tensor

Path = tuple[Any, ...]
GONE = object()


def entries(state: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every entry of nested dicts and lists with its path."""
    if path:
        yield path, state
    if isinstance(state, dict | list | tuple):
        for key in state if isinstance(state, dict) else range(len(state)):
            yield from entries(state[key], (*path, key))


def others(value: Any) -> Iterator[Any]:
    """Yield replacements for a value: other types, other shapes and other numbers."""
    yield from (GONE, None, "text", -1, [], torch.zeros(2, 3))
    if isinstance(value, dict):
        yield from ({}, [value])
    elif isinstance(value, bool):
        yield from (int(value), not value)
    elif isinstance(value, int):
        yield from (value + 1, -value - 2, 1 << 70, float(value), True, torch.tensor(value))
    elif isinstance(value, float):
        yield from (value / 2, -value - 1, float("nan"), float("inf"), str(value))
    elif isinstance(value, str):
        yield from (value + "x", "cuda:93")
    elif isinstance(value, Tensor):
        yield from (value.unsqueeze(-1), value.to(torch.complex64), value.to_sparse() if value.ndim else 0)
        if value.ndim and len(value):
            yield from (value[:0], value[:-1], torch.cat([value, value[-1:]]), value.flip(0))
        if value.dtype in (torch.int64, torch.float32, torch.float64) and value.numel():
            yield from (torch.full_like(value, number) for number in (-1, 9, 1 << 61))
            yield value.to(torch.int16 if value.is_floating_point() else torch.float32)


def changed(state: Any, path: Path, other: Any) -> Any:
    """Return a copy of a state with another value at one path. The copy shares all other entries."""
    if not path:
        return other
    copied = list(state) if isinstance(state, tuple) else copy.copy(state)
    if other is GONE and len(path) == 1:
        del copied[path[0]]
    else:
        copied[path[0]] = changed(copied[path[0]], path[1:], other)
    return copied


def mutants(state: dict[str, Any], within: tuple[str | Path, ...] = ()) -> Iterator[tuple[Path, Any, Any]]:
    """Yield single mutations of a state: the path, the old value and the new value."""
    places = [(each,) if isinstance(each, str) else each for each in within] or [()]
    for path, value in entries(state):
        if any(path[: len(place)] == place for place in places):
            for other in others(value):
                yield path, value, other


def equal(one: Any, other: Any) -> bool:
    """Return True if two states are equal."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and one == other


def differences(one: Any, other: Any, at: str = "") -> list[str]:
    """Return the differences between two states, or two results of :func:`plain`."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [each for key in one for each in differences(one[key], other[key], f"{at}.{key}")]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [each for number, pair in pairs for each in differences(*pair, f"{at}[{number}]")]
    return [] if equal(one, other) else [f"{at}: {one} and {other}"]


def check_mutants(
    part: Any, state: dict[str, Any], use: Callable[[Any], Any] | None = None, within: tuple[str | Path, ...] = ()
) -> None:
    """Load every mutant: it raises a ValueError and changes nothing, or it is restored and usable.

    Args:
        part: An object that loads states; its present state differs from ``state``.
        state: A valid state.
        use: Uses the part; may raise a ValueError or RuntimeError with a reason.
        within: The entries of the state to mutate, or paths in it; all by default.
    """
    kept, problems = copy.deepcopy(part.state_dict()), []
    for path, value, other in mutants(state, within):
        what = f"{path} is {'gone' if other is GONE else ' '.join(str(other).split())}"
        try:
            part.load_state_dict(changed(state, path, other))
        except ValueError as error:
            if not equal(part.state_dict(), kept):
                problems.append(f"{what}: half loaded, {error}")
                part.load_state_dict(kept)
            continue
        except Exception as error:
            problems.append(f"{what}: {type(error).__name__}: {error}")
        else:
            held, is_whole = at(kept, path), isinstance(path[-1], str)  # the numbers of a list are one entry
            is_other = of_one_kind(value, other) and not equal(other, held)
            if is_whole and is_other and equal(at(part.state_dict(), path), held):
                problems.append(f"{what}: not restored")
            try:
                if use is not None:
                    use(part)
            except (ValueError, RuntimeError) as error:
                if type(error) not in (ValueError, RuntimeError):
                    problems.append(f"{what}: taken, then {error!r}")
            except Exception as error:
                problems.append(f"{what}: taken, then {error!r}")
        part.load_state_dict(kept)
    assert not problems, f"{len(problems)} problems:\n" + "\n".join(problems[:60])
    part.load_state_dict(state)
    assert equal(part.state_dict(), state)


def of_one_kind(value: Any, other: Any) -> bool:
    """Return True for two dense tensors of the same dtype and shape, and for two scalars or texts of the same type."""
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return value.dtype == other.dtype and value.shape == other.shape and not other.is_sparse
    return type(value) is type(other) and not isinstance(value, dict | list | tuple)


def at(state: Any, path: Path) -> Any:
    """Return the entry of a state at a path, or ``GONE``."""
    try:
        return reduce(getitem, path, state)
    except (KeyError, IndexError, TypeError):
        return GONE


def check_refused(part: Any, state: Any, says: str) -> None:
    """Load an invalid state; check the error message, and that the part does not change."""
    kept = copy.deepcopy(part.state_dict())
    with pytest.raises(ValueError, match=says):
        part.load_state_dict(state)
    assert not differences(part.state_dict(), kept)


def plain(value: Any) -> Any:
    """Convert the output of a part to nested dicts, lists, tensors and numbers, which :func:`equal` compares."""
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if is_tensorclass(value):
        value = value.to_tensordict()
    if isinstance(value, TensorDictBase):
        return {str(key): plain(entry) for key, entry in sorted(value.items(), key=str)}
    return value
