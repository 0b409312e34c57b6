"""Record episodes that a person plays with the keyboard as demonstrations."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import reduce
from operator import getitem
from typing import Any

import gymnasium as gym
import numpy as np

from torchrl_lightning._core.validators import boolean, integer
from torchrl_lightning.collectors.vector_stepper import success_of
from torchrl_lightning.demonstrations.io.recording import Environment, demonstration_specs
from torchrl_lightning.demonstrations.io.safetensors_files import demonstration_from_arrays
from torchrl_lightning.demonstrations.task_check import recipe_metadata
from torchrl_lightning.demonstrations.trajectory import Demonstration
from torchrl_lightning.environments.actions import ActionFormat
from torchrl_lightning.environments.recipe import as_recipe
from torchrl_lightning.environments.specs import observation_leaves


def play_demonstrations(
    env: Environment,
    num_episodes: int,
    *,
    keys: Mapping[str, Any] | None = None,
    noop: Any = 0,
    seed: int | None = None,
    clip_actions: bool = False,
) -> Iterator[Demonstration]:
    """Open a window in which a person plays an environment, and yield the finished episodes as demonstrations.

    The window belongs to Gymnasium's ``play``, which requires pygame from the extra ``video`` and an environment that
    renders ``rgb_array``. Press Escape or close the window to stop before ``num_episodes``.

    Args:
        env: The id, recipe or factory of a Gymnasium environment. The frame stack of a recipe is ignored.
        num_episodes: The number of episodes.
        keys: The action of each key or key combination (``"ad"``). None uses the environment's own mapping.
        noop: The action if no key is pressed.
        seed: The seed of the environment.
        clip_actions: Clip actions to their Box, and record the clipped actions. Otherwise an action outside the action
            space is an error.

    Raises:
        ValueError: The environment is a TorchRL environment, cannot be rendered, or does not define keys. Or ``noop``
            or the action of a key is not in the action space.
        ImportError: pygame is missing.

    Examples:
        >>> for demonstration in play_demonstrations("CartPole-v1", 1, keys={"a": 0, "d": 1}):  # doctest: +SKIP
        ...     print(demonstration.length)
    """
    integer(num_episodes, "num_episodes")
    try:
        from gymnasium.utils.play import MissingKeysToAction, play
    except gym.error.DependencyNotInstalled as error:
        raise ImportError("The keyboard needs pygame: pip install 'torchrl-lightning[video]'.") from error
    specs, frame_skip = demonstration_specs(env)
    recipe = as_recipe(env).with_settings(frame_stack=1)
    gym_env = recipe(render_mode="rgb_array")
    if not isinstance(gym_env, gym.Env):
        raise ValueError("env must be a Gymnasium environment for the keyboard, got a TorchRL environment.")
    action_format = specs.action_format
    recorder = _Recorder(gym_env, num_episodes, seed, clip_actions)
    try:
        keys_to_action = (
            None
            if keys is None
            else {
                tuple(combination): recorder.action(keys[combination], f"keys[{combination!r}]") for combination in keys
            }
        )
        play(recorder, keys_to_action=keys_to_action, noop=recorder.action(noop, "noop"))
    except MissingKeysToAction as error:
        raise ValueError("the environment does not define keys. Set them, for example keys={a: 0, d: 1}.") from error
    finally:
        gym_env.close()
    for number, (observations, actions, rewards, terminated, truncated, success) in enumerate(recorder.episodes):
        metadata, stacked = {**recipe_metadata(recipe), **success}, {}
        for path, key, _ in observation_leaves(gym_env.observation_space):
            leaf = np.array([reduce(getitem, path, observation) for observation in observations])
            stacked[key] = leaf.reshape(-1, *specs.observation[key].shape)
        end_flags, recorded_actions = (
            {"terminated": terminated, "truncated": truncated},
            action_format.from_environment(np.array(actions)),
        )
        fields: dict[str, Any] = {"is_human": True, "frame_skip": frame_skip, "metadata": metadata, **end_flags}
        yield demonstration_from_arrays(
            specs, stacked, recorded_actions, rewards, name=f"{metadata['environment']}, episode {number}", **fields
        )


class _Recorder(gym.Wrapper[Any, Any, Any, Any]):
    """Record the steps, seed only the first episode, and stop the game after a number of episodes."""

    def __init__(self, env: gym.Env[Any, Any], count: int, seed: int | None, clip: bool) -> None:
        super().__init__(env)
        self._action_format, self._clip = ActionFormat.from_space(env.action_space), clip
        if boolean(clip, "clip_actions") and not self._action_format.is_box:
            raise ValueError(
                f"clip_actions must be False for actions without a Box, got True for {env.action_space}. Leave it out."
            )
        self.episodes: list[tuple[list[Any], list[Any], list[float], bool, bool, dict[str, bool]]] = []
        self._count, self._seed = count, seed
        self._observations: list[Any] = []
        self._actions: list[Any] = []
        self._rewards: list[float] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        # Gymnasium's play would start all episodes with the same seed.
        observation, info = self.env.reset(seed=self._seed, options=options)
        self._seed = None
        self._observations, self._actions, self._rewards = [copy.deepcopy(observation)], [], []
        return observation, info

    def action(self, value: Any, name: str) -> Any:
        """Return an action in the environment's format; raise a ValueError if it is not in the action space."""
        action_format, space = self._action_format, self.env.action_space
        with suppress(TypeError, ValueError, OverflowError):  # the value is not an array of this shape
            values = np.broadcast_to(np.asarray(value), (1, *action_format.shape))
            action = action_format.single(
                action_format.to_environment(action_format.from_environment(values), self._clip)
            )
            if (action_format.dtype.kind == "f" or np.array_equal(values, np.rint(values))) and space.contains(action):
                return action
        remedy = "Choose another one, or pass clip_actions=True" if action_format.is_box else "Choose another one"
        raise ValueError(f"{name} must be an action of {space}, got {value!r}. {remedy}.")

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        action = self.action(action, "the action of a key of the environment")
        # Store and pass copies: the environment may change its action, and Gymnasium's play reuses the object.
        self._actions.append(copy.deepcopy(action))
        observation, reward, terminated, truncated, info = self.env.step(copy.deepcopy(action))
        self._observations.append(copy.deepcopy(observation))
        self._rewards.append(float(reward))
        if terminated or truncated:
            end_flags, success = (bool(terminated), bool(truncated)), success_of(info)
            metadata = {} if success is None else {"success": bool(np.all(success))}
            self.episodes.append((self._observations, self._actions, self._rewards, *end_flags, metadata))
            if len(self.episodes) == self._count:
                import pygame

                pygame.event.post(pygame.event.Event(pygame.QUIT))
        return observation, reward, terminated, truncated, info
