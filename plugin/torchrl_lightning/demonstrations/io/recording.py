"""Record the episodes of a policy as demonstrations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from gymnasium.vector import VectorEnv, VectorWrapper
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase, TransformedEnv

from torchrl_lightning._core.keys import ACTION, REWARD
from torchrl_lightning._core.validators import boolean, integer
from torchrl_lightning.collectors import GymnasiumCollector, TorchRLCollector
from torchrl_lightning.collectors.episodes import MANY_STEPS
from torchrl_lightning.collectors.vector_stepper import VectorStepper
from torchrl_lightning.demonstrations._faults import DemonstrationFault
from torchrl_lightning.demonstrations.task_check import recipe_metadata
from torchrl_lightning.demonstrations.trajectory import Demonstration, action_error, end_flags, newest_frames
from torchrl_lightning.environments import (
    EnvironmentSpecs,
    close_environment,
    environment_specs,
    make_environment,
)
from torchrl_lightning.environments.actions import ActionFormat
from torchrl_lightning.environments.backends.torchrl_env import ActionConversion
from torchrl_lightning.environments.env_errors import EnvironmentFault
from torchrl_lightning.environments.policy_calls import Policy
from torchrl_lightning.environments.recipe import as_recipe

_FRAMES_PER_BATCH = 64  # steps that are collected in one batch
Environment = str | Callable[..., Any]


def demonstration_specs(env: Environment | VectorEnv | EnvBase) -> tuple[EnvironmentSpecs, int]:
    """Return the specs and the frame skip for demonstrations of an environment. The specs omit its frame stack.

    Args:
        env: The id, recipe, factory or instance of a Gymnasium or TorchRL environment. The frame skip is the recipe's
            ``action_repeat``, or 1 without a recipe.

    Examples:
        >>> from torchrl_lightning import EnvironmentRecipe
        >>> specs, frame_skip = demonstration_specs(EnvironmentRecipe("CartPole-v1", action_repeat=2))
        >>> specs.action.n, frame_skip
        (2, 2)
    """
    if isinstance(env, VectorEnv | EnvBase):  # the caller closes its own instance
        return environment_specs(env), 1
    recipe = as_recipe(env)
    if recipe.frame_stack > 1:
        env = recipe.with_settings(frame_stack=1)
    environment = make_environment(env, 1, vectorization="sync", own_number=True)
    try:
        return environment_specs(environment), recipe.action_repeat
    finally:
        close_environment(environment)


def record_demonstrations(
    env: Environment, policy: Policy, num_episodes: int, *, seed: int | None = None, clip_actions: bool = False
) -> Iterator[Demonstration]:
    """Play episodes one after another and yield each episode as a demonstration.

    Rewards equal the rewards in training, so that training can replay the demonstration. Only the newest image of a
    recipe's frame stack is stored. The metadata contain the ``environment``, its ``recipe`` (as JSON) and its
    ``frame_stack``. If a Gymnasium environment reports ``is_success`` or ``success`` in its last info, the metadata
    also contain ``success`` (bool).

    Args:
        env: The id, recipe or factory of a Gymnasium or TorchRL environment.
        policy: Reads a TensorDict ``[1]`` and writes ``action``.
        num_episodes: The number of episodes.
        seed: The seed of environment and policy; None draws a seed.
        clip_actions: Clip actions to their Box for the environment and the demonstration. Otherwise an action outside
            the Box is an error.

    Raises:
        EnvironmentFault: An episode has not ended after 100,000 steps.
        DemonstrationFault: An action is outside the environment's action space. This error is also a ValueError.
        ValueError: The environment or the policy's actions do not fit, or ``clip_actions`` is set for an action space
            that is not a Box.

    Examples:
        >>> from tensordict.nn import TensorDictModule
        >>> left = TensorDictModule(lambda x: x[..., 0].long() * 0, in_keys=["observation"], out_keys=["action"])
        >>> [demonstration.length for demonstration in record_demonstrations("CartPole-v1", left, 3, seed=0)]
        [8, 8, 10]
    """
    integer(num_episodes, "num_episodes")
    specs, frame_skip = demonstration_specs(env)
    if boolean(clip_actions, "clip_actions") and not specs.action_format.is_box:
        raise DemonstrationFault(
            f"clip_actions must be False for actions without a Box, got True for {specs.action}. Leave it out."
        )
    recipe = as_recipe(env)
    metadata: dict[str, str | int | float] = {**recipe_metadata(recipe)}
    if recipe.frame_stack > 1:
        metadata["frame_stack"] = recipe.frame_stack
    for number, (episode, success) in enumerate(_collect_episodes(env, policy, num_episodes, seed, clip_actions)):
        steps, last_observation = (newest_frames(part, specs).clone() for part in (episode, episode["next"][-1:]))
        steps[REWARD] = episode[REWARD].clone()
        steps[ACTION] = _stored_actions(episode[ACTION], specs, clip_actions, number)
        yield Demonstration(
            steps,
            last_observation[0],
            frame_skip=frame_skip,
            name=f"{metadata['environment']}, episode {number}",
            metadata={**metadata, **success},
            **end_flags(episode["next"], -1),
        )


def _stored_actions(actions: Tensor, specs: EnvironmentSpecs, clip: bool, episode: int) -> Tensor:
    """Return the actions ``[T, *A]`` to store; with ``clip``, the clipped actions that the environment received."""
    action_format = specs.action_format
    if clip:
        received = action_format.to_environment(actions.cpu().numpy(), clip=True)
        return torch.from_numpy(action_format.from_environment(received)).to(actions.dtype)
    if (error := action_error(actions, specs)) is not None:
        remedy = (
            "Record with clip_actions=True, or clip in the policy" if action_format.is_box else "Correct the policy"
        )
        raise DemonstrationFault(f"In episode {episode} {error}. {remedy}.")
    return actions.clone()


class _SuccessRecorder(VectorWrapper):
    """Record the success that one environment reports at the end of each episode."""

    def __init__(self, env: VectorEnv) -> None:
        super().__init__(env)
        self.episode_metadata: list[dict[str, bool]] = []  # metadata of the episodes that were not yielded yet
        self._stepper = VectorStepper(env)

    def step(self, actions: Any) -> Any:
        step = _, _, terminated, truncated, info = self.env.step(actions)
        if terminated[0] or truncated[0]:
            success = self._stepper.successes(info)
            self.episode_metadata.append({} if success is None else {"success": bool(success[0])})
        return step


def _collect_episodes(
    env: Environment, policy: Policy, count: int, seed: int | None, clip_actions: bool
) -> Iterator[tuple[TensorDictBase, dict[str, bool]]]:
    environment = make_environment(env, 1, vectorization="sync", own_number=True)
    try:
        episode_metadata: list[dict[str, bool]] = []
        collector: Any
        if isinstance(environment, EnvBase):
            if clip_actions:
                action_format = replace(ActionFormat.from_spec(environment.action_spec_unbatched), clip=True)
                environment = TransformedEnv(environment, ActionConversion(action_format), auto_unwrap=False)
            frames = _FRAMES_PER_BATCH * environment.batch_size.numel()
            collector = TorchRLCollector(environment, policy, frames_per_batch=frames, seed=seed)
        else:
            recorder = _SuccessRecorder(environment)
            episode_metadata = recorder.episode_metadata
            options: dict[str, Any] = {"seed": seed, "clip_actions": clip_actions}
            collector = GymnasiumCollector(recorder, policy, frames_per_batch=_FRAMES_PER_BATCH, **options)
        parts: list[TensorDictBase] = []
        for batch in collector:
            steps, begin = batch[0], 0
            for end in (steps["next", "done"].flatten().nonzero().flatten() + 1).tolist():
                yield torch.cat([*parts, steps[begin:end]]), episode_metadata.pop(0) if episode_metadata else {}
                count -= 1
                if not count:
                    return
                parts, begin = [], end
            parts.append(steps[begin:])
            if sum(map(len, parts)) >= MANY_STEPS:
                raise EnvironmentFault(
                    f"No episode has ended after {MANY_STEPS} steps: an environment without an end needs a time limit "
                    "(time_limit= of an EnvironmentRecipe)."
                )
    finally:
        close_environment(environment)
