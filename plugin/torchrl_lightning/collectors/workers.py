"""Base class of collectors with workers, and the class of a worker."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import torch
from gymnasium.vector import VectorEnv
from tensordict import TensorDict
from torch import nn
from torchrl.envs.utils import ExplorationType

from torchrl_lightning._core.keys import ENV_IDS, TRAJ_IDS
from torchrl_lightning._core.protocols import PolicyApi
from torchrl_lightning._core.state import Attribute, InPlace, bounded_integer
from torchrl_lightning.collectors.base import CollectorBase, check_exploration, check_random_frames, check_replay
from torchrl_lightning.collectors.gymnasium import GymnasiumCollector
from torchrl_lightning.environments.backends.vector_env import check_env_source, vectorization_of
from torchrl_lightning.environments.policy_calls import Policy, load_weights, policy_device
from torchrl_lightning.environments.replay_source import Array, SyncedReplaySource
from torchrl_lightning.environments.seeds import check_seed, spawn_seed, spawn_seeds


class Worker:
    """One of several workers: a :class:`GymnasiumCollector` that adds environment ids to its rollouts.

    Args:
        payload: The pickled environment, policy and keyword arguments of the worker's collector.
        index: Index of this worker.
        count: Number of workers.
        num_begun: Number of rollouts that this worker began earlier, including rollouts before the run was resumed. New
            rollouts use other seeds and trajectory ids.
    """

    def __init__(self, payload: bytes, index: int, count: int, num_begun: int) -> None:
        torch.set_num_threads(1)
        env, self.policy, kwargs = pickle.loads(payload)
        self.replay = kwargs.get("replay")
        self.index, self.count = index, count
        for part in self.policy.modules() if isinstance(self.policy, nn.Module) else ():
            if (set_worker := PolicyApi.of(part).set_worker) is not None:
                set_worker(index, count)
        self.collector = GymnasiumCollector(env, self.policy, **kwargs)
        frames = num_begun * self.collector.frames_per_batch
        # A rollout begins at most one trajectory for each frame, and one for each environment.
        counters = {
            "batches": num_begun,
            "frames": frames,
            "trajectories": frames + num_begun * self.collector.num_envs,
        }
        self.collector.load_state_dict({**self.collector.state_dict(), **counters})

    def rollout(self, version: int) -> TensorDict:
        """Collect a rollout ``[N, T]`` with the current policy and mark it with the version of its weights."""
        rollout = self.collector.rollout()
        ids = rollout[TRAJ_IDS]
        first_env = self.index * self.collector.num_envs
        rollout[TRAJ_IDS] = ids * self.count + self.index
        rollout[ENV_IDS] = (first_env + torch.arange(self.collector.num_envs))[:, None].expand_as(ids)
        rollout["collector", "policy_version"] = torch.full_like(ids, version)
        return rollout

    def apply_delta(self, delta: bytes) -> None:
        """Apply pickled changes to the replay."""
        assert self.replay is not None
        self.replay.apply_delta(pickle.loads(delta))


class WorkersCollector(CollectorBase):
    """Base class of collectors that yield rollouts of workers; subclasses run the workers in other processes.

    Attributes:
        policy_version: Number of published versions of the weights.
    """

    SHARED_STATE = {
        **CollectorBase.STATE,
        "policy_version": Attribute(bounded_integer()),
        # For each worker, the index of its next rollout to yield.
        "rollouts": InPlace(attribute="_yielded", low=0),
    }

    def __init__(
        self,
        env: str | Callable[..., gymnasium.Env[Any, Any]],
        policy: Policy | None,
        num_workers: int,
        num_envs: int,
        frames_per_batch: int,
        total_frames: int,
        seed: int | None,
        reset_at_each_batch: bool,
        exploration_type: ExplorationType,
        clip_actions: bool,
        replay: SyncedReplaySource | None,
        env_kwargs: Mapping[str, Any] | None,
        wrappers: Sequence[Callable[[gymnasium.Env[Any, Any]], gymnasium.Env[Any, Any]]],
        init_random_frames: int,
    ) -> None:
        if isinstance(env, VectorEnv):
            raise TypeError(
                "env must be an id or a factory of one environment, because each worker builds its own, got a ready "
                f"{type(env).__name__}."
            )
        vectorization = vectorization_of(env, "sync")
        if vectorization != vectorization_of(env):
            raise ValueError(
                f"vectorization must be 'sync' in the recipe of a {type(self).__name__}, because workers step their "
                f"environments, got {vectorization_of(env)!r}. Remove it, or collect in this process."
            )
        check_env_source(env, vectorization, env_kwargs, wrappers)
        env_args = {"vectorization": "sync", "env_kwargs": env_kwargs, "wrappers": tuple(wrappers)}
        super().__init__(env, policy, num_envs, frames_per_batch, total_frames, seed, env_args)
        _pickle((env, env_args), "The environment (env, env_kwargs, wrappers)")
        check_exploration(policy, exploration_type, reset_at_each_batch=reset_at_each_batch, clip_actions=clip_actions)
        check_replay(replay, num_envs, "each worker")
        self.env, self.num_workers, self.clip_actions = env, num_workers, clip_actions
        self._replay = replay
        self._snapshots: dict[int, Any] = {}  # the last snapshot of the replay that each worker received
        self._kwargs: dict[str, Any] = {
            **env_args,
            "reset_at_each_batch": reset_at_each_batch,
            "exploration_type": exploration_type,
            "clip_actions": clip_actions,
            "num_envs": num_envs,
            "frames_per_batch": frames_per_batch,
            "init_random_frames": -(check_random_frames(init_random_frames, policy) // -num_workers),
        }
        self.policy_version = 0
        self._lag = 0  # lag of the last batch, in versions
        self._yielded: Array = np.zeros(num_workers, dtype=np.int64)

    def iterator(self) -> Iterator[TensorDict]:
        """Yield batches until ``total_frames`` are collected; an error or Ctrl-C ends all workers."""
        yield from super().iterator()
        self._stop()

    def rollout(self) -> TensorDict:
        """Return the next batch of a worker, even beyond ``total_frames``."""
        if self.closed:
            raise RuntimeError("The collector was shut down; build a new one.")
        try:
            rollout, worker, following = self._next()
        except BaseException:
            self.shutdown(raise_on_error=False)
            raise
        self._yielded[worker] = following
        self._lag = self.policy_version - int(rollout["collector", "policy_version"][0, 0])
        self._batches += 1
        self.frames += self.frames_per_batch
        return rollout

    @property
    def replays(self) -> bool:
        """Whether workers replay recorded steps."""
        return self._replay is not None

    def metrics(self) -> dict[str, float]:
        """Return the policy lag of the last batch, in versions of the weights."""
        return {"collector/lag": float(self._lag)}

    def _next(self) -> tuple[TensorDict, int, int]:
        """Return the next rollout ``[N, T]``, its worker, and the index of this worker's following rollout."""
        raise NotImplementedError

    def _payload(self, worker: int) -> bytes:
        """Pickle the environment, policy and options of a worker that starts now."""
        policy = self.policy
        if isinstance(policy, nn.Module) and policy_device(policy).type != "cpu":
            policy = copy.deepcopy(policy).cpu()
        options = {**self._kwargs, "seed": self._worker_seed(worker)}
        if self._replay is not None:
            self._snapshots[worker] = self._replay.snapshot()
            options["replay"] = self._replay.for_worker(spawn_seed(self.seed, "replay", worker, self._batches))
        label = f"The policy ({type(policy).__name__})" + ("" if self._replay is None else " or the replay")
        return _pickle((self.env, policy, options), label)

    def _worker_seed(self, worker: int) -> int:
        return spawn_seed(self.seed, "worker", worker)

    def _pickled_delta(self, worker: int) -> bytes | None:
        """Return the pickled replay changes that a worker lacks, or None if the worker is up to date."""
        if self._replay is None:
            return None
        previous, self._snapshots[worker] = self._snapshots[worker], self._replay.snapshot()
        return None if self._snapshots[worker] == previous else pickle.dumps(self._replay.delta(previous))

    def _stop(self) -> None:
        """End all workers, if any are running."""
        raise NotImplementedError

    # -- control -----------------------------------------------------------------------------------------------------
    def update_policy_weights_(self, policy_or_weights: object = None) -> None:
        """Publish weights as a new version; every rollout that begins afterwards uses them.

        Args:
            policy_or_weights: A module, a state dict or a TensorDict of parameters, copied into the policy first.
                ``None`` publishes the policy as it is.
        """
        load_weights(self.policy, policy_or_weights)
        self._publish(self.policy_version + 1)
        self.policy_version += 1

    def _publish(self, version: int) -> None:
        """Send the policy's weights to the workers, if any are running."""
        raise NotImplementedError

    def reset(self) -> None:
        """Discard rollouts in flight, and restart all workers at the next batch."""
        self._stop()

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed all environments, restart the workers at the next batch, and return the seed of the last environment.

        Raises:
            ValueError: ``static_seed`` is True.
        """
        if static_seed:
            raise ValueError("static_seed must be False, got True: all workers would collect the same data.")
        self.seed = check_seed(seed)
        self._stop()
        return spawn_seeds(self._worker_seed(self.num_workers - 1), "environment", 0, count=self.num_envs)[-1]


def _pickle(value: object, label: str) -> bytes:
    try:
        return cloudpickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"{label} cannot be pickled, so it cannot be sent to a worker process: {error}. Use a "
            "registered id, or a factory that builds everything when it is called and keeps no open resources."
        ) from error
