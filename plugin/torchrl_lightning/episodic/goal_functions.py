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

GOAL_DISTANCE = 0.05
Goals = Any
"""A tensor, or a TensorDict of nested goals; the step dimensions come first."""
Lookup = Callable[[str], Tensor | None]
"""A function that returns the named entry ``[n, ...]`` of the observations after the steps, or None."""
_NUM_PROBED = 16  # number of steps to test if a function is vectorised


class _UnreadableGoal:
    """A goal that raises an error if a function compares or reads it."""

    def _raise(self, *args: Any, **options: Any) -> Any:
        raise TypeError("a goal was read")

    __array__ = __bool__ = __float__ = __int__ = __len__ = __iter__ = __getitem__ = __hash__ = _raise
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __str__ = __repr__ = _raise


class EnvironmentFunction:
    """Call a goal environment's function on a whole batch or, if the function is not vectorised, on each step.

    Args:
        function: an environment's ``compute_reward`` or ``compute_terminated``.
    """

    def __init__(self, function: GoalFunction) -> None:
        self._function = function
        self._is_vectorized: bool | None = None  # None until the first batch

    def depends_on_goals(self) -> bool:
        """Return False if the function ignores the goals, as in environments that never end at a goal."""
        try:
            self._function(_UnreadableGoal(), _UnreadableGoal(), StepInfo(lambda name: None))
        except NotImplementedError:
            return False
        except Exception:  # the function read a goal
            return True
        return False

    def __call__(self, achieved: Goals, desired: Goals, lookup: Lookup, dims: int) -> Tensor:
        """Return one number for each step; the goals start with ``dims`` step dimensions."""
        if dims > 1:
            lookup = _flatten_lookup(lookup, dims)
            rewards = self(achieved.flatten(0, dims - 1), desired.flatten(0, dims - 1), lookup, 1)
            return rewards.view(achieved.shape[:dims])
        # Pass copies, because the environment may modify them.
        achieved_arrays, desired_arrays = copied(_arrays(achieved)), copied(_arrays(desired))
        if self._is_vectorized is None and len(achieved) > 1:
            probed = slice(_NUM_PROBED)
            first_achieved, first_desired = _index_goals(achieved_arrays, probed), _index_goals(desired_arrays, probed)
            expected = self._call_per_step(copied(first_achieved), copied(first_desired), lookup)
            arguments = copied(first_achieved), copied(first_desired), StepInfo(lookup, probed)
            try:
                results = np.asarray(self._function(*arguments), dtype=np.float64).reshape(-1)
                self._is_vectorized = results.size == expected.size and np.allclose(results, expected, equal_nan=True)
            except Exception:  # the function is not vectorised
                self._is_vectorized = False
        if not self._is_vectorized:
            return torch.from_numpy(self._call_per_step(achieved_arrays, desired_arrays, lookup))
        return torch.as_tensor(self._function(achieved_arrays, desired_arrays, StepInfo(lookup, slice(None))))

    def _call_per_step(self, achieved: Any, desired: Any, lookup: Lookup) -> Any:
        pairs = enumerate(zip(_iterate_goals(achieved), _iterate_goals(desired), strict=True))
        try:
            return np.array([float(self._function(*goals, StepInfo(lookup, row))) for row, goals in pairs])
        except EnvironmentFault:
            raise
        except Exception as error:
            name = getattr(self._function, "__name__", "The function")
            raise EnvironmentFault(
                f"{name} of the environment must accept the goals and the info of stored steps, got "
                f"{type(error).__name__}: {error}. Pass another function as compute_reward= or compute_terminated= to "
                "HindsightRelabel."
            ) from error


def _arrays(goals: Goals) -> Any:
    """Return goals as an array, or as nested dicts of arrays."""
    if isinstance(goals, Tensor):
        return goals.numpy(force=True)
    return {key: _arrays(goals.get(key)) for key in goals.keys()}  # noqa: SIM118


def _index_goals(goals: Any, index: Any) -> Any:
    return (
        {key: _index_goals(entry, index) for key, entry in goals.items()} if isinstance(goals, dict) else goals[index]
    )


def _iterate_goals(goals: Any) -> Any:
    """Return an iterable over the goals of single steps."""
    if not isinstance(goals, dict):
        return goals
    entry = goals
    while isinstance(entry, dict):
        entry = next(iter(entry.values()))
    return [_index_goals(goals, row) for row in range(len(entry))]


def _flatten_lookup(lookup: Lookup, dims: int) -> Lookup:
    def flat_lookup(name: str) -> Tensor | None:
        entry = lookup(name)
        return None if entry is None else entry.flatten(0, dims - 1)

    return flat_lookup


class UserFunction:
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
                f"the rewards of relabelled goals need info[{name!r}], but stored steps do not have it. Add an entry "
                f"{name!r} to the observation, or pass compute_reward= without it to HindsightRelabel."
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
        return (distance < GOAL_DISTANCE).float() - 1


def default_reward_error(*specs: tuple[torch.Size, torch.dtype] | None) -> str | None:
    """Return an error message if the default reward cannot compare the goals, else None.

    Args:
        specs: shape and dtype of the achieved and of the desired goals, without step dimensions; None for nested goals.
    """
    for spec in specs:
        if spec is None:
            description = "nested entries"
        else:
            shape, dtype = spec
            if shape in ((), (1,)) or (len(shape) == 1 and dtype in _COMPARABLE_DTYPES):
                continue
            description = f"{str(dtype).removeprefix('torch.')} of shape {list(shape)}"
        return (
            f"goals must be floating-point vectors or single numbers for the default reward of HindsightRelabel, got "
            f"{description}. Pass compute_reward= that compares these goals."
        )
    sizes = [spec[0] for spec in specs if spec is not None]
    if len({size.numel() for size in sizes}) > 1:
        return (
            f"goals must have the size of achieved goals for the default reward of HindsightRelabel, got the shapes "
            f"{' and '.join(str(list(size)) for size in sizes)}. Pass goal= that converts achieved goals to "
            "desired goals, or compute_reward= that compares them."
        )
    return None


def goal_spec(goals: Goals, dims: int) -> tuple[torch.Size, torch.dtype] | None:
    """Return shape and dtype of goals after their ``dims`` step dimensions; None for nested goals."""
    return None if isinstance(goals, TensorDictBase) else (goals.shape[dims:], goals.dtype)


_COMPARABLE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


def check_reproduced(quantity: str, stored: Tensor, computed: Tensor) -> None:
    """Validate that a function reproduces the stored numbers.

    Raises:
        EnvironmentFault: a number differs; the message contains both numbers.
    """
    expected, computed = stored.double().cpu(), computed.double()
    differs = ~torch.isclose(computed, expected, rtol=1e-3, atol=1e-3)
    if differs.any():
        row = int(differs.nonzero()[0])
        name = f"compute_{quantity}"
        raise EnvironmentFault(
            f"{name} must return the stored {quantity} for the stored goals, but differs in {int(differs.sum())} of "
            f"{len(computed)} steps: stored is {expected[row].item():g}, {name} returns {computed[row].item():g}. Pass "
            f"{name}= to HindsightRelabel that returns the values of the environment including its wrappers."
        )
