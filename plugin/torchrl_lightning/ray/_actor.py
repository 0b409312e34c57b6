"""The Ray actor that collects rollouts."""

from __future__ import annotations

import torchrl_lightning.ray._actor_imports  # noqa: F401

# isort: split
import sys
from collections.abc import Mapping, Sequence

from torchrl_lightning._core.keys import COLLECTOR, DONE, ENV_IDS, REPLAYED, REWARD
from torchrl_lightning.collectors.workers import Worker
from torchrl_lightning.environments.env_errors import EnvironmentFault
from torchrl_lightning.environments.env_ids import mark_truncated
from torchrl_lightning.ray._serialization import Arrays, as_arrays, load_weights
from torchrl_lightning.ray._service_writer import ServiceWriter
from torchrl_lightning.ray.cluster import ClusterFault, installed_versions

METRIC_KEYS = (REWARD, DONE, REPLAYED, COLLECTOR)  # for the learner's metrics if a service stores the rollouts


class RolloutActor:
    """A :class:`Worker` in an actor. The first rollout builds the worker, so that the learner receives its errors.

    ``module_paths`` are the learner's import paths, which may also exist on this machine. The first rollout raises an
    error if ``versions``, the learner's versions, differ from the versions on this machine. With a ``writer``, rollouts
    are sent to a replay service without the entries ``excluded_keys``. The learner then receives the complete first
    rollout, and only the entries for its metrics from later rollouts.
    """

    def __init__(
        self,
        module_paths: list[str],
        payload: bytes,
        worker: int,
        num_workers: int,
        num_begun: int,
        versions: Mapping[str, str],
        writer: ServiceWriter | None = None,
        excluded_keys: Sequence[str] = (),
    ) -> None:
        sys.path.extend(folder for folder in module_paths if folder not in sys.path)
        self._worker_arguments = payload, worker, num_workers, num_begun
        self._num_begun, self._learner_versions = num_begun, versions
        self._writer, self._excluded_keys = writer, excluded_keys
        self._worker: Worker | None = None
        self._policy_version = -1

    def ping(self) -> None:
        """Answer, so that the learner knows that this actor is reachable."""

    def rollout(self, version: int, weights: Arrays | None, delta: bytes | None) -> tuple[int, Arrays]:
        """Collect a rollout, and return the rollout's number and its time-major entries.

        Ray reads ``weights`` once on each machine, for all its actors.
        """
        try:
            if self._worker is None:
                self._check_versions()
                self._worker = Worker(*self._worker_arguments)
            if delta is not None:
                self._worker.apply_delta(delta)
            if weights is not None and version != self._policy_version:
                load_weights(self._worker.policy, weights)
            self._policy_version = version
            rollout = self._worker.rollout(version)
        except EnvironmentFault as fault:
            raise fault.to_remote() from None  # omit the cause, because the learner may be unable to import its class
        self._num_begun += 1
        if self._writer is not None:
            if self._worker.collector.reset_at_each_batch:
                mark_truncated(rollout)
            ids = rollout[ENV_IDS][:, 0].tolist()
            self._writer.write(as_arrays(rollout.exclude(*self._excluded_keys)), ids)
            if self._num_begun - 1 > self._worker_arguments[-1]:  # after this actor's first rollout
                rollout = rollout.select(*METRIC_KEYS, strict=False)
        return self._num_begun - 1, as_arrays(rollout)

    def _check_versions(self) -> None:
        for name, version in installed_versions().items():
            expected = self._learner_versions.get(name)
            if version != expected:
                raise ClusterFault(
                    f"Collector worker {self._worker_arguments[1]} must have {name} {expected} as on the learner's "
                    f"machine, got {version}. Install the same versions on all machines."
                )

    def close(self) -> None:
        """Close the environments."""
        worker, self._worker = self._worker, None
        if worker is not None:
            try:
                worker.collector.shutdown()
            except EnvironmentFault as fault:
                raise fault.to_remote() from None
