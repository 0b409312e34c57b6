"""What runs in an actor of a Ray cluster and collects."""

from __future__ import annotations

import torchrl_lightning.distributed._begin  # noqa: F401

# isort: split
import sys
from collections.abc import Sequence

from torchrl_lightning.collectors.workers import Worker
from torchrl_lightning.distributed._service_writer import ServiceWriter
from torchrl_lightning.distributed._wire import Arrays, as_arrays, take_weights
from torchrl_lightning.distributed.cluster import installed
from torchrl_lightning.environments.faults import EnvironmentFault
from torchrl_lightning.environments.origins import cut_off
from torchrl_lightning.keys import COLLECTOR, DONE, ENV_IDS, REPLAYED, REWARD

COUNTED = (REWARD, DONE, REPLAYED, COLLECTOR)  # what a learner counts of rollouts that are written elsewhere


class RolloutActor:
    """A :class:`Worker` in an actor: it is built by its first rollout, so that what it raises is told.

    ``path`` is where the learner finds modules, which this machine may have, too. With a ``writer``, rollouts go to a
    replay service without the entries ``left_out``, and the learner gets what it counts, and the first one.
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

        Ray reads ``weights`` once on each machine, however many actors are there.
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
            raise fault.sent() from None  # its cause may be of a class that the learner cannot import
        self._begun += 1
        if self._writer is not None:
            if self._worker.collector.reset_at_each_batch:
                cut_off(rollout)
            ids = rollout[ENV_IDS][:, 0].tolist()
            self._writer.write(as_arrays(rollout.exclude(*self._left_out)), ids)
            if self._begun - 1 > self._task[-1]:  # not the first one of this actor
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
