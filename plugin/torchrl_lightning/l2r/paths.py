"""Parts of the path-wise PPO buffer: steps as rows, advantages with rewards-to-go, documented names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning.entries import join, path_of
from torchrl_lightning.estimators import discounted_returns
from torchrl_lightning.replay.rows import flag, vector
from torchrl_lightning.rollout.advantages import GeneralizedAdvantages, flags
from torchrl_lightning.rollout.values import value_keys
from torchrl_lightning.rollout.writer import DONE, REWARD, TERMINATED

TRUNCATED = ("next", "truncated")
FINISHED = "finished"
BATCH: dict[str, NestedKey] = {
    "obs": "observation",
    "act": "action",
    "rew": REWARD,
    "ret": "value_target",
    "adv": "advantage",
    "val": "state_value",
    "logp": "action_log_prob",
}
"""The documented names of a batch, and the keys they stand for."""
SCALARS = ("rew", "ret", "adv", "val", "logp")


class PathAdvantages(GeneralizedAdvantages):
    """GAE as advantages, discounted rewards-to-go (bootstrapped where a path is cut) as value targets.

    ``A`` as in :class:`GeneralizedAdvantages`; ``R[t] = r[t] + γ R[t+1]``, which is ``A + V`` for ``λ = 1``.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> flag, one = torch.zeros(1, 2, 1, dtype=torch.bool), torch.ones(1, 2, 1)
        >>> following = {"reward": one, "done": flag, "terminated": flag, "state_value": one}
        >>> rollout = TensorDict({"state_value": one, "next": following}, [1, 2], names=[None, "time"])
        >>> PathAdvantages(gamma=0.5, lmbda=0.0)(rollout)["value_target"].flatten().tolist()
        [1.75, 1.5]
    """

    eps: float | None = None
    """Shift the advantages to mean 0 and divide by their population deviation plus this; ``None`` leaves them."""

    def advantages(
        self, rollout: TensorDictBase, reward: Tensor, value: Tensor, next_value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute GAE, and rewards-to-go."""
        advantage, _ = super().advantages(rollout, reward, value, next_value)
        return advantage, discounted_returns(reward, next_value, *flags(rollout, reward), self.gamma)

    def compute(self, rollout: TensorDictBase) -> None:
        """Write advantages and targets of every critic, standardised once over the whole rollout."""
        super().compute(rollout)
        if self.eps is None:
            return
        for key in value_keys(rollout, None, self.value_key):
            name = join(self.advantage_key, path_of(key)[len(path_of(self.value_key)) :])
            rollout.set(name, population_standardize(rollout.get(name), self.eps))


def population_standardize(x: Tensor, eps: float) -> Tensor:
    """Return ``(x - mean) / (std + eps)`` with the population deviation; equal entries become 0."""
    centred = x - x.mean()
    deviation = centred.square().mean().sqrt() + eps
    return centred / deviation if float(deviation) else centred


def step_row(
    step: Mapping[str, Any], obs_dim: int | None, act_dim: int | None, device: torch.device, start: bool
) -> TensorDict:
    """Read a documented step as one row ``[1]`` with our keys, its results still zero; ``start`` begins a path."""
    missing = [name for name in ("obs", "act", "rew") if name not in step]
    if missing:
        raise KeyError(f"The step lacks {missing}; store takes obs, act, rew, and done, truncated, next_obs.")
    act = step["act"]
    lacking = [name for name in ("action", "value", "logp") if getattr(act, name, None) is None]
    if lacking:
        raise ValueError(f"act is a {type(act).__name__} without {lacking}; it needs action, value and logp.")
    done, truncated = (flag(step.get(name, False), name, device) for name in ("done", "truncated"))
    entries: dict[NestedKey, Tensor] = {
        "observation": vector(step["obs"], "obs", obs_dim, device),
        "action": vector(act.action, "act.action", act_dim, device),
        "action_log_prob": vector(act.logp, "act.logp", 1, device).reshape(1),
        "state_value": vector(act.value, "act.value", 1, device),
        "is_init": torch.full((1, 1), start, device=device),
        REWARD: vector(step["rew"], "rew", 1, device),
        DONE: done | truncated,
        TERMINATED: done,
        TRUNCATED: truncated,
        "advantage": torch.zeros(1, 1, device=device),
        "value_target": torch.zeros(1, 1, device=device),
        FINISHED: torch.zeros(1, 1, dtype=torch.bool, device=device),
    }
    if "next_obs" in step:
        entries["next", "observation"] = vector(step["next_obs"], "next_obs", obs_dim, device)
    row = TensorDict({}, [1], device=device)
    for key, value in entries.items():
        row.set(key, value)
    return row
