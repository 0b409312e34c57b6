"""Observations as an environment shows them, read as the entries that a policy reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import Composite, TensorSpec

from torchrl_lightning.entries import Path, join, path_of


def observed_entries(specs: Composite, observation: Any) -> tuple[dict[NestedKey, Tensor], int | None]:
    """Read one observation, or a batch of them, as entries ``[N, *F]``.

    Args:
        specs: One spec for each observation key, without the batch dimension.
        observation: An array, a number, a tensor, or a dict of those, as the environment returns it; of a vector
            environment ``[N, *F]`` each.

    Returns:
        The entries, and ``N``; None where it is one observation, whose entries are ``[1, *F]``.

    Raises:
        ValueError: An entry is missing, or of another shape or dtype than its spec; the message names it.

    Examples:
        >>> from torchrl.data import Unbounded
        >>> entries, count = observed_entries(Composite(observation=Unbounded((4,))), np.zeros((2, 4)))
        >>> entries["observation"].shape, entries["observation"].dtype, count
        (torch.Size([2, 4]), torch.float32, 2)
    """
    shown = observation if isinstance(observation, Mapping) else {"observation": observation}
    found = {key: _read(key, spec, shown) for key, spec in _leaves(specs)}
    batched = {key: _count(key, spec, found[key]) for key, spec in _leaves(specs)}
    counts = set(batched.values())
    if len(counts) != 1:
        raise ValueError(f"the entries of the observation are of different batches: {batched}; None is no batch")
    count = counts.pop()
    return {key: found[key].reshape(count or 1, *spec.shape) for key, spec in _leaves(specs)}, count


def _leaves(specs: Composite) -> Iterator[tuple[NestedKey, TensorSpec]]:
    yield from specs.items(include_nested=True, leaves_only=True)


def _read(key: NestedKey, spec: TensorSpec, shown: Mapping[str, Any]) -> Tensor:
    value: Any = shown
    path: Path = path_of(key)
    if path[0] not in shown and path[0] == "observation" and "state" in shown:
        path = ("state", *path[1:])  # so TorchRL calls a lone entry of this name
    for name in path:
        if not isinstance(value, Mapping) or name not in value:
            raise ValueError(f"the observation has no entry {join((), path)!r}; the policy reads {spec.shape} there")
        value = value[name]
    tensor = torch.as_tensor(value if isinstance(value, Tensor) else np.asarray(value))
    if tensor.dtype != spec.dtype and not torch.can_cast(tensor.dtype, spec.dtype):
        raise ValueError(f"observation {key!r} has dtype {tensor.dtype}, expected {spec.dtype}")
    return tensor.to(spec.device or "cpu", spec.dtype)


def _count(key: NestedKey, spec: TensorSpec, value: Tensor) -> int | None:
    scalar = spec.shape == (1,)  # TorchRL gives numbers a dimension
    if value.shape == spec.shape or (scalar and not value.ndim):
        return None
    if value.ndim and (value.shape[1:] == spec.shape or (scalar and value.ndim == 1)):
        return len(value)
    expected = f"expected {list(spec.shape)}, or {['N', *spec.shape]} of N environments".replace("'", "")
    raise ValueError(f"observation {key!r} has shape {list(value.shape)}, {expected}")
