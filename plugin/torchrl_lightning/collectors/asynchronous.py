"""A collector whose environments run in separate processes, with weights that may be stale."""

from __future__ import annotations

__all__ = ["AsynchronousCollector"]

import copy
import pickle
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import cloudpickle
import gymnasium
from gymnasium.vector import VectorEnv
from tensordict import TensorDict
from torch import nn
from torchrl.envs.utils import ExplorationType

from torchrl_lightning.collectors._base import CollectorBase
from torchrl_lightning.collectors._processes import SharedWeights, WorkerPool
from torchrl_lightning.environments.faults import EnvironmentFault
from torchrl_lightning.environments.played import FollowedReplaySource
from torchrl_lightning.environments.policies import Policy, load_weights, policy_device
from torchrl_lightning.environments.seeds import check_seed, spawn_seed, spawn_seeds
from torchrl_lightning.environments.vector_env import check_env_source
from torchrl_lightning.ranges import integer
from torchrl_lightning.state import whole
from torchrl_lightning.stated import Fixed, Kept


class AsynchronousCollector(CollectorBase):
    """Collect rollouts in worker processes while the learner learns.

    Each worker runs a :class:`GymnasiumCollector` with a copy of the policy. Before each rollout it takes the latest
    weights that :meth:`update_policy_weights_` has published, and marks the rollout with their version:
    ``policy_version - batch["collector", "policy_version"]`` is the lag. Workers are served in turn and have at most
    ``rollouts_in_flight`` rollouts begun but not yet yielded, so with one publication per batch the lag is at most
    ``num_workers * rollouts_in_flight``.

    Processes start with the first batch (by ``spawn``: a script needs ``if __name__ == "__main__":``), ignore Ctrl-C
    and never outlive this process. Batches are ``[N, T]`` named ``(None, "time")``, each from one worker:
    ``batch["collector", "env_ids"]`` numbers the environments over all workers, ``num_envs * worker + i``. Resuming is
    not exact: rollouts in flight are lost, and every worker begins with a reset, also of what it replays.

    With ``replay``, each worker has a copy of it, which draws by a seed of its own, so that no worker waits for another
    to draw, and the draws do not depend on who is faster. What is replayed from travels to the workers where
    it has changed, what they know already without its steps: with each publication of weights, and when a batch is
    asked for. Rollouts that begin afterwards see it.

    Args:
        env: An id, or a factory of one environment that can be pickled.
        num_workers: The number of processes.
        num_envs: The number of environments in each process.
        frames_per_batch: Steps per batch over the environments of one worker; a multiple of ``num_envs``.
        seed: The seed of each worker's :class:`GymnasiumCollector` is spawned from it
            (:func:`~torchrl_lightning.collectors.spawn_seed`); ``None`` draws it from torch's global generator.
        rollouts_in_flight: How many rollouts a worker may have begun but not yet yielded.
        replay: Replays recorded steps in some environments of each worker, as in :class:`GymnasiumCollector`: a
            :class:`~torchrl_lightning.collectors.FollowedReplaySource`, such as
            :class:`~torchrl_lightning.DemonstrationReplay`, built for the ``num_envs`` environments of one worker.

    The other arguments are those of :class:`GymnasiumCollector`; each worker steps its environments itself, whatever
    ``vectorization`` a recipe has.

    Raises:
        ValueError: Sizes do not fit, or the id is unknown.
        TypeError: The environment or policy cannot be sent to a process.
        RuntimeError: A worker failed (its traceback is in the message) or died.
        EnvironmentFault: An environment in a worker did what it may not; also a RuntimeError.

    Source:
        Espeholt et al. (2018), IMPALA, https://arxiv.org/abs/1802.01561

    Example:
        >>> collector = AsynchronousCollector("CartPole-v1", num_workers=2, num_envs=2, frames_per_batch=8)
        >>> collector.policy_version, collector.specs.num_envs
        (0, 2)
        >>> collector.shutdown()
    """

    STATE = {"num_workers": Fixed(), **CollectorBase.STATE, "policy_version": Kept(whole())}

    def __init__(
        self,
        env: str | Callable[..., gymnasium.Env[Any, Any]],
        policy: Policy | None = None,
        *,
        num_workers: int = 2,
        num_envs: int = 1,
        frames_per_batch: int,
        total_frames: int = -1,
        seed: int | None = None,
        rollouts_in_flight: int = 1,
        reset_at_each_batch: bool = False,
        exploration_type: ExplorationType = ExplorationType.RANDOM,
        clip_actions: bool = False,
        replay: FollowedReplaySource | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
        wrappers: Sequence[Callable[[gymnasium.Env[Any, Any]], gymnasium.Env[Any, Any]]] = (),
    ) -> None:
        if isinstance(env, VectorEnv):
            raise TypeError(
                f"Each worker builds its own environments, but env is a ready {type(env).__name__}; "
                "pass its id or a factory of one environment."
            )
        check_env_source(env)
        integer(num_workers, "num_workers")
        integer(rollouts_in_flight, "rollouts_in_flight")
        env_args = {"vectorization": "sync", "env_kwargs": env_kwargs, "wrappers": tuple(wrappers)}
        super().__init__(env, policy, num_envs, frames_per_batch, total_frames, seed, env_args)
        _pickled((env, env_args), "The environment (env, env_kwargs, wrappers)")
        if replay is not None and len(replay.playing) != num_envs:
            raise ValueError(
                f"replay= is for {len(replay.playing)} environments, but each worker has num_envs={num_envs}; build it "
                "for these."
            )
        self._player = replay
        self._told: Any = None  # what the workers know of its contents
        self.env = env
        self.num_workers, self.rollouts_in_flight = num_workers, rollouts_in_flight
        self._kwargs: dict[str, Any] = {
            **env_args,
            "reset_at_each_batch": reset_at_each_batch,
            "exploration_type": exploration_type,
            "clip_actions": clip_actions,
            "num_envs": num_envs,
            "frames_per_batch": frames_per_batch,
        }
        self.policy_version = 0
        self._weights: SharedWeights | None = None
        self._pool: WorkerPool | None = None
        self._end_pool: Callable[[], object] | None = None

    def iterator(self) -> Iterator[TensorDict]:
        """Yield batches until ``total_frames`` are collected; an error or Ctrl-C ends all workers."""
        yield from super().iterator()
        self._stop()

    def rollout(self) -> TensorDict:
        """Return the next worker's batch, even beyond ``total_frames``."""
        if self.closed:
            raise RuntimeError("The collector was shut down; build a new one.")
        try:
            pool = self._pool or self._start()
            self._tell_workers()
            rollout = pool.receive(self._batches % self.num_workers)
        except BaseException:
            self.shutdown(raise_on_error=False)
            raise
        self._batches += 1
        self.frames += self.frames_per_batch
        return rollout.transpose(0, 1)

    def _start(self) -> WorkerPool:
        policy = self.policy
        if isinstance(policy, nn.Module) and policy_device(policy).type != "cpu":
            policy = copy.deepcopy(policy).cpu()
        name = f"The policy ({type(policy).__name__})" + ("" if self._player is None else " or the replay")
        self._told = None if self._player is None else self._player.contents()
        workers = range(self.num_workers)
        payloads = [_pickled((self.env, policy, self._worker_options(worker)), name) for worker in workers]
        # Worker w yields batches w, w + num_workers, ...
        batches = [-((self._batches - worker) // -self.num_workers) for worker in workers]
        self._weights = SharedWeights(self.policy, self.policy_version)
        pool = WorkerPool(payloads, batches, self.rollouts_in_flight, self._weights)
        # Also ends the processes when the collector is garbage-collected or the interpreter exits.
        self._pool, self._end_pool = pool, weakref.finalize(self, pool.close)
        return pool

    def _worker_options(self, worker: int) -> dict[str, Any]:
        options = {**self._kwargs, "seed": spawn_seed(self.seed, "worker", worker)}
        if self._player is not None:
            options["replay"] = self._player.for_worker(spawn_seed(self.seed, "replay", worker, self._batches))
        return options

    def _tell_workers(self) -> None:
        if self._pool is None or self._player is None:
            return
        contents = self._player.contents()
        if contents != self._told:
            self._pool.tell(pickle.dumps(self._player.news(self._told)))
            self._told = contents

    def _stop(self) -> None:
        end, self._pool, self._end_pool, self._weights = self._end_pool, None, None, None
        if end is not None:
            end()

    # -- control -----------------------------------------------------------------------------------------------------
    def update_policy_weights_(self, policy_or_weights: object = None) -> None:
        """Publish weights as a new version; every rollout that begins afterwards uses them.

        Args:
            policy_or_weights: A module, a state dict or a TensorDict of parameters, copied into the policy first.
                ``None`` publishes the policy as it is.
        """
        load_weights(self.policy, policy_or_weights)
        if self._weights is not None:
            self._weights.publish(self.policy, self.policy_version + 1)
        self._tell_workers()
        self.policy_version += 1

    def reset(self) -> None:
        """Discard the rollouts in flight, and restart all workers at the next batch."""
        self._stop()

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed all environments, restart the workers at the next batch, and return the seed of the last environment.

        Raises:
            ValueError: ``static_seed`` is True.
        """
        if static_seed:
            raise ValueError("static_seed=True would make all workers collect the same data.")
        self.seed = check_seed(seed)
        self._stop()
        last = self._worker_options(self.num_workers - 1)["seed"]
        return spawn_seeds(last, "environment", 0, count=self.num_envs)[-1]

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """End all workers; may be called any number of times. Only ``raise_on_error`` has an effect."""
        self.closed = True
        try:
            self._stop()
        except EnvironmentFault:
            if raise_on_error:
                raise


def _pickled(content: object, what: str) -> bytes:
    try:
        return cloudpickle.dumps(content)
    except Exception as error:
        raise TypeError(
            f"{what} cannot be pickled, so it cannot be sent to a worker process: {error}. Use a "
            "registered id, or a factory that builds everything when it is called and keeps no open resources."
        ) from error
