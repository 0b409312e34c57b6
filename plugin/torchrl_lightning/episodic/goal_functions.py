"""Evaluate goal functions, such as an environment's ``compute_reward``, on many steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lightning.environments.copies import copied
from torchrl_lightning.environments.env_errors import EnvironmentFault
from torchrl_lightning.environments.goals import GoalFunction

NEAR = 0.05
Goals = Any
"""A tensor, or a TensorDict of nested goals; the step dimensions come first."""
Lookup = Callable[[str], Tensor | None]
"""A function of a name: the entry ``[n, ...]`` of the observations after the steps, or None."""
_FEW = 16  # number of steps to test if a function is vectorised


class _Untouchable:
    """A goal that raises an error if a function compares or reads it."""

    def _raise(self, *args: Any, **options: Any) -> Any:
        raise TypeError("a goal was read")

    __array__ = __bool__ = __float__ = __int__ = __len__ = __iter__ = __getitem__ = __hash__ = _raise
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __str__ = __repr__ = _raise


class EnvironmentFunction:
    """Call a goal environment's function on a whole batch if it is vectorised, as most are, else step by step.

    Args:
        function: an environment's ``compute_reward`` or ``compute_terminated``.
    """

    def __init__(self, function: GoalFunction) -> None:
        self._function = function
        self._takes_many: bool | None = None  # None until the first batch

    def depends_on_goals(self) -> bool:
        """Return False if the function ignores the goals, as in environments that never end at a goal."""
        try:
            self._function(_Untouchable(), _Untouchable(), StepInfo(lambda name: None))
        except NotImplementedError:
            return False
        except Exception:  # the function read a goal
            return True
        return False

    def __call__(self, achieved: Goals, desired: Goals, lookup: Lookup, dims: int) -> Tensor:
        """Return one number for each step; the goals start with ``dims`` step dimensions."""
        if dims > 1:
            rewards = self(achieved.flatten(0, dims - 1), desired.flatten(0, dims - 1), _flat(lookup, dims), 1)
            return rewards.view(achieved.shape[:dims])
        # Pass copies, because the environment may modify them.
        reached, wanted = copied(_arrays(achieved)), copied(_arrays(desired))
        if self._takes_many is None and len(achieved) > 1:
            first, goals = _part(reached, slice(_FEW)), _part(wanted, slice(_FEW))
            rows = self._of_each(copied(first), copied(goals), lookup)
            few = copied(first), copied(goals), StepInfo(lookup, slice(_FEW))
            try:
                many = np.asarray(self._function(*few), dtype=np.float64)
                self._takes_many = many.size == rows.size and np.allclose(many.reshape(-1), rows, equal_nan=True)
            except Exception:  # the function is not vectorised
                self._takes_many = False
        if not self._takes_many:
            return torch.from_numpy(self._of_each(reached, wanted, lookup))
        return torch.as_tensor(self._function(reached, wanted, StepInfo(lookup, slice(None))))

    def _of_each(self, achieved: Any, desired: Any, lookup: Lookup) -> Any:
        pairs = enumerate(zip(_each(achieved), _each(desired), strict=True))
        try:
            return np.array([float(self._function(one, other, StepInfo(lookup, row))) for row, (one, other) in pairs])
        except EnvironmentFault:
            raise
        except Exception as error:
            name = getattr(self._function, "__name__", "The function")
            raise EnvironmentFault(
                f"{name} of the environment cannot be called with the goals of stored steps and their info: "
                f"{type(error).__name__}: {error}. Give HindsightRelabel one that can, as compute_reward= or "
                "compute_terminated=."
            ) from error


def _arrays(goals: Goals) -> Any:
    """Return goals as an array, or as nested dicts of arrays."""
    if isinstance(goals, Tensor):
        return goals.numpy(force=True)
    return {key: _arrays(goals.get(key)) for key in goals.keys()}  # noqa: SIM118


def _part(goals: Any, part: Any) -> Any:
    return {key: _part(entry, part) for key, entry in goals.items()} if isinstance(goals, dict) else goals[part]


def _each(goals: Any) -> Any:
    """Return an iterable over the goals of single steps."""
    if not isinstance(goals, dict):
        return goals
    entry = goals
    while isinstance(entry, dict):
        entry = next(iter(entry.values()))
    return [_part(goals, row) for row in range(len(entry))]


def _flat(lookup: Lookup, dims: int) -> Lookup:
    def found(name: str) -> Tensor | None:
        entry = lookup(name)
        return None if entry is None else entry.flatten(0, dims - 1)

    return found


class GivenFunction:
    """Call a user's function of tensors."""

    def __init__(self, function: GoalFunction) -> None:
        self._function = function

    def __call__(self, achieved: Tensor, desired: Tensor, lookup: Lookup, dims: int) -> Any:
        """Return the result of the function."""
        return self._function(achieved, desired, StepInfo(lookup))


