"""Play complete episodes of a policy for evaluation."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from tensordict import TensorDict
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_lightning._core.modules import EvaluationMode
from torchrl_lightning._core.rank_stop import rank_stop
from torchrl_lightning._core.validators import boolean, integer
from torchrl_lightning.collectors.rollout_loop import RolloutLoop, RolloutMemory
from torchrl_lightning.collectors.vector_stepper import VectorStepper
from torchrl_lightning.environments.actions import check_clipping
from torchrl_lightning.environments.backends.torchrl_batch import as_batch_vector_env
from torchrl_lightning.environments.backends.torchrl_env import copy_calls, make_environment, with_bookkeeping
from torchrl_lightning.environments.env_errors import env_errors, position, reraise_step_error
from torchrl_lightning.environments.observation_limits import check_magnitudes, magnitude_limits
from torchrl_lightning.environments.policy_calls import (
    Policy,
    apply_policy,
    check_policy,
    clips_actions,
    policy_device,
    recurrent_states,
)
from torchrl_lightning.environments.recipe import EnvironmentRecipe
from torchrl_lightning.environments.replay_source import Array
from torchrl_lightning.environments.seeds import IsolatedRng, check_seed, spawn_seed, spawn_seeds
from torchrl_lightning.environments.specs import environment_specs
from torchrl_lightning.environments.workers.threads import close_environment

logger = logging.getLogger(__name__)

_MAX_ENVS = 32
MANY_STEPS = 100_000
MANY_TORCHRL_STEPS = 2_000  # smaller than MANY_STEPS, because one step may take some hundredths of a second


def play_episodes(
    env: str | Callable[..., Any] | VectorEnv[Any, Any, Any] | EnvBase,
    policy: Policy,
    num_episodes: int,
    *,
    num_envs: int | None = None,
    seed: int | None = None,
    deterministic: bool = True,
    clip_actions: bool = False,
) -> TensorDict:
    """Play exactly ``num_episodes`` complete episodes.

    Each environment contributes a fixed number of its first episodes, because taking the episodes that finish first
    would favour short episodes. The policy acts in evaluation mode; afterwards its training flags and torch's global
    generators are restored.

    Args:
        env: An id, a factory of one Gymnasium or TorchRL environment, or a ready (vector) environment, which stays
            open.
        policy: Reads a TensorDict ``[N]`` and writes ``action``.
        num_episodes: Number of episodes ``E``.
        num_envs: Number of parallel environments; ``None`` means one per episode, at most 32. A ready environment and a
            batched TorchRL environment keep their own number.
        seed: Base seed; :func:`~torchrl_lightning.collectors.spawn_seed` derives the seeds of environments and policy.
            These seeds differ from the seeds of a collector with the same base seed. ``None`` means random seeds.
        deterministic: Take the mode of the policy's distribution; False draws a sample.
        clip_actions: Clip the actions to their Box before the environment receives them. For a policy from
            :func:`~torchrl_lightning.load_policy`, actions are also clipped if the collector of its run clipped them.

    Returns:
        ``episode_return`` (float32), ``episode_length`` (int64), ``terminated`` and ``truncated`` (bool), each
        ``[E]``, ordered by environment and time. ``success`` (bool) is added if a Gymnasium environment reports
        ``is_success`` or ``success`` in the info at the end of an episode.

    Raises:
        ValueError: ``num_episodes`` is not positive, the environment does not fit, or ``clip_actions`` is true although
            the action space is not a Box.

    Examples:
        >>> from tensordict.nn import TensorDictModule
        >>> left = TensorDictModule(lambda x: x[..., 0].long() * 0, in_keys=["observation"], out_keys=["action"])
        >>> play_episodes("CartPole-v1", left, 3, seed=0)["episode_length"]
        tensor([10,  8,  8])
    """
    integer(num_episodes, "num_episodes")
    check_policy(policy)
    clip = boolean(clip_actions, "clip_actions") or clips_actions(policy)
    if seed is not None:
        check_seed(seed)
    if isinstance(env, EnvironmentRecipe):
        env = env.for_evaluation()
    is_ready = isinstance(env, VectorEnv | EnvBase)
    if num_envs is None and not is_ready:
        num_envs = min(num_episodes, _MAX_ENVS)
    built = make_environment(env, num_envs, vectorization="sync", own_number=not is_ready)
    try:
        with (
            torch.no_grad(),
            EvaluationMode(policy),
            IsolatedRng(None if seed is None else spawn_seed(seed, "episodes", "policy"), policy_device(policy)),
            set_exploration_type(ExplorationType.DETERMINISTIC if deterministic else ExplorationType.RANDOM),
        ):
            vector_env = as_batch_vector_env(built) if isinstance(built, EnvBase) else built
            if vector_env is None:
                return _play_torchrl(built, policy, num_episodes, seed, clip)
            return _play(VectorStepper(vector_env), policy, num_episodes, seed, clip)
    finally:
        if not is_ready:
            close_environment(built)


def _play(stepper: VectorStepper, policy: Policy, num_episodes: int, seed: int | None, clip: bool) -> TensorDict:
    specs = environment_specs(stepper.env).with_clipping(clip)
    count = specs.num_envs
    loop = RolloutLoop(stepper, specs, policy, recurrent_states(policy, count))
    memory = RolloutMemory(specs, stepper, 1, loop.states, limits=loop.limits)
    loop.reset(None if seed is None else spawn_seeds(seed, "episodes", count=count))
    results = _EpisodeResults(num_episodes, count)
    device = policy_device(policy)
    step = 0
    while not results.is_complete:
        for _ in loop.steps(memory, device, first_step=step):
            step += 1
            ends = memory.terminated[0], memory.truncated[0], memory.done[0]
            results.add(memory.rewards[0], *ends, stepper.successes(loop.info))
        rank_stop.check_evaluation()
    return results.to_tensordict()


def _play_torchrl(env: EnvBase, policy: Policy, num_episodes: int, seed: int | None, clip: bool) -> TensorDict:
    specs = environment_specs(env).with_clipping(clip)
    form = specs.action_format
    check_clipping(form, specs.action)
    copy_calls(env)
    env = with_bookkeeping(env, policy, clip)
    if seed is not None:
        env.set_seed(spawn_seed(seed, "episodes"))
    results = _EpisodeResults(num_episodes, env.batch_size.numel(), MANY_TORCHRL_STEPS)
    device = policy_device(policy)
    with env_errors("reset"):
        step = env.reset()
    number, limits = 0, magnitude_limits(policy, specs.observation)
    while not results.is_complete:
        if limits:
            check_magnitudes({key: step.get(key) for key in limits}, limits)
        step = apply_policy(policy, step, device, form)
        position.environment = None
        try:
            stepped, step = env.step_and_maybe_reset(step)
        except (Exception, SystemExit) as error:
            reraise_step_error(error, f"At step {number} of the rollout, ")
            raise
        number += 1
        ends = stepped["next"]
        terminated, done = ends["terminated"], ends["done"]
        truncated = ends.get("truncated", done & ~terminated)
        results.add(*(value.flatten().cpu().numpy() for value in (ends["reward"], terminated, truncated, done)))
        rank_stop.check_evaluation()
    return results.to_tensordict()


class _EpisodeResults:
    """Results of the first episodes of ``count`` environments, ``num_episodes`` in total."""

    def __init__(self, num_episodes: int, count: int, many_steps: int = MANY_STEPS) -> None:
        self._many_steps = many_steps  # log a warning if no episode has ended after this number of steps
        self._num_wanted = num_episodes // count + (np.arange(count) < num_episodes % count)
        self._first_row = np.concatenate([[0], np.cumsum(self._num_wanted)[:-1]])
        self._num_finished = np.zeros(count, dtype=np.int64)
        self._returns, self._lengths = np.zeros(count), np.zeros(count, dtype=np.int64)
        self._values: dict[str, Array] = {
            "episode_return": np.zeros(num_episodes, dtype=np.float32),
            "episode_length": np.zeros(num_episodes, dtype=np.int64),
            "terminated": np.zeros(num_episodes, dtype=bool),
            "truncated": np.zeros(num_episodes, dtype=bool),
        }

    @property
    def is_complete(self) -> bool:
        return not (self._num_finished < self._num_wanted).any()

    def add(
        self, rewards: Array, terminated: Array, truncated: Array, done: Array, success: Array | None = None
    ) -> None:
        """Add one step of every environment; each argument is ``[N]``."""
        self._returns += rewards
        self._lengths += 1
        if not done.any():
            if not self._num_finished.any() and (self._lengths == self._many_steps).all():
                logger.warning(
                    "no episode has ended after %d steps: an environment without an end needs a time limit "
                    "(time_limit= of an EnvironmentRecipe).",
                    self._many_steps,
                )
            return
        finished = np.flatnonzero(done & (self._num_finished < self._num_wanted))
        rows = self._first_row[finished] + self._num_finished[finished]
        step_values = [self._returns, self._lengths, terminated, truncated]
        if success is not None:
            self._values.setdefault("success", np.zeros_like(self._values["terminated"]))
            step_values.append(success)
        for value, step_value in zip(
            self._values.values(), step_values, strict=False
        ):  # success may be missing in this step
            value[rows] = step_value[finished]
        self._num_finished[finished] += 1
        self._returns[done], self._lengths[done] = 0, 0

    def to_tensordict(self) -> TensorDict:
        """Return the episodes, ordered by environment and time."""
        values = {name: torch.from_numpy(value) for name, value in self._values.items()}
        return TensorDict(values, [len(values["terminated"])])
