"""Formats of rollouts, batches and weights that are sent through a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torch import nn

from torchrl_lightning._core.tree import Path, path_of, tensordict_of

Arrays = dict[Any, NDArray[Any]]
_BFLOAT16 = np.dtype("V2")  # NumPy has no bfloat16


class Receipt(NamedTuple):
    """The numbers of a writer's rollouts that are written and that are in a snapshot.

    ``has_other_readers`` is True if another thread or process than the writer draws, and None if a restarted shard does
    not know it. ``start`` describes the content with which the shard began.
    """

    written: int
    acknowledged: int
    has_other_readers: bool | None
    start: str


class SampledBatches(NamedTuple):
    """The batches of one call, and the shard's start time and numbers of stored, written and drawn rows.

    The batches are empty if the call does not wait and too few rows are stored. ``has_other_writers`` is True if
    another thread or process than the reader writes, and None if a restarted shard does not know it. ``has_folder`` is
    False if a crash loses the rows. ``start`` describes the content with which the shard began.
    """

    batches: list[tuple[list[int], list[Any], Arrays]]
    start_time: int
    size: int
    inserted: int
    drawn: int
    has_other_writers: bool | None
    has_folder: bool
    start: str


class BatchUpdate(NamedTuple):
    """A learner's new values for a batch: entries with these ``keys``, or priorities if ``keys`` is None."""

    start_time: int
    shape: list[int]
    arrays: Arrays
    keys: list[Any] | None


def as_arrays(rollout: TensorDict) -> Arrays:
    """Return the entries of a rollout ``[N, T]`` as contiguous arrays ``[T, N, *F]``, which Ray does not copy."""
    return pack_batch(rollout.transpose(0, 1))[2]


def as_rollout(arrays: Arrays) -> TensorDict:
    """Copy arrays ``[T, N, *F]`` into a rollout ``[N, T]``."""
    entries = {path: value.transpose(0, 1) for path, value in _copied_tensors(arrays)}
    return tensordict_of(entries, next(iter(entries.values())).shape[:2], (None, "time"))


def copy_weights(policy: object) -> Arrays | None:
    """Return a copy of a policy's parameters and buffers, or None if the policy is not a module."""
    if not isinstance(policy, nn.Module):
        return None
    return {name: _as_array(value.detach()).copy() for name, value in _tensors(policy).items()}


def load_weights(policy: nn.Module, weights: Mapping[str, NDArray[Any]]) -> None:
    """Copy parameters and buffers into a policy."""
    for name, value in _tensors(policy).items():
        value.detach().copy_(_copied_tensor(weights[name]))


def _tensors(policy: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in policy.state_dict().items() if isinstance(value, torch.Tensor)}


def pack_batch(batch: TensorDictBase) -> tuple[list[int], list[Any], Arrays]:
    """Return shape, names and contiguous arrays of a batch."""
    leaves: Mapping[Any, Any] = dict(batch.items(include_nested=True, leaves_only=True))
    return (
        list(batch.shape),
        list(batch.names),
        {key: _as_array(value) for key, value in leaves.items()},
    )


def unpack_batch(shape: Sequence[int], names: Sequence[Any], arrays: Arrays) -> TensorDict:
    """Copy arrays into a batch."""
    return tensordict_of(dict(_copied_tensors(arrays)), torch.Size(shape), tuple(names))


def _copied_tensors(arrays: Arrays) -> Iterator[tuple[Path, torch.Tensor]]:
    """Yield copies of arrays as tensors, because writing into Ray's object store would end the process."""
    return ((path_of(key), _copied_tensor(value)) for key, value in arrays.items())


def _as_array(tensor: torch.Tensor) -> NDArray[Any]:
    tensor = tensor.cpu().contiguous()
    return tensor.view(torch.int16).numpy().view(_BFLOAT16) if tensor.dtype == torch.bfloat16 else tensor.numpy()


def _copied_tensor(array: NDArray[Any]) -> torch.Tensor:
    is_bfloat16 = array.dtype == _BFLOAT16
    tensor = torch.from_numpy((array.view(np.int16) if is_bfloat16 else array).copy())
    return tensor.view(torch.bfloat16) if is_bfloat16 else tensor
