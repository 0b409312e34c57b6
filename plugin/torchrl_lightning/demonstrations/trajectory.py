"""One demonstration: the recorded steps of an episode and their metadata."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning._core.keys import ACTION, REWARD
from torchrl_lightning._core.tree import check_tensordict, key_text, keyed_leaves, path_of, to_tensordict, tree_of
from torchrl_lightning._core.validators import boolean, integer, optional
from torchrl_lightning.demonstrations.task_check import check_task
from torchrl_lightning.environments.recipe import EnvironmentRecipe
from torchrl_lightning.environments.specs import EnvironmentSpecs

_CLIP = "clip the actions before they are recorded, as record_demonstrations(..., clip_actions=True) does"


@dataclass(frozen=True, eq=False)
class Demonstration:
    """An episode to replay or to learn from: ``T`` steps of one environment, without a frame stack.

    Attributes:
        steps: A TensorDict ``[T]`` with the observations before each step under the environment's keys, ``action``, and
            ``("next", "reward")`` (``[T, 1]``, float32). It is stored as a locked TensorDict with the same tensors.
        last_observation: The observation after the last step, a TensorDict ``[]`` with the same keys; None if unknown.
        is_human: False for an episode of the agent.
        value: The largest estimated state value in the episode; ``-inf`` without an estimate.
        frame_skip: The number of environment frames in one step.
        name: The source of the episode, for messages.
        terminated: True if the last step terminated the episode; None if unknown. If None, the metadata entry
            ``terminated`` of older files is used.
        truncated: True if the last step reached a limit; None if unknown. Both flags are False if the recorded episode
            continued after the last step.
        metadata: Further information about the episode.
        serial: The number that the storage assigned. It stays the same if ``value`` changes.

    Raises:
        TypeError: ``steps`` or ``last_observation`` is not a TensorDict of dense tensors.
        ValueError: The steps are empty, lack an action or a reward, differ in length, or have a number that is not
            finite. Or another field is invalid.

    Examples:
        >>> steps = TensorDict({"observation": torch.zeros(3, 4), "action": torch.tensor([0, 1, 1])}, [3])
        >>> steps["next", "reward"] = torch.tensor([[0.0], [0.0], [1.0]])
        >>> demonstration = Demonstration(steps, is_human=True, name="goal.npz")
        >>> demonstration.length, demonstration.total_reward, demonstration.observation_keys
        (3, 1.0, ['observation'])
    """

    steps: TensorDictBase
    last_observation: TensorDictBase | None = None
    is_human: bool = False
    value: float = -math.inf
    frame_skip: int = 1
    terminated: bool | None = None
    truncated: bool | None = None
    name: str = "without a name"
    metadata: Mapping[str, str | int | float] = field(default_factory=dict)
    serial: int | None = None

    def __post_init__(self) -> None:
        owner = f"Demonstration {self.name!r}"
        steps = _to_dense(self.steps, owner)
        fields: dict[str, object] = {"steps": _validate_steps(steps, owner), "metadata": dict(self.metadata)}
        if self.last_observation is not None:
            fields["last_observation"] = _validate_last_observation(
                steps, _to_dense(self.last_observation, owner), owner
            )
        fields["is_human"] = boolean(self.is_human, f"{owner}: is_human")
        fields["value"] = _validate_value(self.value, owner)
        fields["frame_skip"] = integer(self.frame_skip, f"{owner}: frame_skip")
        fields["terminated"], fields["truncated"] = self._validate_ends(owner)
        for key, entry in self.metadata.items():
            if type(key) is not str or type(entry) not in (str, int, float, bool):
                raise ValueError(f"{owner}: metadata must map names to strings or numbers, got {key!r}: {entry!r}.")
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def _validate_ends(self, owner: str) -> tuple[bool | None, bool | None]:
        terminated, truncated = (
            optional(boolean)(value, f"{owner}: {name}")
            for name, value in (("terminated", self.terminated), ("truncated", self.truncated))
        )
        recorded = self.metadata.get("terminated")
        if terminated is None and truncated is None and type(recorded) is bool:
            return recorded, not recorded
        if (terminated is None) != (truncated is None):
            raise ValueError(
                f"{owner}: terminated={terminated} and truncated={truncated}; set both, or neither if they are unknown."
            )
        return terminated, truncated

    @property
    def ends(self) -> tuple[bool, bool]:
        """Return the flags (terminated, truncated) for the last step if the demonstration is used as an episode.

        The recorded flags are returned if one of them is True. If both are False, the episode was cut and is
        truncated, so that the value of the next state counts. If the end is unknown, the episode is terminated, so that
        the value of an unknown next state is not used.
        """
        if self.terminated is None:
            return True, False
        return self.terminated, bool(self.truncated) or not self.terminated

    @property
    def length(self) -> int:
        """The number of steps."""
        return self.steps.batch_size[0]

    @property
    def rewards(self) -> Tensor:
        """The reward of each step, ``[T]``."""
        rewards: Tensor = self.steps.get(REWARD)
        return rewards.squeeze(-1)

    @property
    def total_reward(self) -> float:
        """The sum of the rewards."""
        return self.rewards.sum(dtype=torch.float64).item()

    @property
    def observation_keys(self) -> list[NestedKey]:
        """The keys of the observation."""
        return _observation_keys(self.steps)

    def truncate(self, length: int) -> Demonstration:
        """Return the first ``length`` steps as views of the same tensors.

        If this drops steps, the next observation becomes the last observation, and both end flags are False.

        Raises:
            ValueError: ``length`` is not in ``[1, T]``.

        Examples:
            >>> steps = TensorDict({"observation": torch.arange(3.0)[:, None], "action": torch.tensor([0, 1, 1])}, [3])
            >>> steps["next", "reward"] = torch.tensor([[0.0], [1.0], [0.0]])
            >>> short = Demonstration(steps).truncate(2)
            >>> short.length, short.last_observation["observation"].item()
            (2, 2.0)
        """
        if not 1 <= length <= self.length:
            raise ValueError(f"length must be between 1 and {self.length}, the steps of {self.name!r}, got {length}.")
        if length == self.length:
            return self
        last = self.steps[length].select(*self.observation_keys)
        return replace(self, steps=self.steps[:length], last_observation=last, terminated=False, truncated=False)

    def with_value(self, *, value: float, serial: int | None) -> Demonstration:
        """Return the same steps with another value and serial number, without checking the steps again.

        Raises:
            ValueError: ``value`` is NaN or infinity.
        """
        copied = copy.copy(self)
        object.__setattr__(copied, "value", _validate_value(value, f"Demonstration {self.name!r}"))
        object.__setattr__(copied, "serial", serial)
        return copied

    def copied(self) -> Demonstration:
        """Return a copy with copied tensors and without a serial number."""
        last = self.last_observation
        last = None if last is None else last.clone()
        return replace(self, steps=self.steps.clone(), last_observation=last, serial=None)

    def fits(self, specs: EnvironmentSpecs, frame_skip: int = 1, recipe: EnvironmentRecipe | None = None) -> None:
        """Check that the demonstration can be replayed in an environment.

        Args:
            specs: The environment's specs, without a frame stack.
            frame_skip: The number of frames in one step of the environment.
            recipe: The environment's recipe. If both recipes are known, their ids and rewards must be equal. The
                recipe's ``demonstrations_of`` can allow other environments.

        Raises:
            ValueError: The recipe, the frame skip, the observation keys, or the shape or dtype of an entry differs, or
                the environment does not accept an action. The message names the demonstration and the difference.

        Examples:
            >>> from torchrl_lightning import environment_specs, make_vector_env
            >>> steps = TensorDict({"observation": torch.zeros(1, 4), "action": torch.tensor([2])}, [1])
            >>> steps["next", "reward"] = torch.zeros(1, 1)
            >>> Demonstration(steps, name="goal.npz").fits(environment_specs(make_vector_env("CartPole-v1", 1)))
            Traceback (most recent call last):
                ...
            ValueError: Demonstration 'goal.npz': 'action' has values from 2 to 2, which are not all in the \
