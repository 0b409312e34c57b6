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

from torchrl_lightning._core.state import Attribute
from torchrl_lightning._core.validators import boolean, check_defaults, integer
from torchrl_lightning.collectors.workers import WorkersCollector
from torchrl_lightning.environments.env_errors import EnvironmentFault, WorkerFault
from torchrl_lightning.environments.policy_calls import Policy
from torchrl_lightning.environments.replay_source import SyncedReplaySource
from torchrl_lightning.ray._actor import RolloutActor
from torchrl_lightning.ray._wire import as_rollout, weights_of
from torchrl_lightning.ray.cluster import ClusterFault, ServiceFault, check_room, in_one_line, installed, joined
from torchrl_lightning.ray.service import ReplayService

logger = logging.getLogger(__name__)

_FAREWELL = 1.0  # seconds for closing the environments
_PATIENCE = 30.0  # seconds until an unreachable actor must answer again
_SILENCE = 60.0  # seconds without a rollout until a warning names the collectors
_SMALL = 2**16  # bytes of weights that are sent faster than they are stored and fetched
_TRIES = 3  # deaths of a worker in succession, without a rollout between them


class RayCollector(WorkersCollector):
    """Collect rollouts in the actors of a Ray cluster while the learner learns.

    Each collector is an actor that runs a :class:`~torchrl_lightning.GymnasiumCollector` with a copy of the policy.
    Each batch comes from one of them and is ``[N, T]`` named ``(None, "time")``, as with an
    :class:`~torchrl_lightning.AsynchronousCollector`. ``("collector", "env_ids")`` numbers the environments of all
    collectors, ``("collector", "policy_version")`` is the version of the weights. Published weights are sent once to
    each machine; small ones are sent with each request.

    If an actor or machine fails, the others continue. Its pending rollouts are lost. A new actor replaces it as soon as
    the cluster has room, with new seeds and trajectory ids and at the start of an episode. Until then fewer actors
    collect. An error of an environment is raised.

    Args:
        env: An id, or a picklable factory of one environment. Actors import modules from the learner's paths. Send
            modules that other machines lack with ``ray_init_config={"runtime_env": {"py_modules": [...]}}``.
        num_collectors: The number of actors. The ranks of a run divide them, each with its environments.
        num_envs: The number of environments in each.
        frames_per_batch: Steps per batch over the environments of one collector; a multiple of ``num_envs``.
        seed: Seeds of the collectors are spawned from it; ``None`` draws it from torch's global generator.
        sync: Serve all collectors in turn. Each round of ``num_collectors`` batches uses the weights at its first
            request. Runs repeat bit for bit, but collectors idle during updates, and a dead collector is an error.
            Without it the first ready batch is served.
        rollouts_in_flight: The maximum number of rollouts that each has begun but not yet yielded; 1 with ``sync``.
        max_weight_update_interval: The minimum number of batches between two publications of weights, to reduce network
            traffic; -1 publishes whenever the learner does.
        remote_configs: The resources of each actor, as for ``ray.remote``: ``num_cpus`` (1 by default), ``num_gpus``,
            ``memory``, ``resources``.
        ray_init_config: Arguments of ``ray.init``, for example ``address``, if this process is not connected yet.
        service: A replay service into which the collectors write their rollouts. Batches then contain only rewards and
            ends, except the first of each collector.

    The other arguments are documented in :class:`AsynchronousCollector` and :class:`GymnasiumCollector`.

    Attributes:
        deaths: The number of collectors that died.
        restarts: The number of replacements that have delivered a rollout.
        lost_frames: The number of requested frames that were lost.
        lost_envs: Environments that lost their unfinished episodes. The reader resets its episode sums and empties
            the list.

    Raises:
        ValueError: Sizes do not fit, or a setting has no effect with the others.
        ClusterFault: Ray is not installed, or the cluster does not exist at the address, has too few resources, lacks
            modules or has other versions; also a ValueError.
        RuntimeError: A collector failed (its traceback is in the message) or died repeatedly.
        EnvironmentFault: An environment violated its interface; also a RuntimeError.

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
    STATE = {"num_collectors": Attribute(at="num_workers"), **WorkersCollector.SHARED_STATE}

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
        self._begun: list[int] = []  # rollouts begun by each worker, so that a replacement has other seeds and numbers
        self._failures: list[int] = []  # deaths of each since its last rollout
        self._pending: dict[Any, int] = {}  # requested rollouts and their workers, the oldest first
        self._weights: tuple[int, Any] = 0, None  # the published version, and its weights or a reference to them
        self._put_at = 0  # the number of batches at the last publication

    # -- rollouts ----------------------------------------------------------------------------------------------------
    def _next(self) -> tuple[TensorDict, int, int]:
        if not self._actors:
            self._start()
        if self.sync and not self._pending:
            self._ask_all()
        while True:
            ref = next(iter(self._pending)) if self.sync else self._first_ready()
            worker = self._pending[ref]
            try:
                number, arrays = self._received(ref, worker)
            except (self._ray.exceptions.RayActorError, self._ray.exceptions.ObjectLostError) as error:
                self._replace(worker, error)
                continue
            del self._pending[ref]
            self.restarts += self._failures[worker] > 0
            self._failures[worker] = 0
            if not self.sync:
                self._ask(worker)
            return as_rollout(arrays), worker, number + 1

    def _first_ready(self) -> Any:
        waited = 0.0
        while True:
            ready, _ = self._ray.wait(list(self._pending), num_returns=1, timeout=_SILENCE)
            if ready:
                return ready[0]
            waited += _SILENCE
            logger.warning(
                "no collector has delivered for %.0f s: collectors %s collect, or wait for room in the cluster.",
                waited,
                sorted(set(self._pending.values())),
            )

    def _received(self, ref: Any, worker: int) -> Any:
        """Return the rollout of a collector, or raise its error."""
        try:
            return self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, EnvironmentFault):
                raise cause.within(f"In collector worker {worker}: ") from None
            if isinstance(cause, ServiceFault):
                raise cause from None
            if isinstance(cause, ImportError):
                raise ClusterFault(
                    f"Collector worker {worker} cannot import what the environment or the policy needs: {cause}. "
                    "Install it on each machine, or send it: ray_init_config={'runtime_env': {'py_modules': [...]}}."
                ) from error
            raise RuntimeError(f"Collector worker {worker} failed:\n\n{error}") from None

    def _ask_all(self) -> None:
        for _ in range(self.rollouts_in_flight):
            for worker in range(self.num_workers):
                self._ask(worker)

    def _ask(self, worker: int) -> None:
        ref = self._actors[worker].rollout.remote(*self._weights, self._news(worker))
        self._begun[worker] += 1
        self._pending[ref] = worker

    # -- actors ------------------------------------------------------------------------------------------------------
    def _start(self) -> None:
        self._ray, joined_here = joined(self.ray_init_config)
        self._owns_ray |= joined_here
        check_room(self._ray, self.num_workers, self.remote_configs)
        self._put_weights(self.policy_version)
        self._begun, self._failures = self._yielded.tolist(), [0] * self.num_workers
        self._actors = [self._built(worker) for worker in range(self.num_workers)]
        self._check_versions()
        if not self.sync:
            self._ask_all()

    def _built(self, worker: int) -> Any:
        # Ray's own restarts would reuse the seeds and numbers of the first start.
        remote = self._ray.remote(RolloutActor).options(max_restarts=0, max_task_retries=0, **self.remote_configs)
        task = sys.path, self._payload(worker), worker, self.num_workers, self._begun[worker]
        if self.service is None:
            return remote.remote(*task)
        return remote.remote(*task, self.service.writer(f"worker {worker}"), self.service.left_out)

    def _check_versions(self) -> None:
        here = installed()
        for worker, actor in enumerate(self._actors):
            for name, there in self._received(actor.installed.remote(), worker).items():
                if there != here[name]:
                    raise ClusterFault(
                        f"Collector worker {worker} runs on a machine with {name} {there}, but here is {here[name]}. "
                        "Install the same versions on all machines."
                    )

    def _replace(self, worker: int, error: Exception) -> None:
        """Replace an actor that has died."""
        if self._is_back(worker, error):
            lost = self._forget(worker)
        else:
            self.deaths += 1
            self._failures[worker] += 1
            reason = in_one_line(error)
            if self.sync or self._failures[worker] >= _TRIES:
                times = f" {self._failures[worker]} times in succession" if self._failures[worker] > 1 else ""
                mend = "With sync=True nobody takes its place: resume the run. " if self.sync else ""
                raise WorkerFault(f"Collector worker {worker} died{times}: {reason} {mend}".rstrip()) from error
            lost = self._forget(worker)
            logger.warning("collector worker %d died (%.200s); another takes its place.", worker, reason)
            self._ray.kill(self._actors[worker])
            self._actors[worker] = self._built(worker)
            self.lost_envs.extend(range(worker * self.num_envs, (worker + 1) * self.num_envs))
        self.lost_frames += lost * self.frames_per_batch
        for _ in range(self.rollouts_in_flight):
            self._ask(worker)

    def _is_back(self, worker: int, error: Exception) -> bool:
        """Return whether an unreachable actor answers again."""
        unreachable = self._ray.exceptions.ActorUnavailableError
        deadline = time.monotonic() + _PATIENCE
        while isinstance(error, unreachable) and time.monotonic() < deadline:
            try:
                self._ray.get(self._actors[worker].installed.remote(), timeout=_PATIENCE)
                return True
            except (self._ray.exceptions.RayActorError, self._ray.exceptions.GetTimeoutError) as again:
                error = again
                time.sleep(0.1)
        return False

    def _forget(self, worker: int) -> int:
        gone = [ref for ref, whose in self._pending.items() if whose == worker]
        for ref in gone:
            del self._pending[ref]
        return len(gone)

    def _publish(self, version: int) -> None:
        if self._actors and self._batches - self._put_at >= self.max_weight_update_interval:
            self._put_weights(version)

    def _put_weights(self, version: int) -> None:
        weights: Any = weights_of(self.policy)
        if weights is not None and sum(value.nbytes for value in weights.values()) > _SMALL:
            weights = self._ray.put(weights)
        self._weights = version, weights
        self._put_at = self._batches

    def metrics(self) -> dict[str, float]:
        """Add the numbers of dead and replaced collectors, and of lost frames."""
        counts = {"deaths": self.deaths, "restarts": self.restarts, "lost_frames": self.lost_frames}
        return {**super().metrics(), **{f"collector/{name}": float(count) for name, count in counts.items()}}

    # -- control -----------------------------------------------------------------------------------------------------
    def _stop(self) -> None:
        actors, self._actors, self._pending = self._actors, [], {}
        if not actors or not self._ray.is_initialized():
            return
        closing = [actor.close.remote() for actor in actors]
        closed, _ = self._ray.wait(closing, num_returns=len(closing), timeout=_FAREWELL)
        faults = []
        for worker, ref in enumerate(closing):
            if ref in closed:
                try:
                    self._received(ref, worker)
                except EnvironmentFault as fault:
                    faults.append(fault)
                except self._ray.exceptions.RayError:
                    pass  # it has died
        for actor in actors:
            self._ray.kill(actor)
        if faults:
            raise faults[0]

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """End all collectors, and leave a cluster that was joined here; safe to call repeatedly.

        Only ``raise_on_error`` has an effect.
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