class StepInfo(dict[str, Any]):
    """The ``info`` of stored steps: the entries of the observation after each step, by name."""

    def __init__(self, lookup: Lookup, rows: Any = None) -> None:
        self._lookup, self._rows = lookup, rows

    def __missing__(self, name: str) -> Any:
        if (entry := self._lookup(name)) is None:
            raise EnvironmentFault(
                f"the rewards of relabelled goals need info[{name!r}], which stored steps do not have. Show it as an "
                f"entry of the observation named {name!r}, or give HindsightRelabel a compute_reward= without it."
            )
        return entry if self._rows is None else copied(entry.numpy(force=True)[self._rows])

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._lookup(name) is not None

    def get(self, name: str, default: Any = None) -> Any:
        """Return the entry of a name, or the default."""
        return default if self._lookup(name) is None else self[name]


class DefaultReward:
    """Return 0 for steps within a distance of 0.05 of their goals, and -1 for the others."""

    def __call__(self, achieved: Tensor, desired: Tensor, lookup: Lookup, dims: int) -> Tensor:
        """Return one number for each step; call it only if :func:`default_reward_error` returns None."""
        if achieved.shape != desired.shape:  # scalars of the shapes [] and [1]
            desired = desired.reshape(achieved.shape)
        if not achieved.dtype.is_floating_point:
            achieved = achieved if achieved.is_complex() else achieved.double()
        difference = achieved - desired
        distance = difference.abs() if difference.ndim == dims else torch.linalg.vector_norm(difference, dim=-1)
        return (distance < NEAR).float() - 1


def default_reward_error(*goals: tuple[torch.Size, torch.dtype] | None) -> str | None:
    """Return an error message if the default reward cannot compare the goals, else None.

    Args:
        goals: shape without step dimensions and dtype of achieved and desired goals; None for nested goals.
    """
    for form in goals:
        if form is None:
            kind = "nested entries"
        else:
            shape, dtype = form
            if shape in ((), (1,)) or (len(shape) == 1 and dtype in _COMPARED):
                continue
            kind = f"{str(dtype).removeprefix('torch.')} of shape {list(shape)}"
        return (
            f"goals must be floating-point vectors or single numbers for the default reward of HindsightRelabel, got "
            f"{kind}. Give it a compute_reward= that compares these goals."
        )
    sizes = [form[0] for form in goals if form is not None]
    if len({size.numel() for size in sizes}) > 1:
        return (
            f"goals must have as many numbers as what is achieved for the default reward of HindsightRelabel, got the "
            f"shapes {' and '.join(str(list(size)) for size in sizes)}. Give it a goal= that makes goals of what is "
            "achieved, or a compute_reward= that compares them."
        )
    return None


def form_of(goals: Goals, dims: int) -> tuple[torch.Size, torch.dtype] | None:
    """Return shape and dtype of goals after their ``dims`` step dimensions; None for nested goals."""
    return None if isinstance(goals, TensorDictBase) else (goals.shape[dims:], goals.dtype)


_COMPARED = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


def check_recomputed(what: str, stored: Tensor, found: Tensor) -> None:
    """Validate that a function reproduces the stored numbers.

    Raises:
        EnvironmentFault: a number differs; the message contains both numbers.
    """
    expected, found = stored.double().cpu(), found.double()
    wrong = ~torch.isclose(found, expected, rtol=1e-3, atol=1e-3)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        name = f"compute_{what}"
        raise EnvironmentFault(
            f"hindsight would learn from other numbers than the environment gives: of {len(found)} stored steps "
            f"{int(wrong.sum())} have another {what} than {name} gives for their own goals, such as "
            f"{expected[row].item():g} where it gives {found[row].item():g}. Give HindsightRelabel a {name}= that "
            "gives what the environment does, its wrappers included."
        )
