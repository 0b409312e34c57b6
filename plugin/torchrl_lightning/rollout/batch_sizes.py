"""Split a rollout into mini-batches and select their entries."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning._core.keys import REPLAYED
from torchrl_lightning._core.torchrl_compat import new_tensordict
from torchrl_lightning._core.tree import Tree, next_key
from torchrl_lightning._core.validators import integer

_SEQUENCE_NAMES = (None, "time")


def split_epoch(
    units: int, num_mini_batch: int | None, mini_batch_size: int | None, drop_last: bool, *, whole_envs: bool
) -> tuple[int | None, int | None]:
    """Return the number and the size of an epoch's mini-batches; without a given size, the sizes differ by at most 1.

    Raises:
        ValueError: an argument is not positive, exceeds the stored data, or does not divide the number of environments.
    """
    unit = "environments" if whole_envs else "steps"
    for name, value in (("num_mini_batch", num_mini_batch), ("mini_batch_size", mini_batch_size)):
        if value is not None and integer(value, name) > units:
            raise ValueError(f"{name} must be at most {units}, the number of stored {unit}, got {value}.")
    if num_mini_batch is None and mini_batch_size is None:
        raise ValueError(
            "num_mini_batch or mini_batch_size must be an integer, got None for both. Pass one of them, or give the "
            "buffer an algorithm that has them."
        )
    if num_mini_batch is not None and mini_batch_size is not None:
        if num_mini_batch * mini_batch_size > units:
            raise ValueError(
                f"num_mini_batch={num_mini_batch} times mini_batch_size={mini_batch_size} is "
                f"{num_mini_batch * mini_batch_size}, but only {units} {unit} are stored. Lower one of them."
            )
        return num_mini_batch, mini_batch_size
    if num_mini_batch is None:
        return None, mini_batch_size
    if whole_envs and units % num_mini_batch:
        raise ValueError(
            f"num_mini_batch must divide the {units} environments, got {num_mini_batch}: a recurrent mini-batch holds "
            f"whole environments. Use one of {[n for n in range(1, units + 1) if units % n == 0]}."
        )
    return num_mini_batch, units // num_mini_batch if drop_last else None


def select_entries(
    rollout: TensorDictBase, keys: Collection[NestedKey] | None, hidden: Collection[NestedKey], *, flat: bool
) -> Tree:
    """Return the entries ``keys``, or all except ``hidden``, as a nested dict ``[T, N]``, or ``[T * N]`` if ``flat``.

    Raises:
        KeyError: the rollout lacks one of ``keys``.
    """
    if keys is not None:
        missing = [key for key in keys if key not in rollout.keys(include_nested=True)]
        if missing:
            available = sorted(map(str, rollout.keys(include_nested=True, leaves_only=True)))
            raise KeyError(f"batch_keys must be entries of the rollout, got {missing}. The rollout has {available}.")
        # A loss needs this mark to distinguish replayed steps from the policy's steps.
        marks = [REPLAYED] if rollout.get(REPLAYED, None) is not None else []
        rollout = rollout.select(*keys, *marks)
        hidden = ()
    hidden_paths = {(key,) if isinstance(key, str) else key for key in hidden}

    def walk(node: TensorDictBase, prefix: tuple[str, ...]) -> Tree:
        tree: Tree = {}
        for key, value in node.items():
            path = (*prefix, key)
            if path not in hidden_paths:
                if isinstance(value, TensorDictBase):
                    tree[key] = walk(value, path)
                else:
                    tree[key] = value.flatten(0, 1) if flat else value
        return tree

    return walk(rollout, ())


def sequences(
    rollout: TensorDictBase, envs: Tensor | None = None, recurrent_keys: Collection[NestedKey] = ("recurrent_state",)
) -> TensorDict:
    """Return environments of a rollout ``[T, N]`` as sequences ``[B, T]`` with dimension names ``(None, "time")``.

    All steps of a sequence get the recurrent state of its first step, except episode starts, which get 0. TorchRL's
    ``GRUModule`` and ``LSTMModule`` split a sequence at ``is_init`` and read the state at each split.

    Args:
        rollout: time-major ``[T, N]``.
        envs: environment indices ``[B]``; ``None`` selects all.
        recurrent_keys: root keys of recurrent states.
    """
    envs = torch.arange(rollout.shape[1], device=device_in(rollout)) if envs is None else envs
    batch = torch.Size([envs.shape[0], rollout.shape[0]])

    present = [key for key in recurrent_keys if key in rollout.keys(include_nested=True)]
    other_entries = rollout.exclude(*present, *(next_key(key) for key in present)) if present else rollout
    out = view_leaves(other_entries, lambda value: value.transpose(0, 1).index_select(0, envs), batch, _SEQUENCE_NAMES)
    is_init = out.get("is_init", None)

    def initial_state(value: Tensor) -> Tensor:
        state = value[0].index_select(0, envs).unsqueeze(1).expand(batch[0], batch[1], *value.shape[2:])
        if is_init is None or not bool(is_init.any()):
            return state
        return state.masked_fill(is_init.reshape(*batch, *[1] * (value.ndim - 2)), 0)

    for key in present:
        value = rollout.get(key)
        out.set(
            key,
            initial_state(value)
            if isinstance(value, Tensor)
            else view_leaves(value, initial_state, batch, _SEQUENCE_NAMES),
        )
    return out


def view_leaves(
    data: TensorDictBase, view: Callable[[Any], Any], batch: torch.Size, names: Sequence[str | None] | None = None
) -> TensorDict:
    """Apply a view to every leaf; TensorDict's methods take four times as long, and every write calls this function."""
    entries = {
        key: view_leaves(value, view, batch, names)
        if isinstance(value, TensorDictBase) and not is_non_tensor(value)
        else view(value)
        for key, value in data.items()
    }
    return new_tensordict(entries, batch, names)


def device_in(data: TensorDictBase) -> torch.device | None:
    """Return the device of the first leaf, or None for data without leaves."""
    for value in data.values(include_nested=True, leaves_only=True):
        return torch.device(value.device)
    return None
