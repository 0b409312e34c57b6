"""Copy the arrays that pass between an environment and this package, because an environment may reuse its arrays."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.utils import RecordConstructorArgs
from gymnasium.wrappers import (
    DelayObservation,
    FrameStackObservation,
    MaxAndSkipObservation,
    RepeatAction,
    StickyAction,
)

# Gymnasium's wrappers that keep observations, and wrappers that pass an action more than once.
_KEEP_OBSERVATIONS = (FrameStackObservation, DelayObservation)
_PASS_AGAIN = (RepeatAction, StickyAction, MaxAndSkipObservation)


def copied(value: Any) -> Any:
    """Return a copy of an array, or of the arrays in dicts, lists and tuples; return other values unchanged.

    Examples:
        >>> array = np.zeros(2)
        >>> copy = copied({"position": array, "name": "a"})
        >>> array += 1
        >>> copy
        {'position': array([0., 0.]), 'name': 'a'}
    """
    if isinstance(value, np.ndarray):
        if value.dtype != object:
            return value.copy()
        elements = np.empty_like(value)
        for index in np.ndindex(value.shape):
            elements[index] = copied(value[index])
        return elements
    if isinstance(value, dict | Mapping):  # dict first, because its check is faster
        return {key: copied(entry) for key, entry in value.items()}
    if isinstance(value, tuple):
        entries = map(copied, value)
        return value._make(entries) if hasattr(value, "_make") else tuple(entries)
    if isinstance(value, list):
        return [copied(entry) for entry in value]
    if isinstance(value, np.generic) or not hasattr(value, "__array__"):
        return value
    return value.clone() if hasattr(value, "clone") else copy.deepcopy(value)  # a tensor, or another library's array


class FreshActions(gym.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """Pass a copy of each action to the environment, because the outer wrapper passes the same array again."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        RecordConstructorArgs.__init__(self)
        gym.Wrapper.__init__(self, env)

    def step(self, action: Any) -> Any:
        """Step the environment."""
        return self.env.step(copied(action))


class FreshObservations(gym.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """Return a copy of each observation, because the outer wrapper keeps it beyond the next step."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        RecordConstructorArgs.__init__(self)
        gym.Wrapper.__init__(self, env)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        observation, info = self.env.reset(seed=seed, options=options)
        return copied(observation), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return copied(observation), reward, terminated, truncated, info


def copy_beneath_wrappers(env: gym.Env[Any, Any]) -> None:
    """Insert copying wrappers below Gymnasium's wrappers that keep observations or pass an action again.

    Examples:
        >>> env = FrameStackObservation(gym.make("CartPole-v1"), 2)
        >>> copy_beneath_wrappers(env)
        >>> type(env.env).__name__
        'FreshObservations'
    """
    while isinstance(env, gym.Wrapper):
        inner = env.env
        if isinstance(env, _KEEP_OBSERVATIONS) and not isinstance(inner, FreshObservations):
            env.env = FreshObservations(inner)
        elif isinstance(env, _PASS_AGAIN) and not isinstance(inner, FreshActions):
            is_number = isinstance(inner.action_space, spaces.Discrete)
            env.env = inner if is_number else FreshActions(inner)
        env = inner
