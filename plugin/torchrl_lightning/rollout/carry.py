"""What a step leaves out because it follows from the step before it."""

from __future__ import annotations

from collections.abc import Collection

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning.entries import keyed_leaves, under
from torchrl_lightning.rollout.storage import RolloutStorage


def carried_over(
    data: TensorDictBase, storage: RolloutStorage, recurrent_keys: Collection[NestedKey]
) -> TensorDictBase:
    """Add to a step ``[N]`` what it lacks and the step after the stored ones has; return it.

    Raises:
        KeyError: what is missing does not follow from the step before.
    """
    tail, schema = storage.tail, storage.schema
    following = data.get("next", None)
    if tail is not None and tail.shape == data.shape:
        present = set(data.keys(include_nested=True))
        absent = {key: value for key, value in keyed_leaves(tail) if key in schema and key not in present}
        _check_new_episodes(tail.get("is_init"), absent, recurrent_keys)
        for key, value in absent.items():
            data.set(key, value)
    elif following is not None:
        _check_first(data, following, recurrent_keys)
    if data.get("is_init", None) is None and (not schema or "is_init" in schema):
        data.set("is_init", torch.ones(*data.shape, 1, dtype=torch.bool, device=data.device))
    return data


def _check_new_episodes(ended: Tensor, absent: Collection[NestedKey], recurrent_keys: Collection[NestedKey]) -> None:
    names = [key for key in absent if key != "is_init" and not any(under(key, k) for k in recurrent_keys)]
    if names and bool(ended.any()):
        rows = ended.flatten(1).any(-1).nonzero().flatten().tolist()
        raise KeyError(
            f"The step has no {names}, and in environments {rows} the step before ended an episode: what was "
            "stored last is the old episode's. Pass what the new episode begins with."
        )


def _check_first(data: TensorDictBase, following: TensorDictBase, recurrent_keys: Collection[NestedKey]) -> None:
    other = ("reward", "done", "terminated", "truncated")
    names = [name for name in following.keys() if name not in other and not name.endswith(("_reward", "_value"))]  # noqa: SIM118
    for name in names:
        if name in recurrent_keys and data.get(name, None) is None:
            data.set(name, following.get(name).clone().zero_())
    if names and not any(data.get(name, None) is not None for name in names if name not in recurrent_keys):
        raise KeyError(f"The first step has none of {names}, and nothing was stored before it to carry them over.")
