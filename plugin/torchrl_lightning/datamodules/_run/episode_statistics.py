"""Returns and lengths of episodes that end within rollouts, including episodes from earlier rollouts."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lightning._core.keys import REPLAYED
from torchrl_lightning._core.rank_metrics import Mean, Sum
from torchrl_lightning._core.state import MAX_COUNT, Attribute, Stateful, sequence, state_error, tensor


def read_episode_data(rollout: TensorDictBase) -> dict[str, Any]:
    """Return the arguments of :meth:`FinishedEpisodes.add` from a rollout ``[N, T]``."""
    rows = rollout["next"]
    return {"reward": rows["reward"], "done": rows["done"], "replayed": rollout.get(REPLAYED, None)}


def _concat(finished: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Concatenate the returns and the lengths of all episodes; an empty list without episodes."""
    return [torch.cat(tensors) for tensors in zip(*finished, strict=True)]


def _read_finished(value: Any, name: str) -> list[tuple[Tensor, Tensor]]:
    """Validate and convert the result of :func:`_concat`."""
    if not sequence(value, name):
        return []
    if len(value) != 2:
        raise state_error(value, name, "returns and lengths")
    returns = tensor(torch.float64, None)(value[0], f"the first of {name}")
    return [(returns, tensor(torch.int64, len(returns), low=1, high=MAX_COUNT)(value[1], f"the second of {name}"))]


class FinishedEpisodes(Stateful):
    """Mean return and length of the episodes since the last summary, in at least ``num_envs`` environments.

    Rollouts of a single step are common, so several rollouts are stored first and then evaluated together. ``C[t]`` is
    the cumulative reward of an environment. If one episode ends at ``s`` and the next one at ``t``, the next one has
    the return ``C[t] - C[s]``. The return of an environment's first episode also includes the rewards of this episode
    in earlier rollouts.

    Examples:
        >>> episodes = FinishedEpisodes(1)
        >>> episodes.add(torch.ones(1, 3, 1), torch.tensor([[[False], [True], [False]]]))
        >>> episodes.summary()
        {'train/return': 2.0, 'train/length': 2.0, 'train/episodes': 1.0}
    """

    OWNER = "episodes"
    STATE = {"finished": Attribute(_read_finished, "_finished", _concat)}

    def __init__(self, num_envs: int) -> None:
        self._returns = torch.zeros(num_envs, dtype=torch.float64)  # sums over unfinished episodes
        self._lengths = torch.zeros(num_envs, dtype=torch.int64)
        self._pending: list[tuple[Tensor, Tensor, Tensor | None]] = []  # rollouts of the same environments
        self._env_ids: Tensor | None = None  # ids of these environments
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
        """Add the rewards and done flags ``[N, T, *]`` of a rollout.

        Rewards are summed over ``*``, and any done flag ends an episode. ``env_ids`` ``[N]`` are the environments of
        the rows; None for the first ``N``. ``cut`` is True if the environments are reset afterwards. Episodes that end
        by this reset, or at a ``replayed`` step (``[N, T, 1]`` bool), are not counted.
        """
        if env_ids is not self._env_ids:
            self._flush()
            self._env_ids = env_ids
        # Copy the tensors, because a collector may reuse its memory.
        self._pending.append((reward.clone(), done.clone(), None if replayed is None else replayed.clone()))
        if cut:
            self.forget_unfinished()
        elif len(self._pending) >= 1024:
            self._flush()

    def summary(self) -> dict[str, float]:
        """Return mean return, mean length and number of ended episodes, and forget them; empty without episodes."""
        self._flush()
        finished, self._finished = self._finished, []
        if not sum(len(returns) for returns, _ in finished):
            return {}
        returns, lengths = (torch.cat(tensors) for tensors in zip(*finished, strict=True))
        return {
            "train/return": Mean(returns.mean().item(), len(returns)),
            "train/length": Mean(lengths.double().mean().item(), len(returns)),
            "train/episodes": Sum(len(returns)),
        }

    def forget_unfinished(self, env_ids: Tensor | slice = slice(None)) -> None:
        """Drop the unfinished episodes of these environments, for example after a reset."""
        self._flush()
        if isinstance(env_ids, Tensor):
            env_ids = env_ids[env_ids < len(self._returns)]
        self._returns[env_ids] = 0
        self._lengths[env_ids] = 0

    def _flush(self) -> None:
        """Compute returns and lengths of the episodes that ended in the stored rollouts."""
        if not self._pending:
            return
        rewards, dones, replays = zip(*self._pending, strict=True)
        self._pending.clear()
        reward, done = torch.cat(rewards, 1).detach().cpu(), torch.cat(dones, 1).cpu()
        reward, done = reward.reshape(*reward.shape[:2], -1).sum(-1), done.reshape(*done.shape[:2], -1).any(-1)
        ids = torch.arange(len(reward)) if self._env_ids is None else self._env_ids
        missing = int(ids.max()) + 1 - len(self._returns)
        if missing > 0:
            self._returns = torch.cat([self._returns, self._returns.new_zeros(missing)])
            self._lengths = torch.cat([self._lengths, self._lengths.new_zeros(missing)])
        returns_before, lengths_before = self._returns[ids], self._lengths[ids]
        total = reward.double().cumsum(1)
        env, time = done.nonzero(as_tuple=True)
        total_at_end, steps_at_end = total[env, time], time + 1
        is_first = torch.ones_like(env, dtype=torch.bool)
        is_first[1:] = env[1:] != env[:-1]
        returns = total_at_end - torch.where(is_first, -returns_before[env], total_at_end.roll(1))
        lengths = steps_at_end - torch.where(is_first, -lengths_before[env], steps_at_end.roll(1))
        if replays[0] is None:
            self._finished.append((returns, lengths))
        else:
            is_collected = ~torch.cat(replays, 1)[env, time, 0].cpu()
            self._finished.append((returns[is_collected], lengths[is_collected]))
        # Carry over the rewards and steps of each environment's unfinished episode.
        returns_before, lengths_before = returns_before + total[:, -1], lengths_before + total.shape[1]
        is_last = is_first.roll(-1)
        ended = env[is_last]
        returns_before[ended] = total[ended, -1] - total_at_end[is_last]
        lengths_before[ended] = total.shape[1] - steps_at_end[is_last]
        self._returns[ids], self._lengths[ids] = returns_before, lengths_before

    def state_dict(self, *, copy: bool = True) -> dict[str, Any]:
        """Return the finished episodes for the next summary; unfinished episodes cannot continue after a load."""
        self._flush()
        return super().state_dict(copy=copy)

    def _post_load(self) -> None:
        self._pending = []
        self._returns, self._lengths = torch.zeros_like(self._returns), torch.zeros_like(self._lengths)
