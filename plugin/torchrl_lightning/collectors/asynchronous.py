"""Collect rollouts in worker processes; the weights of a worker may be stale."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
from tensordict import TensorDict
from torchrl.envs.utils import ExplorationType

from torchrl_lightning._core.state import Attribute
from torchrl_lightning._core.validators import integer
from torchrl_lightning.collectors.process_collector import SharedWeights, WorkerPool
from torchrl_lightning.collectors.workers import WorkersCollector
from torchrl_lightning.environments.env_errors import EnvironmentFault
from torchrl_lightning.environments.policy_calls import Policy
from torchrl_lightning.environments.replay_source import SyncedReplaySource


class AsynchronousCollector(WorkersCollector):
    """Collect rollouts in worker processes while the learner trains.

    Each worker runs a :class:`GymnasiumCollector` with a copy of the policy. Before each rollout the worker loads the
    latest weights from :meth:`update_policy_weights_` and marks the rollout with their version. The lag is
    ``policy_version - batch["collector", "policy_version"]``. Batches come from the workers in turn. A worker has at
    most ``rollouts_in_flight`` rollouts that are begun but not yet yielded. If weights are published once per batch,
    the lag is therefore at most ``num_workers * rollouts_in_flight``.

    The workers start with the first batch by ``spawn``, so a script needs ``if __name__ == "__main__":``. The workers
    ignore Ctrl-C and end with this process. Each batch ``[N, T]`` named ``(None, "time")`` comes from one worker.
    ``batch["collector", "env_ids"]`` numbers the environments of all workers: ``num_envs * worker + i``. Resuming is
    not exact: rollouts in flight are lost, and every worker resets its environments and its replay.

    With ``replay``, each worker draws from its copy of the replay with its own seed. Workers therefore do not wait for
    each other, and the draws do not depend on the speed of the workers. Whenever the collector publishes weights or
    requests a batch, it also sends changes of the replay to the workers. Steps that a worker already has are not sent
    again. Rollouts that begin afterwards use the changed replay.

    Args:
        env: An id, or a picklable factory of one environment.
        num_workers: Number of processes.
        num_envs: Number of environments in each process.
        frames_per_batch: Steps per batch, summed over the environments of one worker; a multiple of ``num_envs``.
        seed: Base seed; :func:`~torchrl_lightning.collectors.spawn_seed` derives the seed of each worker's collector.
            ``None`` draws the base seed from torch's global generator.
        rollouts_in_flight: Maximum number of rollouts per worker that are begun but not yet yielded.
        replay: A :class:`~torchrl_lightning.collectors.SyncedReplaySource` for the ``num_envs`` environments of one
            worker, for example :class:`~torchrl_lightning.DemonstrationReplay`. It replays recorded steps in some
            environments of each worker, as in :class:`GymnasiumCollector`.
        init_random_frames: Number of frames with random actions, summed over all workers; each worker begins with its
            share.

    :class:`GymnasiumCollector` describes the other arguments. Each worker steps its environments itself, so a recipe
    with ``vectorization="async"`` raises a ValueError.

    Raises:
        ValueError: Sizes do not fit, or the id is unknown.
        TypeError: The environment or policy cannot be pickled.
        RuntimeError: A worker failed (its traceback is in the message) or died.
        EnvironmentFault: An environment in a worker raised an error or returned invalid values. The fault is
            also a RuntimeError.

    Source:
        Espeholt et al. (2018), IMPALA, https://arxiv.org/abs/1802.01561

    Examples:
        >>> collector = AsynchronousCollector("CartPole-v1", num_workers=2, num_envs=2, frames_per_batch=8)
        >>> collector.policy_version, collector.specs.num_envs
        (0, 2)
        >>> collector.shutdown()
    """

    STATE = {"num_workers": Attribute(), **WorkersCollector.SHARED_STATE}

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
        replay: SyncedReplaySource | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
        wrappers: Sequence[Callable[[gymnasium.Env[Any, Any]], gymnasium.Env[Any, Any]]] = (),
        init_random_frames: int = 0,
    ) -> None:
        integer(rollouts_in_flight, "rollouts_in_flight")
        super().__init__(
            env,
            policy,
            integer(num_workers, "num_workers"),
            num_envs,
            frames_per_batch,
            total_frames,
            seed,
            reset_at_each_batch,
            exploration_type,
            clip_actions,
            replay,
            env_kwargs,
            wrappers,
            init_random_frames,
        )
        self.rollouts_in_flight = rollouts_in_flight
        self._weights: SharedWeights | None = None
        self._pool: WorkerPool | None = None
        self._end_pool: Callable[[], object] | None = None

    def _next(self) -> tuple[TensorDict, int, int]:
        pool = self._pool or self._start()
        self._send_deltas()
        worker = self._batches % self.num_workers
        return pool.receive(worker).transpose(0, 1), worker, int(self._yielded[worker]) + 1

    def _start(self) -> WorkerPool:
        payloads = [self._payload(worker) for worker in range(self.num_workers)]
        self._weights = SharedWeights(self.policy, self.policy_version)
        pool = WorkerPool(payloads, self._yielded.tolist(), self.rollouts_in_flight, self._weights)
        # Also end the processes when the collector is garbage-collected or the interpreter exits.
        self._pool, self._end_pool = pool, weakref.finalize(self, pool.close)
        return pool

    def _send_deltas(self) -> None:
        if self._pool is not None:
            for worker in range(self.num_workers):
                if (delta := self._pickled_delta(worker)) is not None:
                    self._pool.send_delta(worker, delta)

    def _publish(self, version: int) -> None:
        if self._weights is not None:
            self._weights.publish(self.policy, version)
        self._send_deltas()

    def _stop(self) -> None:
        end, self._pool, self._end_pool, self._weights = self._end_pool, None, None, None
        if end is not None:
            end()

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """End all workers; repeated calls are allowed. All arguments except ``raise_on_error`` are ignored."""
        self.closed = True
        try:
            self._stop()
        except EnvironmentFault:
            if raise_on_error:
                raise
