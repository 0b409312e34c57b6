"""Collect with environments on the machines of a Ray cluster."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
from tensordict import TensorDict
from torchrl.envs.utils import ExplorationType

from torchrl_lightning._core.rank_metrics import Sum
from torchrl_lightning._core.state import Attribute
from torchrl_lightning._core.validators import boolean, check_defaults, integer
from torchrl_lightning.collectors.workers import WorkersCollector
from torchrl_lightning.environments.env_errors import EnvironmentFault, WorkerFault
from torchrl_lightning.environments.policy_calls import Policy
from torchrl_lightning.environments.replay_source import SyncedReplaySource
from torchrl_lightning.ray._actor import RolloutActor
from torchrl_lightning.ray._serialization import as_rollout, copy_weights
from torchrl_lightning.ray._waits import AnswerTimes, WaitWarning, demand_of, ready_within, wait_for
from torchrl_lightning.ray.cluster import (
    ClusterFault,
    ServiceFault,
    check_resources,
    connect,
    death_errors,
    has_failed_to_start,
    installed_versions,
    last_line,
    one_line,
)
from torchrl_lightning.ray.service import ReplayService

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT = 1.0  # seconds for closing the environments
_RECONNECT_TIMEOUT = 30.0  # seconds until an unreachable actor must answer again
_MAX_INLINE_BYTES = 2**16  # Weights up to this size in bytes are sent with each request, which is faster.
_MAX_FAILURES = 3  # consecutive deaths of a worker without a rollout


class RayCollector(WorkersCollector):
    """Collect rollouts in the actors of a Ray cluster while the learner learns.

    Each collector is an actor that runs a :class:`~torchrl_lightning.GymnasiumCollector` with a copy of the policy.
    Each batch comes from one collector and has the shape ``[N, T]`` with the names ``(None, "time")``, as with an
    :class:`~torchrl_lightning.AsynchronousCollector`. ``("collector", "env_ids")`` numbers the environments of all
    collectors. ``("collector", "policy_version")`` is the version of the weights. Published weights are sent once to
    each machine. Small weights are sent with each request.

    Each actor begins as soon as the cluster has room for it. If an actor or machine fails, all other actors continue.
    The pending rollouts of the failed actor are lost. A new actor replaces the failed actor as soon as the cluster has
    room. The new actor has new seeds and trajectory ids, and begins with new episodes. If an environment raises an
    error, the learner raises it too. A warning names the collectors without an answer for 60 seconds, and the resources
    that collectors without a place need.

    Args:
        env: An id, or a picklable factory of one environment. Actors import modules from the learner's paths. Send
            modules that other machines lack with ``ray_init_config={"runtime_env": {"py_modules": [...]}}``.
        num_collectors: The number of actors. The actors, with their environments, are divided among the ranks of a run.
        num_envs: The number of environments in each collector.
        frames_per_batch: The number of steps in a batch over all environments of one collector; a multiple of
            ``num_envs``.
        seed: The seed from which the seeds of all collectors are spawned. ``None`` draws a seed from torch's global
            generator.
        sync: Yield the batches of all collectors in turn. Each round of ``num_collectors`` batches uses the weights at
            the first request of the round. Repeated runs are then bit-identical, but collectors wait during updates,
            and a dead collector raises an error. Otherwise the first batch that is ready is yielded.
        rollouts_in_flight: The maximum number of rollouts that a collector has begun but not yet yielded; 1 with
            ``sync``.
        max_weight_update_interval: The minimum number of batches between two publications of weights; a larger number
            reduces network traffic. -1 sends the weights each time that the learner publishes them.
        remote_configs: The resources of each actor, as for ``ray.remote``: ``num_cpus`` (1 by default), ``num_gpus``,
            ``memory``, ``resources``.
        ray_init_config: Arguments of ``ray.init``, for example ``address``, if this process is not connected yet.
        service: A replay service that stores the collectors' rollouts. Batches then contain only rewards and ends,
            except the first batch of each collector.

    The other arguments are documented in :class:`AsynchronousCollector` and :class:`GymnasiumCollector`.

    Attributes:
        deaths: The number of collectors that died.
        restarts: The number of replacements that have delivered a rollout.
        lost_frames: The number of requested frames that were lost.
        lost_envs: Environments that lost their unfinished episodes. The reader of the list resets its episode sums for
            these environments, and then clears the list.

    Raises:
        ValueError: The sizes are incompatible, or a setting has no effect because of another setting.
        ClusterFault: Ray is not installed, or the address does not have a cluster. Or the cluster has too few
            resources, lacks modules, or has other versions. It is also a ValueError.
        RuntimeError: A collector failed or died repeatedly. The message contains the traceback of a failed collector.
        EnvironmentFault: An environment violated its interface. This error is also a RuntimeError.

    Source:
        Moritz et al. (2018), Ray: A Distributed Framework for Emerging AI Applications,
        https://arxiv.org/abs/1712.05889

    Examples:
        >>> collector = RayCollector("CartPole-v1", num_collectors=2, num_envs=4, frames_per_batch=64)
        >>> collector.policy_version, collector.specs.num_envs
        (0, 4)
        >>> collector.shutdown()
    """

    yields_owned_rollouts = True
    STATE = {"num_collectors": Attribute(attribute="num_workers"), **WorkersCollector.SHARED_STATE}

    def __init__(
        self,
        env: str | Callable[..., gymnasium.Env[Any, Any]],
        policy: Policy | None = None,
        *,
        num_collectors: int = 2,
        num_envs: int = 1,
        frames_per_batch: int,
        total_frames: int = -1,
        seed: int | None = None,
        sync: bool = False,
        rollouts_in_flight: int = 1,
        max_weight_update_interval: int = -1,
        remote_configs: Mapping[str, Any] | None = None,
        ray_init_config: Mapping[str, Any] | None = None,
        reset_at_each_batch: bool = False,
        exploration_type: ExplorationType = ExplorationType.RANDOM,
        clip_actions: bool = False,
        replay: SyncedReplaySource | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
        wrappers: Sequence[Callable[[gymnasium.Env[Any, Any]], gymnasium.Env[Any, Any]]] = (),
        init_random_frames: int = 0,
        service: ReplayService | None = None,
    ) -> None:
        integer(rollouts_in_flight, "rollouts_in_flight")
        integer(max_weight_update_interval, "max_weight_update_interval", -1)
        super().__init__(
            env,
            policy,
            integer(num_collectors, "num_collectors"),
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
        if boolean(sync, "sync"):
            check_defaults("with sync=True", "take sync=False", rollouts_in_flight=(rollouts_in_flight, 1))
        if policy is None:
            interval = (max_weight_update_interval, -1)
            check_defaults("without a policy", "give a policy", max_weight_update_interval=interval)
        self.sync, self.rollouts_in_flight = sync, rollouts_in_flight
        self.max_weight_update_interval = max_weight_update_interval
        self.remote_configs = {"num_cpus": 1, **(remote_configs or {})}
        self.ray_init_config = dict(ray_init_config or {})
        self.service = service
        self.deaths = self.restarts = self.lost_frames = 0
        self.lost_envs: list[int] = []
        self._ray: Any = None
        self._owns_ray = False
        self._actors: list[Any] = []
        self._num_begun: list[
            int
        ] = []  # begun batches of each worker; a replacement continues from this number, with new seeds
        self._failures: list[int] = []  # deaths of each worker since its last rollout
        self._pending: dict[Any, int] = {}  # requested rollouts and their workers, the oldest first
        self._answer_times: AnswerTimes  # set with the actors
        self._weights: tuple[int, Any] = 0, None  # the published version, and its weights or a reference to them
        self._published_at = 0  # the number of batches at the last publication

    # -- rollouts ----------------------------------------------------------------------------------------------------
    def _next(self) -> tuple[TensorDict, int, int]:
        if not self._actors:
            self._start()
        if self.sync and not self._pending:
            self._request_all()
        while True:
            ref = next(iter(self._pending)) if self.sync else self._answer_times.first_ready(self._pending)
            worker = self._pending[ref]
            try:
                number, arrays = self._receive(ref, worker)
            except death_errors(self._ray) as error:
                self._replace(worker, error)
                continue
            del self._pending[ref]
            self._answer_times.answered(worker)
            self.restarts += self._failures[worker] > 0
            self._failures[worker] = 0
            if not self.sync:
                self._request(worker)
            return as_rollout(arrays), worker, number + 1

    def _receive(self, ref: Any, worker: int) -> Any:
        """Return the rollout of a collector, or raise its error."""
        demand = None if self._answer_times.has_started(worker) else demand_of(self.remote_configs)
        try:
            return wait_for(self._ray, ref, WaitWarning(self._ray, f"the rollout of collector {worker}", demand))
        except self._ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, EnvironmentFault):
                raise cause.with_prefix(f"In collector worker {worker}: ") from None
            if isinstance(cause, ClusterFault | ServiceFault):
                raise cause from None
            if isinstance(cause, ImportError):
                raise ClusterFault(
                    f"Collector worker {worker} cannot import a module of the environment or the policy: {cause}. "
                    "Install it on each machine, or send it: ray_init_config={'runtime_env': {'py_modules': [...]}}."
                ) from error
            raise RuntimeError(f"Collector worker {worker} failed:\n\n{error}") from None
        except death_errors(self._ray) as error:
            if not has_failed_to_start(error):
                raise
            raise ClusterFault(
                f"Collector worker {worker} cannot start: {last_line(error)}. Install the same versions on all "
                "machines."
            ) from error
        except self._ray.exceptions.RayError as error:
            raise ClusterFault(
                f"Collector worker {worker} cannot run in the cluster: {one_line(error).rstrip('.')}. Check "
                "remote_configs and ray_init_config."
            ) from error

    def _request_all(self) -> None:
        for _ in range(self.rollouts_in_flight):
            for worker in range(self.num_workers):
                self._request(worker)

    def _request(self, worker: int) -> None:
        ref = self._actors[worker].rollout.remote(*self._weights, self._pickled_delta(worker))
        self._num_begun[worker] += 1
        self._pending[ref] = worker

    # -- actors ------------------------------------------------------------------------------------------------------
    def _start(self) -> None:
        self._ray, has_connected = connect(self.ray_init_config)
        self._owns_ray |= has_connected
        check_resources(self._ray, self.num_workers, self.remote_configs)
        self._publish_weights(self.policy_version)
        self._num_begun, self._failures = self._yielded.tolist(), [0] * self.num_workers
        self._answer_times = AnswerTimes(self._ray, demand_of(self.remote_configs))
        self._actors = [self._start_actor(worker) for worker in range(self.num_workers)]
        if not self.sync:
            self._request_all()

    def _start_actor(self, worker: int) -> Any:
        self._answer_times.starts(worker)
        return self._build_actor(worker)

    def _build_actor(self, worker: int) -> Any:
        # If Ray restarted actors, they would use the seeds and rollout numbers of the first start again.
        actor_class = self._ray.remote(RolloutActor).options(max_restarts=0, max_task_retries=0, **self.remote_configs)
        versions = installed_versions()
        arguments = sys.path, self._payload(worker), worker, self.num_workers, self._num_begun[worker], versions
        if self.service is None:
            return actor_class.remote(*arguments)
        return actor_class.remote(*arguments, self.service.writer(f"worker {worker}"), self.service.excluded_keys)

    def _replace(self, worker: int, error: Exception) -> None:
        """Replace an actor that has died, or keep an actor that is reachable again."""
        if self._is_reachable_again(worker, error):
            num_lost = self._drop_pending(worker)
        else:
            self.deaths += 1
            self._failures[worker] += 1
            reason = one_line(error)
            if self.sync or self._failures[worker] >= _MAX_FAILURES:
                repeated = f" {self._failures[worker]} times in succession" if self._failures[worker] > 1 else ""
                remedy = "With sync=True it is not replaced: resume the run. " if self.sync else ""
                raise WorkerFault(f"Collector worker {worker} died{repeated}: {reason} {remedy}".rstrip()) from error
            num_lost = self._drop_pending(worker)
            logger.warning("collector worker %d died (%.200s); a new worker replaces it.", worker, reason)
            self._ray.kill(self._actors[worker])
            self._actors[worker] = self._start_actor(worker)
            self.lost_envs.extend(range(worker * self.num_envs, (worker + 1) * self.num_envs))
        self.lost_frames += num_lost * self.frames_per_batch
        for _ in range(self.rollouts_in_flight):
            self._request(worker)

    def _is_reachable_again(self, worker: int, error: Exception) -> bool:
        """Return True if an unreachable actor answers again."""
        unreachable = self._ray.exceptions.ActorUnavailableError
        deadline = time.monotonic() + _RECONNECT_TIMEOUT
        warning = WaitWarning(self._ray, f"collector {worker} to be reachable again")
        while isinstance(error, unreachable) and time.monotonic() < deadline:
            try:
                wait_for(self._ray, self._actors[worker].ping.remote(), warning, deadline)
                return True
            except (self._ray.exceptions.RayActorError, self._ray.exceptions.GetTimeoutError) as new_error:
                error = new_error
                time.sleep(0.1)
        return False

    def _drop_pending(self, worker: int) -> int:
        refs = [ref for ref, owner in self._pending.items() if owner == worker]
        for ref in refs:
            del self._pending[ref]
        return len(refs)

    def _publish(self, version: int) -> None:
        if self._actors and self._batches - self._published_at >= self.max_weight_update_interval:
            self._publish_weights(version)

    def _publish_weights(self, version: int) -> None:
        weights: Any = copy_weights(self.policy)
        if weights is not None and sum(value.nbytes for value in weights.values()) > _MAX_INLINE_BYTES:
            weights = self._ray.put(weights)
        self._weights = version, weights
        self._published_at = self._batches

    def metrics(self) -> dict[str, float]:
        """Return the metrics of all collectors, with the numbers of deaths, restarts and lost frames."""
        counts = {"deaths": self.deaths, "restarts": self.restarts, "lost_frames": self.lost_frames}
        return {**super().metrics(), **{f"collector/{name}": Sum(count) for name, count in counts.items()}}

    # -- control -----------------------------------------------------------------------------------------------------
    def _stop(self) -> None:
        actors, self._actors, self._pending = self._actors, [], {}
        if not actors or not self._ray.is_initialized():
            return
        closing = [actor.close.remote() for actor in actors]
        closed = ready_within(self._ray, closing, _CLOSE_TIMEOUT)
        faults = []
        for worker, ref in enumerate(closing):
            if ref in closed:
                try:
                    self._receive(ref, worker)
                except EnvironmentFault as fault:
                    faults.append(fault)
                except (self._ray.exceptions.RayError, ClusterFault):
                    pass  # the actor has died
        for actor in actors:
            self._ray.kill(actor)
        if faults:
            raise faults[0]

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """End all collectors, and disconnect from a cluster if this collector has connected to it.

        Only the argument ``raise_on_error`` has an effect. Repeated calls are safe.
        """
        self.closed = True
        try:
            self._stop()
        except EnvironmentFault:
            if raise_on_error:
                raise
        finally:
            if self._owns_ray:
                self._owns_ray = False
                self._ray.shutdown()
