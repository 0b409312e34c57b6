"""Returns and lengths of the episodes that end inside a rollout, begun there or before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchrl_lightning.state import LARGEST, check_state, tensor


class EpisodeTracker:
    r"""Sum rewards over episodes that stretch over several rollouts.

    With ``C[t]`` the cumulated reward of one environment's rollout, an episode that ended at ``t`` after one that ended
    at ``s`` returned ``C[t] - C[s]``; the first one adds what was carried over from the rollouts before.

    Args:
        num_envs: number of environments; grows with the numbers that :meth:`update` is told.

    Example:
        >>> tracker = EpisodeTracker(1)
        >>> tracker.update(torch.ones(3, 1), torch.tensor([[False], [True], [False]]))
        (tensor([2.], dtype=torch.float64), tensor([2]))
        >>> tracker.update(torch.ones(2, 1), torch.tensor([[False], [True]]))
        (tensor([3.], dtype=torch.float64), tensor([3]))
    """

    def __init__(self, num_envs: int) -> None:
        self._returns = torch.zeros(num_envs, dtype=torch.float64)
        self._lengths = torch.zeros(num_envs, dtype=torch.int64)

    def update(self, reward: Tensor, done: Tensor, env_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Take a rollout in, and return what the episodes that ended in it came to.

        Args:
            reward: ``[T, N]``.
            done: ``[T, N]``.
            env_ids: whose columns these are, ``[N]``; the first ``N`` environments if None.

        Returns:
            Returns and lengths, ``[E]``.
        """
        ids = torch.arange(reward.shape[1]) if env_ids is None else env_ids
        missing = int(ids.max()) + 1 - len(self._returns)
        if missing > 0:
            self._returns = torch.cat([self._returns, self._returns.new_zeros(missing)])
            self._lengths = torch.cat([self._lengths, self._lengths.new_zeros(missing)])
        before, steps_before = self._returns[ids], self._lengths[ids]
        total = reward.detach().to("cpu", torch.float64).cumsum(0)
        env, time = done.detach().cpu().t().nonzero(as_tuple=True)
        at_end, after = total[time, env], time + 1
        first = torch.ones_like(env, dtype=torch.bool)
        first[1:] = env[1:] != env[:-1]
        returns = at_end - torch.where(first, -before[env], at_end.roll(1))
        lengths = after - torch.where(first, -steps_before[env], after.roll(1))
        # Each environment carries over what it collected since the end of its last episode.
        before, steps_before = before + total[-1], steps_before + len(total)
        last = torch.ones_like(env, dtype=torch.bool)
        last[:-1] = env[1:] != env[:-1]
        ended = env[last]
        before[ended] = total[-1, ended] - at_end[last]
        steps_before[ended] = len(total) - after[last]
        self._returns[ids], self._lengths[ids] = before, steps_before
        return returns, lengths

    def reset(self) -> None:
        """Forget unfinished episodes, as when every environment has been reset."""
        self._returns.zero_()
        self._lengths.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the sums carried over."""
        return {"returns": self._returns.clone(), "lengths": self._lengths.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the sums of :meth:`state_dict`.

        Raises:
            ValueError: they are none; nothing is changed.
        """
        self.check_state(state)
        self._returns, self._lengths = state["returns"].clone(), state["lengths"].clone()

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a state that :meth:`load_state_dict` cannot take; change nothing.

        Raises:
            ValueError: says what is wrong.
        """
        schema = {"returns": tensor(torch.float64, None), "lengths": tensor(torch.int64, None, low=0, high=LARGEST)}
        check_state(state, schema, "episode tracker")
        if len(state["returns"]) != len(state["lengths"]):
            found = f"{len(state['returns'])} returns and {len(state['lengths'])} lengths"
            raise ValueError(f"The episode tracker state is foreign: it holds {found}, expected as many of both.")


class FinishedEpisodes:
    """Means over the episodes that ended since they were last asked for.

    Rollouts of a single step are common here, so that each is only noted; what ended is found for many at once.

    Args:
        num_envs: number of environments.

    Example:
        >>> episodes = FinishedEpisodes(1)
        >>> episodes.add(torch.ones(1, 3, 1), torch.tensor([[[False], [True], [False]]]))
        >>> episodes.summary()
        {'train/return': 2.0, 'train/length': 2.0, 'train/episodes': 1.0}
    """

    def __init__(self, num_envs: int) -> None:
        self._tracker = EpisodeTracker(num_envs)
        self._noted: list[tuple[Tensor, Tensor]] = []  # all of the same environments
        self._env_ids: Tensor | None = None  # which ones
        self._returns: list[Tensor] = []
        self._lengths: list[Tensor] = []

    def add(self, reward: Tensor, done: Tensor, env_ids: Tensor | None = None, *, cut: bool = False) -> None:
        """Take the rewards and done flags ``[N, T, *]`` of a rollout.

        Args:
            reward: summed over trailing dimensions.
            done: any of them ends an episode.
            env_ids: whose rows these are, ``[N]``; the first ``N`` environments if None.
            cut: whether the environments are reset afterwards; episodes that this ends do not count.
        """
        if env_ids is not self._env_ids:
            self._flush()
            self._env_ids = env_ids
        # Copies: a collector may reuse its memory.
        self._noted.append((reward.clone(), done.clone()))
        if cut or len(self._noted) >= 1024:
            self._flush()
        if cut:
            self._tracker.reset()

    def _flush(self) -> None:
        if not self._noted:
            return
        rewards, dones = zip(*self._noted, strict=True)
        self._noted.clear()
        reward, done = torch.cat(rewards, 1), torch.cat(dones, 1)
        returns, lengths = self._tracker.update(
            reward.flatten(2).sum(-1).transpose(0, 1), done.flatten(2).any(-1).transpose(0, 1), self._env_ids
        )
        self._returns.append(returns)
        self._lengths.append(lengths)

    def summary(self) -> dict[str, float]:
        """Return mean return, mean length and number of the episodes, and forget them; empty if there are none."""
        self._flush()
        if not self._returns:
            return {}
        returns, lengths = torch.cat(self._returns), torch.cat(self._lengths)
        self._returns, self._lengths = [], []
        if not len(returns):
            return {}
        return {
            "train/return": returns.mean().item(),
            "train/length": lengths.double().mean().item(),
            "train/episodes": float(len(returns)),
        }

    def forget_unfinished(self) -> None:
        """Forget unfinished episodes, as when every environment has been reset."""
        self._flush()
        self._tracker.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the sums carried over."""
        self._flush()
        return self._tracker.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the sums of :meth:`state_dict`.

        Raises:
            ValueError: they are none; nothing is changed.
        """
        self._tracker.load_state_dict(state)
        self._noted, self._returns, self._lengths = [], [], []
