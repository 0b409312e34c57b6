"""The Ray actor that collects rollouts."""

from __future__ import annotations

import torchrl_lightning.ray._begin  # noqa: F401

# isort: split
import sys
from collections.abc import Sequence

from torchrl_lightning._core.keys import COLLECTOR, DONE, ENV_IDS, REPLAYED, REWARD
from torchrl_lightning.collectors.workers import Worker
from torchrl_lightning.environments.env_errors import EnvironmentFault
from torchrl_lightning.environments.env_ids import mark_truncated
from torchrl_lightning.ray._service_writer import ServiceWriter
from torchrl_lightning.ray._wire import Arrays, as_arrays, take_weights
from torchrl_lightning.ray.cluster import installed

COUNTED = (REWARD, DONE, REPLAYED, COLLECTOR)  # entries for the learner's metrics if rollouts are written elsewhere


class RolloutActor:
    """A :class:`Worker` in an actor. The first rollout builds it, so that the learner receives its errors.

    ``path`` is the learner's module search path, which may also exist on this machine. With a ``writer``, rollouts are
    sent to a replay service without the entries ``left_out``. The learner then gets the first rollout, and of the
    others only the entries for its metrics.
    """

    def __init__(
        self,
        path: list[str],
        payload: bytes,
        number: int,
        count: int,
        begun: int,
        writer: ServiceWriter | None = None,
        left_out: Sequence[str] = (),
    ) -> None:
        sys.path.extend(folder for folder in path if folder not in sys.path)
        self._task = payload, number, count, begun
        self._begun = begun
        self._writer, self._left_out = writer, left_out
        self._worker: Worker | None = None
        self._version = -1

    def installed(self) -> dict[str, str]:
        """Return the versions on this machine."""
        return installed()

    def rollout(self, version: int, weights: Arrays | None, news: bytes | None) -> tuple[int, Arrays]:
        """Collect a rollout, and return its number and its entries, time-major.

        Ray reads ``weights`` once on each machine, for all its actors.
        """
        try:
            if self._worker is None:
                self._worker = Worker(*self._task)
            if news is not None:
                self._worker.follow(news)
            if weights is not None and version != self._version:
                take_weights(self._worker.policy, weights)
            self._version = version
            rollout = self._worker.rollout(version)
        except EnvironmentFault as fault:
            raise fault.sent() from None  # the learner may be unable to import the class of its cause
        self._begun += 1
        if self._writer is not None:
            if self._worker.collector.reset_at_each_batch:
                mark_truncated(rollout)
            ids = rollout[ENV_IDS][:, 0].tolist()
            self._writer.write(as_arrays(rollout.exclude(*self._left_out)), ids)
            if self._begun - 1 > self._task[-1]:  # after this actor's first rollout
                rollout = rollout.select(*COUNTED, strict=False)
        return self._begun - 1, as_arrays(rollout)

    def close(self) -> None:
        """Close the environments."""
        worker, self._worker = self._worker, None
        if worker is not None:
            try:
                worker.collector.shutdown()
            except EnvironmentFault as fault:
                raise fault.sent() from None