environment's action space (...); replay it in the environment that it was recorded in.
        """
        owner, remedy = f"Demonstration {self.name!r}", "replay it in the environment that it was recorded in"
        check_task(owner, self.metadata, recipe)
        if self.frame_skip != frame_skip:
            raise ValueError(
                f"{owner} has frame_skip={self.frame_skip}, but the environment has frame_skip={frame_skip}. "
                "Set the environment's frame_skip to the first number, or record it again."
            )
        expected = {path_of(key): specs.observation[key] for key in specs.keys}
        paths = {path_of(key) for key in self.observation_keys}
        if set(expected) != paths:
            raise ValueError(
                f"{owner} has the observation entries {_format_paths(paths)}, but the environment has "
                f"{_format_paths(set(expected))}; {remedy}."
            )
        for path, spec in {**expected, (ACTION,): specs.action}.items():
            leaf = self.steps.get(path)
            if leaf.shape[1:] != spec.shape or leaf.dtype != spec.dtype:
                raise ValueError(
                    f"{owner}: {key_text(path)} is {list(leaf.shape[1:])} of {_format_dtype(leaf.dtype)} in each step, "
                    f"but {list(spec.shape)} of {_format_dtype(spec.dtype)} in the environment; {remedy}."
                )
        actions = self.steps.get(ACTION)
        if (error := action_error(actions, specs)) is not None:
            raise ValueError(f"{owner}: {error}; {remedy if specs.action_format.low is None else _CLIP}.")


def end_flags(following: TensorDictBase, *index: int) -> dict[str, Any]:
    """Return ``terminated`` and ``truncated`` for a :class:`Demonstration` from a row of the ``"next"`` entries."""
    flags = {name: following.get(name, None) for name in ("terminated", "truncated", "done")}
    if flags["terminated"] is None:
        return {"terminated": None, "truncated": None}
    terminated, truncated, done = (flag if flag is None else bool(flag[index].any()) for flag in flags.values())
    return {"terminated": terminated, "truncated": done and not terminated if truncated is None else truncated}


def newest_frames(rows: TensorDictBase, specs: EnvironmentSpecs) -> TensorDict:
    """Return the observation entries ``[*B]`` of rows without copying. Stacks are reduced to their newest image.

    Args:
        rows: Rows with observations of the environment.
        specs: The environment's specs, without a frame stack.

    Examples:
        >>> from torchrl_lightning import EnvironmentSpecs
        >>> from torchrl.data import Categorical, Composite, Unbounded
        >>> specs = EnvironmentSpecs(Composite(image=Unbounded((2, 2))), Categorical(2), 1)
        >>> rows = TensorDict({"image": torch.arange(3.0)[None, :, None, None].expand(1, 3, 2, 2)}, [1])
        >>> newest_frames(rows, specs)["image"].tolist()
        [[[2.0, 2.0], [2.0, 2.0]]]
    """
    newest = TensorDict({}, rows.batch_size)
    for key in specs.keys:
        newest[key] = _newest(rows.get(key), specs.observation[key].shape, rows.ndim)
    return newest


def _newest(leaf: Tensor, shape: torch.Size, batch_dims: int) -> Tensor:
    if leaf.ndim - batch_dims > len(shape):  # [H, W] became [K, H, W]
        return leaf.select(batch_dims, -1)
    for dim, (stacked, single) in enumerate(zip(leaf.shape[batch_dims:], shape, strict=True), batch_dims):
        if stacked != single:
            leaf = leaf.narrow(dim, stacked - single, single)
    return leaf


def _to_dense(data: TensorDictBase, owner: str) -> TensorDict:
    try:
        check_tensordict(data)
        return to_tensordict(tree_of(data), torch.Size([]))
    except TypeError as error:
        raise TypeError(f"{owner}: {error}") from None


def _validate_steps(steps: TensorDict, owner: str) -> TensorDict:
    for key in (ACTION, REWARD):
        if not isinstance(steps.get(key), Tensor):
            keys = [name for name, _ in keyed_leaves(steps)]
            raise ValueError(f"{owner} lacks the entry {key!r}; it has {keys}.")
    if not _observation_keys(steps):
        raise ValueError(f"{owner} has no observation. Store the observation before each step next to {ACTION!r}.")
    reward = steps.get(REWARD)
    if reward.ndim != 2 or reward.shape[1] != 1 or reward.dtype != torch.float32:
        raise ValueError(
            f"{owner}: {REWARD!r} is {list(reward.shape)} of {_format_dtype(reward.dtype)}, expected [T, 1] of float32."
        )
    length = len(reward)
    if not length:
        raise ValueError(f"{owner} has no steps.")
    for key, leaf in keyed_leaves(steps):
        if leaf.shape[:1] != (length,):
            raise ValueError(f"{owner}: {key!r} must have {length} rows, one for each reward, got {list(leaf.shape)}.")
        _check_finite(leaf, key, owner)
    return to_tensordict(tree_of(steps), torch.Size([length])).lock_()


def _validate_last_observation(steps: TensorDict, last: TensorDict, owner: str) -> TensorDict:
    keys = _observation_keys(steps)
    if {path_of(key) for key, _ in keyed_leaves(last)} != {path_of(key) for key in keys}:
        last_keys = [key for key, _ in keyed_leaves(last)]
        raise ValueError(f"{owner}: last_observation has the entries {last_keys}, the steps have {keys}.")
    for key, leaf in keyed_leaves(last):
        steps_leaf = steps.get(key)
        if leaf.shape != steps_leaf.shape[1:] or leaf.dtype != steps_leaf.dtype:
            raise ValueError(
                f"{owner}: {key!r} of last_observation is {list(leaf.shape)} of {_format_dtype(leaf.dtype)}, "
                f"in each step {list(steps_leaf.shape[1:])} of {_format_dtype(steps_leaf.dtype)}."
            )
        _check_finite(leaf, key, f"{owner}: last_observation")
    return last.lock_()


def _validate_value(value: float, owner: str) -> float:
    if not value < math.inf:
        raise ValueError(f"{owner}: value must be a finite number, or -inf without an estimate, got {value}.")
    return float(value)


def _check_finite(leaf: Tensor, key: NestedKey, owner: str) -> None:
    if (leaf.is_floating_point() or leaf.is_complex()) and not leaf.isfinite().all():
        index = (~leaf.isfinite()).nonzero()[0].tolist()
        raise ValueError(f"{owner}: {key!r} contains NaN or infinity, first at {index}.")


def action_error(actions: Tensor, specs: EnvironmentSpecs) -> str | None:
    """Return a message about the first of the actions ``[T, *A]`` that the environment rejects, or None.

    An action may exceed the bounds of a Box by a rounding error.
    """
    action_format = specs.action_format
    if action_format.low is None or action_format.high is None:
        if specs.action.expand(actions.shape).is_in(actions):
            return None
        space = " ".join(repr(specs.action).split())
        return (
            f"{ACTION!r} has values from {actions.min()} to {actions.max()}, which are not all in the environment's "
            f"action space ({space})"
        )
    outside = np.argwhere(action_format.outside(actions))
    if not len(outside):
        return None
    step, *entry = outside[0].tolist()
    low, high, value = (
        bound[tuple(entry)]
        for bound in (action_format.low, action_format.high, actions[step].reshape(action_format.shape))
    )
    return (
        f"{ACTION!r}{[step, *entry]} is {value:g}, outside of [{low:g}, {high:g}], the bounds of the environment's "
        "action space"
    )


def _observation_keys(steps: TensorDictBase) -> list[NestedKey]:
    return [key for key, _ in keyed_leaves(steps) if key != ACTION and path_of(key)[0] != "next"]


def _format_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _format_paths(paths: set[tuple[str, ...]]) -> str:
    return ", ".join(sorted(map(key_text, paths)))
