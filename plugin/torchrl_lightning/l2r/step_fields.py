"""Conversion of steps from l2r-lab's runners, and of batches for its learners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning._core.keys import ADVANTAGE, LOG_PROB, NEXT, OBSERVATION, REWARD, TARGET, TERMINATED, VALUE
from torchrl_lightning.replay.conversion import flag, vector

STEP = ("obs", "next_obs", "act", "rew", "done", "truncated")
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
"""Key of each l2r-lab name in a batch."""


def read_step(
    step: Any,
    needed: Sequence[str],
    of_act: Sequence[str],
    obs_dim: int | None,
    act_dim: int | None,
    device: torch.device,
) -> TensorDict:
    """Convert an l2r-lab step to one row ``[1]``; ``act`` is an object with the attributes ``of_act``, or an action."""
    if not isinstance(step, Mapping):
        raise TypeError(f"A step is a dict of documented entries, got a {type(step).__name__}; nothing was stored.")
    if missing := [name for name in needed if name not in step]:
        others = ", ".join(name for name in STEP if name not in needed)
        raise KeyError(f"The step lacks {missing}; store takes {', '.join(needed)}, and {others}.")
    act = step["act"]
    if lacking := [name for name in of_act if getattr(act, name, None) is None]:
        raise ValueError(f"act is a {type(act).__name__} without {lacking}; it needs {', '.join(of_act)}.")
    done, truncated = (flag(step.get(name, False), name, device) for name in ("done", "truncated"))
    following = {
        "reward": vector(step["rew"], "rew", 1, device),
        "done": done | truncated,
        "terminated": done,
        "truncated": truncated,
    }
    if "next_obs" in step:
        following["observation"] = vector(step["next_obs"], "next_obs", obs_dim, device)
    row = {
        "observation": vector(step["obs"], "obs", obs_dim, device),
        "action": vector(getattr(act, "action", act), "act", act_dim, device),
        "next": TensorDict(following, [1], device=device),
    }
    return TensorDict(row, [1], device=device)


def documented(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch in l2r-lab's format: float32, observations and actions ``[B, features]``, all else ``[B]``."""
    vectors = ("obs", "obs2", "act")
    return {
        name: each.float().reshape(len(each), -1) if name in vectors else each.float().flatten()
        for name, each in columns.items()
    }
