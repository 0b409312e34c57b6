"""Action masks: the allowed actions in the entry ``action_mask`` of an observation or of info."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torch.nn import functional as F
from torchrl.data import Binary, Categorical, MultiCategorical, OneHot, TensorSpec

from torchrl_lightning._core.keys import ACTION_MASK, OBSERVATION
from torchrl_lightning.environments.env_errors import EnvironmentFault


class ActionMask:
    """Sample and check actions under masks ``[*B, A]``.

    A 0 forbids an action. The masks of several choices are concatenated.

    Args:
        action: The spec of one action.

    Raises:
        ValueError: The action is not made of discrete choices.

    Examples:
        >>> ActionMask(Categorical(3)).draw(torch.tensor([[False, True, False]]))
        tensor([1])
    """

    def __init__(self, action: TensorSpec) -> None:
        self.dtype, self.shape, self.one_hot = action.dtype, action.shape, isinstance(action, OneHot)
        self.sizes = _sizes(action)
        if not self.sizes:
            raise ValueError(
                f"the actions of an environment that observes {ACTION_MASK!r} must be discrete choices, got {action}. "
                f"{_REMEDY}"
            )
        self._first = torch.tensor([0, *accumulate(self.sizes)][:-1])

    def draw(self, mask: Tensor) -> Tensor:
        """Sample allowed actions ``[*B, *action]`` with equal probabilities."""
        choices = torch.stack([draw_choice(part) for part in mask.split(self.sizes, -1)], -1)
        if self.one_hot:
            return F.one_hot(choices.squeeze(-1), self.sizes[0]).to(self.dtype)
        return choices.reshape(*mask.shape[:-1], *self.shape).to(self.dtype)

    def nonempty_mask(self, mask: Tensor) -> Tensor:
        """Return masks ``[*B, A]``; the mask of a choice without an allowed action becomes all true."""
        return torch.cat([nonempty_mask(part) for part in mask.split(self.sizes, -1)], -1).to(mask.dtype)

    def check(self, mask: Tensor) -> None:
        """Validate masks ``[N, A]``; raise EnvironmentFault if a choice has no allowed action."""
        for part in mask.split(self.sizes, -1):
            blocked = ~part.bool().any(-1)
            if bool(blocked.any()):
                row = int(blocked.nonzero()[0, 0])
                raise EnvironmentFault(
                    f"environment {row} returned an {ACTION_MASK!r} without an allowed action, expected at least one. "
                    "End the episode there, or allow an action that does nothing."
                )

    def check_actions(self, action: Tensor, mask: Tensor, step: int) -> None:
        """Validate actions ``[N, *action]``; raise ValueError if masks ``[N, A]`` forbid an action."""
        choices = action.reshape(len(mask), -1)
        if self.one_hot:
            choices = choices.to(torch.int8).argmax(-1, keepdim=True)
        allowed = mask.gather(-1, choices.long() + self._first.to(mask.device)).bool().all(-1)
        if not bool(allowed.all()):
            row = int((~allowed).nonzero()[0, 0])
            raise ValueError(
                f"At step {step} of the rollout, the {ACTION_MASK!r} of environment {row} forbids the action "
                f"{action[row].tolist()}: the policy or the demonstration ignores the mask. PPO, A2C, V-trace, "
                "REINFORCE and DQN use it; for other agents remove it by drop=[action_mask] of an EnvironmentRecipe."
            )


def allowed_values(values: Tensor, mask: Tensor) -> Tensor:
    """Return values or logits ``[*B, A]``, with minus infinity for choices that a mask ``[*B, A]`` forbids."""
    return values.masked_fill(~mask.bool(), -math.inf)


def draw_choice(mask: Tensor) -> Tensor:
    """Sample the index ``[*B]`` of an allowed choice under masks ``[*B, A]``, with equal probabilities."""
    weights = mask.bool().to(torch.float32)
    return (weights / torch.empty_like(weights).exponential_()).argmax(-1)


def nonempty_mask(mask: Tensor) -> Tensor:
    """Return a boolean mask; rows without an allowed choice, as at the end of an episode, become all true.

    Examples:
        >>> nonempty_mask(torch.tensor([[1, 0], [0, 0]], dtype=torch.int8))
        tensor([[ True, False],
                [ True,  True]])
    """
    allowed = mask.bool()
    return allowed | ~allowed.any(-1, keepdim=True)


def action_mask(observation: Mapping[Any, Any], action: TensorSpec) -> ActionMask | None:
    """Return the ActionMask for observation specs with an entry ``action_mask``; None without this entry.

    Raises:
        ValueError: The entry does not fit the actions.
    """
    spec = observation.get(ACTION_MASK, None)
    if spec is None:
        return None
    mask = ActionMask(action)
    shape = (sum(mask.sizes),)
    if not is_mask(spec, action):
        raise ValueError(
            f"the observation {ACTION_MASK!r} must have shape {list(shape)} and integers or booleans, as in "
            f"MultiBinary({shape[0]}), got shape {list(spec.shape)} and dtype {spec.dtype}. {_REMEDY}"
        )
    return mask


def is_mask(spec: TensorSpec | None, action: TensorSpec) -> bool:
    """Return whether a spec has one integer or flag for each possible choice of an action."""
    sizes = _sizes(action)
    return spec is not None and bool(sizes) and spec.shape == (sum(sizes),) and not spec.dtype.is_floating_point


def _sizes(action: TensorSpec) -> list[int]:
    if isinstance(action, MultiCategorical):
        return [int(n) for n in action.nvec.flatten()]
    if isinstance(action, Binary):
        return [2] * action.shape.numel()
    if isinstance(action, OneHot):
        return [int(action.space.n)]
    return [int(action.space.n)] * action.shape.numel() if isinstance(action, Categorical) else []


_REMEDY = (
    "Correct it, or rename the entry by rename={action_mask: another_name} of an EnvironmentRecipe, or remove it by "
    "drop=[action_mask]."
)


class ActionMaskFromInfo(gym.Wrapper[Any, Any, Any, Any]):
    """Copy the action mask from ``info["action_mask"]`` into the observation.

    An observation that is not a Dict becomes the entry ``observation``.

    Args:
        env: an environment with a Discrete action space.

    Raises:
        ValueError: the action space is not Discrete.

    Examples:
        >>> env = ActionMaskFromInfo(gym.make("Taxi-v4"))
        >>> observation, _ = env.reset(seed=0)
        >>> observation["action_mask"].tolist()
        [1, 1, 0, 0, 0, 0]
    """

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        if not isinstance(env.action_space, spaces.Discrete):
            raise ValueError(f"ActionMaskFromInfo needs a Discrete action space, got {env.action_space}.")
        space = env.observation_space
        entries = dict(space.spaces) if isinstance(space, spaces.Dict) else {OBSERVATION: space}
        self._is_dict = isinstance(space, spaces.Dict)
        mask = spaces.MultiBinary(int(env.action_space.n))
        self.observation_space = spaces.Dict({**entries, ACTION_MASK: mask})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        observation, info = self.env.reset(seed=seed, options=options)
        return self._with_mask(observation, info), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Take a step."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._with_mask(observation, info), reward, terminated, truncated, info

    def _with_mask(self, observation: Any, info: dict[str, Any]) -> dict[str, Any]:
        mask = info.get(ACTION_MASK)
        if mask is None:
            raise EnvironmentFault(
                f"ActionMaskFromInfo needs {ACTION_MASK!r} in info, got {sorted(info)}. Remove the wrapper."
            )
        entries = observation if self._is_dict else {OBSERVATION: observation}
        return {**entries, ACTION_MASK: np.asarray(mask, np.int8)}
