"""PyTorchRL's documented names of on-policy data, and the TensorDict key of each name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning._core.keys import (
    ACTION,
    ADVANTAGE,
    INTRINSIC_ADVANTAGE,
    INTRINSIC_REWARD,
    INTRINSIC_TARGET,
    INTRINSIC_VALUE,
    IS_INIT,
    LOG_PROB,
    OBSERVATION,
    RECURRENT_STATE,
    REPEATED,
    REWARD,
    TARGET,
    TERMINATED,
    TRUNCATED,
    VALUE,
)
from torchrl_lightning._core.tree import next_key, path_of

DOCUMENTED: dict[str, NestedKey] = {
    "Observation": OBSERVATION,
    "RecurrentHiddenStates": RECURRENT_STATE,
    "Done": TERMINATED,
    "Action": ACTION,
    "Reward": REWARD,
    "IntrinsicReward": INTRINSIC_REWARD,
    "ExternalReturn": TARGET,
    "IntrinsicReturn": INTRINSIC_TARGET,
    "Value": VALUE,
    "IntrinsicValue": INTRINSIC_VALUE,
    "LogProbability": LOG_PROB,
    "Advantage": ADVANTAGE,
    "IntrinsicAdvantage": INTRINSIC_ADVANTAGE,
}
"""The 13 documented names. ``Done`` means terminated; the optional name ``Truncated`` marks truncated episodes."""

_WITH_SUCCESSORS = ("Observation", "RecurrentHiddenStates", "Value", "IntrinsicValue")
OPTIONAL_NAMES: dict[str, NestedKey] = {"Truncated": TRUNCATED, "EpisodeStart": IS_INIT}
_FLAGS = {"Done", "NextDone", "Truncated", "NextTruncated", "EpisodeStart"}
_SCALARS = {*_FLAGS, "Reward", "IntrinsicReward", "Value", "IntrinsicValue", "NextValue", "NextIntrinsicValue"}
ALL_NAMES = sorted({*DOCUMENTED, *_FLAGS, *(f"Next{name}" for name in _WITH_SUCCESSORS)})


def key_of(name: str, keys: Mapping[str, NestedKey] = DOCUMENTED) -> NestedKey:
    """Return the key of a documented name; a ``Next...`` name gives the successor's key."""
    return keys[name] if name in keys else next_key(keys[name.removeprefix("Next")])


def from_documented(
    sample: Mapping[str, Any], batch_dims: int, keys: Mapping[str, NestedKey] = DOCUMENTED
) -> TensorDict:
    """Convert a dict with documented names to a TensorDict with this package's keys.

    Without ``NextDone``, ``Done`` means that the episode terminates after this step. With ``NextDone``, as in
    PyTorchRL's transitions, ``NextDone`` has this meaning and ``Done`` marks the start of an episode. ``Truncated`` is
    optional.
    The entries of a dict observation become root keys.

    Args:
        sample: dict from documented names to tensors or arrays, ``[N, ...]`` or time-major ``[T, N, ...]``.
        batch_dims: 1 for a transition, 2 for a rollout.
        keys: the key of each documented name.

    Raises:
        KeyError: a name is unknown, or ``Reward`` or ``Done`` is missing.
        TypeError: ``sample`` is not a dict.
    """
    if not isinstance(sample, Mapping):
        raise TypeError(f"Expected a TensorDict, or a dict with the documented names, got a {type(sample).__name__}.")
    unknown = sorted(set(sample) - set(ALL_NAMES))
    if unknown:
        raise KeyError(f"The names of a sample must be in {ALL_NAMES}, got {unknown}.")
    missing = [name for name in ("Reward", "Done") if name not in sample]
    if missing:
        raise KeyError(f"A sample must have 'Reward' and 'Done', got {sorted(sample)} without {missing}.")
    batch = torch.as_tensor(sample["Reward"]).shape[:batch_dims]
    out = TensorDict({}, batch)

    def read(name: str, value: Any) -> Tensor:
        tensor = torch.as_tensor(value)
        if name in _SCALARS and tensor.ndim == batch_dims:
            return tensor.unsqueeze(-1)
        if name == "LogProbability" and tensor.ndim > batch_dims and tensor.shape[-1] == 1:
            return tensor.squeeze(-1)
        return tensor

    for name, value in sample.items():
        if name in _FLAGS or value is None:
            continue
        path = path_of(key_of(name, keys))
        if isinstance(value, Mapping | TensorDictBase):
            parent = path[:-1] if name in ("Observation", "NextObservation") else path
            for key, leaf in value.items():
                out.set((*parent, key), read(name, leaf))
        else:
            out.set(path, read(name, value))
    terminated = read("Done", sample.get("NextDone", sample["Done"])).bool()
    truncated = sample.get("NextTruncated", sample.get("Truncated"))
    truncated_flag = torch.zeros_like(terminated) if truncated is None else read("Truncated", truncated).bool()
    out.set(("next", "terminated"), terminated)
    out.set(("next", "truncated"), truncated_flag)
    out.set(("next", "done"), terminated | truncated_flag)
    is_init = sample["Done"] if "NextDone" in sample else sample.get("EpisodeStart")
    if is_init is not None:
        out.set("is_init", read("EpisodeStart", is_init).bool())
    return out


def to_documented(data: TensorDictBase, keys: Mapping[str, NestedKey] = DOCUMENTED) -> dict[str, Any]:
    """Return the entries of a rollout or batch under their documented names; nested entries become dicts.

    Entries that exist at the root and under ``"next"`` form a dict observation. Entries without a documented name are
    dropped. :func:`from_documented` converts the result back.

    Examples:
        >>> data = TensorDict({"action": torch.zeros(1), "next": {"reward": torch.ones(1, 1)}}, [1])
        >>> {name: value.tolist() for name, value in to_documented(data).items()}
        {'Action': [0.0], 'Reward': [[1.0]]}
    """
    names = {**keys, **{f"Next{name}": key_of(f"Next{name}", keys) for name in _WITH_SUCCESSORS}, **OPTIONAL_NAMES}
    next_data = data.get("next", None)
    documented_roots = {path_of(key)[0] for key in (*keys.values(), *OPTIONAL_NAMES.values())}
    reserved = documented_roots - {OBSERVATION} | set(REPEATED)
    shared = [] if next_data is None else [key for key in data.keys() if key in next_data.keys()]  # noqa: SIM118
    observation_keys = [key for key in shared if key not in reserved]
    is_dict_observation = observation_keys not in ([], ["observation"])
    out: dict[str, Any] = {}
    for name, key in names.items():
        value = data.get(key, None)
        if is_dict_observation and name in ("Observation", "NextObservation"):
            source = data if name == "Observation" else next_data
            out[name] = {entry: source.get(entry) for entry in observation_keys}
        elif value is not None:
            out[name] = value.to_dict() if isinstance(value, TensorDictBase) else value
    return out
