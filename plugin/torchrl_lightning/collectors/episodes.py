"""Finished episodes of a policy, for its evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import VectorEnv
from tensordict import TensorDict
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_lightning._modules import EvaluationMode
from torchrl_lightning.collectors._loop import RolloutLoop, RolloutMemory
from torchrl_lightning.collectors._policy import Policy, check_policy, policy_device, recurrent_states
from torchrl_lightning.collectors._stepper import VectorStepper
from torchrl_lightning.collectors.replayed import Array
from torchrl_lightning.collectors.seeds import IsolatedRng, check_seed, spawn_seed, spawn_seeds
from torchrl_lightning.collectors.specs import environment_specs
from torchrl_lightning.collectors.vector_env import make_vector_env
from torchrl_lightning.ranges import integer

_MAX_ENVS = 32


def play_episodes(
    env: str | Callable[..., gymnasium.Env[Any, Any]] | VectorEnv[Any, Any, Any],
    policy: Policy,
    num_episodes: int,
    *,
    num_envs: int | None = None,
    seed: int | None = None,
    deterministic: bool = True,
) -> TensorDict:
    """Play exactly ``num_episodes`` finished episodes.

    Each environment contributes a fixed number of episodes, its first ones; taking whichever finish first would favour
    short ones. The policy is put in evaluation mode meanwhile; its training flags and torch's global
    generators are afterwards as they were.

    Args:
        env: An id, a factory of one environment, or a ready vector environment, which stays open.
        policy: Reads a TensorDict ``[N]`` and writes ``action``.
        num_episodes: How many episodes to play, ``E``.
        num_envs: How many run side by side; ``None`` means as many as there are episodes, at most 32, or as many as a
            ready vector environment has.
        seed: Seeds of environments and policy are spawned from it (:func:`~torchrl_lightning.collectors.spawn_seed`),
            others than a collector with this seed has; with ``None`` both are random.
        deterministic: Whether the policy takes the mode of its distribution, or a sample.

    Returns:
        ``episode_return`` (float32), ``episode_length`` (int64), ``terminated`` and ``truncated`` (bool), each
        ``[E]``, ordered by environment and time.

    Raises:
        ValueError: There are no episodes to play, or the environment does not fit.

    Example:
        >>> from tensordict.nn import TensorDictModule
        >>> left = TensorDictModule(lambda x: x[..., 0].long() * 0, in_keys=["observation"], out_keys=["action"])
        >>> play_episodes("CartPole-v1", left, 3, seed=0)["episode_length"]
        tensor([10,  8,  8])
    """
    integer(num_episodes, "num_episodes")
    check_policy(policy)
    if seed is not None:
        check_seed(seed)
    ready = isinstance(env, VectorEnv)
    if num_envs is None and not ready:
        num_envs = min(num_episodes, _MAX_ENVS)
    stepper = VectorStepper(make_vector_env(env, num_envs, vectorization="sync"))
    try:
        with (
            torch.no_grad(),
            EvaluationMode(policy),
            IsolatedRng(None if seed is None else spawn_seed(seed, "episodes", "policy"), policy_device(policy)),
            set_exploration_type(ExplorationType.DETERMINISTIC if deterministic else ExplorationType.RANDOM),
        ):
            return _play(stepper, policy, num_episodes, seed)
    finally:
        if not ready:
            stepper.close()


def _play(stepper: VectorStepper, policy: Policy, num_episodes: int, seed: int | None) -> TensorDict:
    specs = environment_specs(stepper.env)
    count = specs.num_envs
    loop = RolloutLoop(stepper, specs, policy, recurrent_states(policy, count))
    memory = RolloutMemory(specs, stepper, 1, loop.states)
    loop.reset(None if seed is None else spawn_seeds(seed, "episodes", count=count))
    quota = num_episodes // count + (np.arange(count) < num_episodes % count)
    first_row = np.concatenate([[0], np.cumsum(quota)[:-1]])
    played = np.zeros(count, dtype=np.int64)
    returns, lengths = np.zeros(count), np.zeros(count, dtype=np.int64)
    figures: dict[str, Array] = {
        "episode_return": returns,
        "episode_length": lengths,
        "terminated": memory.terminated[0],
        "truncated": memory.truncated[0],
    }
    result = {name: np.zeros(num_episodes, dtype=now.dtype) for name, now in figures.items()}
    device = policy_device(policy)
    while (played < quota).any():
        for _ in loop.steps(memory, device):
            returns += memory.rewards[0]
            lengths += 1
        ended = memory.done[0]
        if not ended.any():
            continue
        counted = np.flatnonzero(ended & (played < quota))
        rows = first_row[counted] + played[counted]
        for name, now in figures.items():
            result[name][rows] = now[counted]
        played[counted] += 1
        returns[ended], lengths[ended] = 0, 0
    result["episode_return"] = result["episode_return"].astype(np.float32)
    return TensorDict({name: torch.from_numpy(value) for name, value in result.items()}, [num_episodes])
