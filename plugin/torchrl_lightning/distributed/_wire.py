"""The forms in which rollouts, batches and weights travel through a Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torch import nn

Arrays = dict[Any, NDArray[Any]]


class Receipt(NamedTuple):
    """What a writer learns: how many of its rollouts are written, and how many of them a snapshot holds."""

    written: int
    acknowledged: int


class Draws(NamedTuple):
    """Batches of one call, the life of the shard that drew them, and what it holds, has written and drawn."""

    batches: list[tuple[list[int], list[Any], Arrays]]
    life: int
    size: int
    inserted: int
    drawn: int


class Learned(NamedTuple):
    """What a learner hands back of a batch: priorities, or rewritten entries where there are ``keys``."""

    life: int
    shape: list[int]
    arrays: Arrays
    keys: list[Any] | None


def as_arrays(rollout: TensorDict) -> Arrays:
    """Return the entries of a rollout ``[N, T]`` as contiguous arrays ``[T, N, *F]``, which travel without a copy."""
    return packed(rollout.transpose(0, 1))[2]


def as_rollout(arrays: Arrays) -> TensorDict:
    """Copy arrays ``[T, N, *F]`` into a rollout ``[N, T]``."""
    return unpacked(next(iter(arrays.values())).shape[:2], ["time", None], arrays).transpose(0, 1)


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


def packed(batch: TensorDictBase) -> tuple[list[int], list[Any], Arrays]:
    """Return shape, names and contiguous arrays of a batch."""
    leaves: Mapping[Any, Any] = dict(batch.items(include_nested=True, leaves_only=True))
    return (
        list(batch.shape),
        list(batch.names),
        {key: value.cpu().contiguous().numpy() for key, value in leaves.items()},
    )


def unpacked(shape: Sequence[int], names: Sequence[Any], arrays: Arrays) -> TensorDict:
    """Copy arrays into a batch: to write into Ray's object store would end the process."""
    return TensorDict({key: torch.tensor(value) for key, value in arrays.items()}, shape, names=list(names))
