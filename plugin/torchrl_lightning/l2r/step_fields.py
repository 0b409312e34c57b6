"""Conversion of steps from l2r-lab's runners, and of batches for its learners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning._core.keys import ADVANTAGE, LOG_PROB, NEXT, OBSERVATION, REWARD, TARGET, TERMINATED, VALUE
from torchrl_lightning.replay.conversion import to_flag, to_row

STEP_ENTRIES = ("obs", "next_obs", "act", "rew", "done", "truncated")
COLUMNS: dict[str, NestedKey] = {
    "obs": OBSERVATION,
    "obs2": (NEXT, OBSERVATION),
    "act": "action",
    "rew": REWARD,
    "done": TERMINATED,
    "ret": TARGET,
    "adv": ADVANTAGE,
    "val": VALUE,
    "logp": LOG_PROB,
}
"""Key in a batch for each l2r-lab name."""


def step_to_row(
    step: Any,
    required: Sequence[str],
    act_attributes: Sequence[str],
    obs_dim: int | None,
    act_dim: int | None,
    device: torch.device,
) -> TensorDict:
    """Convert an l2r-lab step to one row ``[1]``; ``act`` is an action, or an object with ``act_attributes``."""
    if not isinstance(step, Mapping):
        raise TypeError(f"buffer_dict must be a mapping, got a {type(step).__name__}; nothing was stored.")
    if missing := [name for name in required if name not in step]:
        optional = ", ".join(name for name in STEP_ENTRIES if name not in required)
        raise KeyError(f"buffer_dict lacks {missing}; it needs {', '.join(required)}, and may have {optional}.")
    act = step["act"]
    if missing_attributes := [name for name in act_attributes if getattr(act, name, None) is None]:
        raise ValueError(
            f"act must have the attributes {', '.join(act_attributes)}, got a {type(act).__name__} without "
            f"{missing_attributes}."
        )
    done, truncated = (to_flag(step.get(name, False), name, device) for name in ("done", "truncated"))
    next_step = {
        "reward": to_row(step["rew"], "rew", 1, device),
        "done": done | truncated,
        "terminated": done,
        "truncated": truncated,
    }
    if "next_obs" in step:
        next_step["observation"] = to_row(step["next_obs"], "next_obs", obs_dim, device)
    row = {
        "observation": to_row(step["obs"], "obs", obs_dim, device),
        "action": to_row(getattr(act, "action", act), "act", act_dim, device),
        "next": TensorDict(next_step, [1], device=device),
    }
    return TensorDict(row, [1], device=device)


def to_l2r_batch(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch in l2r-lab's format: float32, observations and actions ``[B, features]``, all else ``[B]``."""
    vectors = ("obs", "obs2", "act")
    return {
        name: column.float().reshape(len(column), -1) if name in vectors else column.float().flatten()
        for name, column in columns.items()
    }
