"""Returns and lengths of the episodes that end inside rollouts, begun there or before."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lightning.keys import REPLAYED
from torchrl_lightning.state import LARGEST, Attribute, Stated, sequence, tensor, wrong


def ends_of(rollout: TensorDictBase) -> dict[str, Any]:
    """Return what :meth:`FinishedEpisodes.add` takes of a rollout ``[N, T]``."""
    rows = rollout["next"]
    return {"reward": rows["reward"], "done": rows["done"], "replayed": rollout.get(REPLAYED, None)}


def _joined(finished: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Return the returns and the lengths of episodes; nothing if there are none."""
    return [torch.cat(each) for each in zip(*finished, strict=True)]


def _read_finished(value: Any, name: str) -> list[tuple[Tensor, Tensor]]:
    """Take what :func:`_joined` returned."""
    if not sequence(value, name):
        return []
    if len(value) != 2:
        raise wrong(value, name, "returns and lengths")
    returns = tensor(torch.float64, None)(value[0], f"the first of {name}")
    return [(returns, tensor(torch.int64, len(returns), low=1, high=LARGEST)(value[1], f"the second of {name}"))]


class FinishedEpisodes(Stated):
    """Means over the episodes that ended since they were last asked for, of ``num_envs`` environments or more.

    Rollouts of a single step are common, so that each is only noted; what ended is found for many at once. With
    ``C[t]`` the cumulated reward of one environment, an episode that ended at ``t`` after one that ended at ``s``
    returned ``C[t] - C[s]``; the first one adds what was carried over from before.

    Examples:
        >>> episodes = FinishedEpisodes(1)
        >>> episodes.add(torch.ones(1, 3, 1), torch.tensor([[[False], [True], [False]]]))
        >>> episodes.summary()
        {'train/return': 2.0, 'train/length': 2.0, 'train/episodes': 1.0}
    """

    OWNER = "episodes"
    STATE = {"finished": Attribute(_read_finished, "_finished", _joined)}

    def __init__(self, num_envs: int) -> None:
        self._returns = torch.zeros(num_envs, dtype=torch.float64)  # of the episodes that go on
        self._lengths = torch.zeros(num_envs, dtype=torch.int64)
        self._noted: list[tuple[Tensor, Tensor, Tensor | None]] = []  # all of the same environments
        self._env_ids: Tensor | None = None  # which ones
        self._finished: list[tuple[Tensor, Tensor]] = []

    def add(
        self,
        reward: Tensor,
        done: Tensor,
        env_ids: Tensor | None = None,
        *,
        cut: bool = False,
        replayed: Tensor | None = None,
    ) -> None:
        """Take the rewards (summed) and done flags (any ends an episode) ``[N, T, *]`` of a rollout.

        They are those of the environments ``env_ids`` ``[N]``, of the first ``N`` if None. With ``cut`` the
        environments are reset afterwards; episodes that this ends do not count, nor do those that are ``replayed``
        (``[N, T, 1]`` bool).
        """
        if env_ids is not self._env_ids:
            self._flush()
            self._env_ids = env_ids
        # Copies: a collector may reuse its memory.
        self._noted.append((reward.clone(), done.clone(), None if replayed is None else replayed.clone()))
        if cut:
            self.forget_unfinished()
        elif len(self._noted) >= 1024:
            self._flush()

    def summary(self) -> dict[str, float]:
        """Return mean return, mean length and number of the episodes, and forget them; empty if there are none."""
        self._flush()
        finished, self._finished = self._finished, []
        if not sum(len(returns) for returns, _ in finished):
            return {}
        returns, lengths = (torch.cat(each) for each in zip(*finished, strict=True))
        return {
            "train/return": returns.mean().item(),
            "train/length": lengths.double().mean().item(),
            "train/episodes": float(len(returns)),
        }

    def forget_unfinished(self, env_ids: Tensor | slice = slice(None)) -> None:
        """Forget unfinished episodes, as when these environments have been reset."""
        self._flush()
        if isinstance(env_ids, Tensor):
            env_ids = env_ids[env_ids < len(self._returns)]
        self._returns[env_ids] = 0
        self._lengths[env_ids] = 0

    def _flush(self) -> None:
        """Find what has ended in the noted rollouts."""
        if not self._noted:
            return
        rewards, dones, replays = zip(*self._noted, strict=True)
        self._noted.clear()
        reward, done = torch.cat(rewards, 1).detach().cpu(), torch.cat(dones, 1).cpu()
        reward, done = reward.reshape(*reward.shape[:2], -1).sum(-1), done.reshape(*done.shape[:2], -1).any(-1)
        ids = torch.arange(len(reward)) if self._env_ids is None else self._env_ids
        missing = int(ids.max()) + 1 - len(self._returns)
        if missing > 0:
            self._returns = torch.cat([self._returns, self._returns.new_zeros(missing)])
            self._lengths = torch.cat([self._lengths, self._lengths.new_zeros(missing)])
        before, steps_before = self._returns[ids], self._lengths[ids]
        total = reward.double().cumsum(1)
        env, time = done.nonzero(as_tuple=True)
        at_end, after = total[env, time], time + 1
        first = torch.ones_like(env, dtype=torch.bool)
        first[1:] = env[1:] != env[:-1]
        returns = at_end - torch.where(first, -before[env], at_end.roll(1))
        lengths = after - torch.where(first, -steps_before[env], after.roll(1))
        if replays[0] is None:
            self._finished.append((returns, lengths))
        else:
            own = ~torch.cat(replays, 1)[env, time, 0].cpu()
            self._finished.append((returns[own], lengths[own]))
        # Each environment carries over what it collected since the end of its last episode.
        before, steps_before = before + total[:, -1], steps_before + total.shape[1]
        last = first.roll(-1)
        ended = env[last]
        before[ended] = total[ended, -1] - at_end[last]
        steps_before[ended] = total.shape[1] - after[last]
        self._returns[ids], self._lengths[ids] = before, steps_before

    def state_dict(self, *, copy: bool = True) -> dict[str, Any]:
        """Return the episodes that the next summary is about; those that have not ended do not continue elsewhere."""
        self._flush()
        return super().state_dict(copy=copy)

    def _loaded(self) -> None:
        self._noted = []
        self._returns, self._lengths = torch.zeros_like(self._returns), torch.zeros_like(self._lengths)
