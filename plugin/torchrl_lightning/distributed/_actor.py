"""What runs in an actor of a Ray cluster, and the form in which rollouts and weights travel."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import nn

from torchrl_lightning.collectors.workers import Worker
from torchrl_lightning.distributed.cluster import installed
from torchrl_lightning.environments.faults import EnvironmentFault

Arrays = dict[Any, NDArray[Any]]


class RolloutActor:
    """A :class:`Worker` in an actor: it is built by its first rollout, so that what it raises is told.

    ``path`` is where the learner finds modules, which this machine may have, too.
    """

    def __init__(self, path: list[str], payload: bytes, number: int, count: int, begun: int) -> None:
        sys.path.extend(folder for folder in path if folder not in sys.path)
        self._task = payload, number, count, begun
        self._begun = begun
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
        return self._begun - 1, as_arrays(rollout)

    def close(self) -> None:
        """Close the environments."""
        worker, self._worker = self._worker, None
        if worker is not None:
            try:
                worker.collector.shutdown()
            except EnvironmentFault as fault:
                raise fault.sent() from None


def as_arrays(rollout: TensorDict) -> Arrays:
    """Return the entries of a rollout ``[N, T]`` as contiguous arrays ``[T, N, *F]``, which travel without a copy."""
    leaves = rollout.items(include_nested=True, leaves_only=True)
    return {key: np.ascontiguousarray(value.transpose(0, 1).numpy()) for key, value in leaves}


def as_rollout(arrays: Arrays) -> TensorDict:
    """Copy arrays ``[T, N, *F]`` into a rollout ``[N, T]``: to write into Ray's object store would end the process."""
    steps, num_envs = next(iter(arrays.values())).shape[:2]
    tensors = {key: torch.from_numpy(value.copy()) for key, value in arrays.items()}
    return TensorDict(tensors, [steps, num_envs], names=["time", None]).transpose(0, 1)


def weights_of(policy: object) -> Arrays | None:
    """Return the parameters and buffers of a policy on the CPU; None of one that has none."""
    if not isinstance(policy, nn.Module):
        return None
    return {name: value.detach().cpu().numpy() for name, value in _tensors(policy).items()}


def take_weights(policy: nn.Module, weights: Mapping[str, NDArray[Any]]) -> None:
    """Copy parameters and buffers into a policy."""
    for name, value in _tensors(policy).items():
        value.detach().copy_(torch.tensor(weights[name]))


def _tensors(policy: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in policy.state_dict().items() if isinstance(value, torch.Tensor)}
