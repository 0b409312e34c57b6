"""Hindsight: some of what is sampled aims at a goal that was reached later in the same episode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning.entries import entry_of, nested_key, next_key
from torchrl_lightning.keys import DONE, TERMINATED, TRUNCATED
from torchrl_lightning.ranges import fraction
from torchrl_lightning.replay.episode_transform import EpisodeTransform

NEAR = 0.05
GoalFunction = Callable[[Any, Any, dict[str, Any]], Any]
"""As ``compute_reward`` of a goal environment: of achieved and desired goals, ``[n, ...]`` each, and an empty info."""


class HindsightRelabel(EpisodeTransform):
    """Replace goals of sampled steps by goals that were achieved later in their episodes (Andrychowicz et al. 2017).

    A transform on read, for the ``transform=`` of an :class:`ExperienceBuffer` whose writer tracks episodes: what is
    stored never changes, and random numbers come from the buffer's generator. A share of the samples gets as its goal
    what was achieved after one of the steps from its own to the last one that is stored of its episode, each equally
    likely (the strategy *future*); its reward is computed anew. Samples are single steps ``[B]`` or windows ``[B, T]``.
    A window gets one goal, achieved after its last step or later; one that straddles the end of an episode keeps its
    own.

    What is achieved after a step is read under ``"next"``; where the stored steps have no such entry, they are time
    steps as of dm_env, whose reward is that of the step before, and what is achieved stands beside the goal.

    Args:
        her_proportion: probability with which a sample is relabelled.
        achieved_goal_key: what a goal is read from.
        desired_goal_key: the goal, replaced also under ``"next"``.
        reward_key: the reward.
        goal: makes goals of achieved entries ``[n, ...]``, where these are, for instance, whole observations.
        compute_reward: called as ``compute_reward(achieved, desired, {})`` with goals ``[n, ...]`` or
            ``[n, T, ...]``, e.g. that of a goal environment; 0 within a distance of 0.05 and -1 elsewhere if None.
        compute_terminated: the same for ``("next", "terminated")``, with which ``("next", "done")`` is made again. If
            None, both flags stay as they are stored: right where an episode goes on at the goal, or ends for reasons of
            its own. Where it ends at the goal, give it, else a value is bootstrapped from behind the goal.

    Raises:
        ValueError: ``her_proportion`` is no probability; when sampling: it is in no buffer, nothing tracks episodes,
            steps are folded (``n_steps``), or a function gives another number of values than there are steps.
        KeyError: when sampling: an entry is missing.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_lightning import ExperienceBuffer
        >>> buffer = ExperienceBuffer(transform=HindsightRelabel(1.0))
        >>> place, done = torch.arange(4.0).unsqueeze(-1), torch.tensor([0, 0, 0, 1], dtype=torch.bool).unsqueeze(-1)
        >>> step = {"achieved_goal": place, "desired_goal": torch.full((4, 1), 9.0)}
        >>> after = {"achieved_goal": place + 1, "reward": torch.full((4, 1), -1.0), "done": done}
        >>> _ = buffer.extend(TensorDict({**step, "next": after}, [4]))
        >>> batch = buffer.sample(64)
        >>> bool((batch["desired_goal"] > batch["achieved_goal"]).all()), float(batch["desired_goal"].max())
        (True, 4.0)
        >>> bool((batch["next", "reward"] == 0).eq(batch["next", "achieved_goal"] == batch["desired_goal"]).all())
        True
    """

    def __init__(
        self,
        her_proportion: float = 0.8,
        *,
        achieved_goal_key: NestedKey = "achieved_goal",
        desired_goal_key: NestedKey = "desired_goal",
        reward_key: NestedKey = ("next", "reward"),
        goal: Callable[[Tensor], Tensor] | None = None,
        compute_reward: GoalFunction | None = None,
        compute_terminated: GoalFunction | None = None,
    ) -> None:
        super().__init__()
        self.her_proportion = fraction(her_proportion, "her_proportion")
        self.achieved_goal_key, self.desired_goal_key = nested_key(achieved_goal_key), nested_key(desired_goal_key)
        self.reward_key = nested_key(reward_key)
        self.goal = goal
        self.compute_reward = _is_near if compute_reward is None else compute_reward
        self.compute_terminated = compute_terminated

    def draw(self, count: int) -> Tensor:
        """Draw uniform numbers from [0, 1): one for each sample, then one for each that is relabelled."""
        rng = self.storage.generator
        return torch.rand(count, dtype=torch.float64, generator=rng, device="cpu" if rng is None else rng.device).cpu()

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Relabel a batch, which has an entry ``index``, ``[B]`` or ``[B, T]``."""
        episodes = self.episodes
        if "steps_to_next_obs" in tensordict:
            raise ValueError("HindsightRelabel cannot relabel the rewards of folded steps; sample with n_steps=1.")
        places = self.cells_of(tensordict).numpy().reshape(len(tensordict), -1)
        (first_env, first), (env, last) = episodes.steps_of(places[:, 0]), episodes.steps_of(places[:, -1])
        begin, end = episodes.bounds(torch.from_numpy(env), torch.from_numpy(last), clip=False)
        is_whole = (first_env == env) & (begin.numpy() <= first) & (first <= last)
        rows = np.flatnonzero((self.draw(len(places)).numpy() < self.her_proportion) & is_whole)
        if len(rows):
            env, last, left = env[rows], last[rows], (end.numpy() - last)[rows]
            future = last + np.minimum(self.draw(len(rows)).numpy() * (left + 1), left).astype(np.int64)
            self._relabel(tensordict, torch.from_numpy(rows), torch.from_numpy(episodes.cells_of(env, future)))
        return tensordict

    def _relabel(self, batch: TensorDictBase, rows: Tensor, cells: Tensor) -> None:
        after = next_key(self.achieved_goal_key)
        achieved_key = after if entry_of(batch, after) is not None else self.achieved_goal_key
        (_, stored), *_ = self.storage.leaves(achieved_key)
        goals = self._goals(_rows(stored, cells))
        achieved = self._goals(_rows(_require(batch, achieved_key), rows))
        steps = achieved.shape[: batch.ndim]  # [n] or [n, T]
        goals = goals.view(len(rows), *[1] * (batch.ndim - 1), *goals.shape[1:]).expand(*steps, *goals.shape[1:])
        _replace(batch, self.desired_goal_key, rows, goals)
        if entry_of(batch, next_key(self.desired_goal_key)) is not None:
            _replace(batch, next_key(self.desired_goal_key), rows, goals)
        _replace(batch, self.reward_key, rows, self.compute_reward(achieved, goals, {}))
        if self.compute_terminated is not None:
            terminated, done = (_rows(_require(batch, key), rows) for key in (TERMINATED, DONE))
            truncated = entry_of(batch, TRUNCATED)
            other = done & ~terminated if truncated is None else _rows(truncated, rows)
            _replace(batch, TERMINATED, rows, self.compute_terminated(achieved, goals, {}))
            _replace(batch, DONE, rows, _rows(_require(batch, TERMINATED), rows) | other)

    def _goals(self, achieved: Tensor) -> Tensor:
        return achieved if self.goal is None else self.goal(achieved)


def _is_near(achieved: Tensor, desired: Tensor, info: dict[str, Any]) -> Tensor:
    return (torch.linalg.vector_norm(achieved - desired, dim=-1) < NEAR).float() - 1


def _rows(entry: Tensor, rows: Tensor) -> Tensor:
    return entry.index_select(0, rows.to(entry.device))


def _require(batch: TensorDictBase, key: NestedKey) -> Tensor:
    value = entry_of(batch, key)
    if value is None:
        raise KeyError(f"HindsightRelabel needs the entry {key!r}; the batch has {sorted(map(str, batch.keys(True)))}.")
    return value


def _replace(batch: TensorDictBase, key: NestedKey, rows: Tensor, values: Any) -> None:
    entry, found = _require(batch, key), torch.as_tensor(values)
    shape = torch.Size([len(rows), *entry.shape[1:]])
    if found.numel() != shape.numel():
        raise ValueError(f"Entry {key!r} of the relabelled steps is {list(shape)}, got {list(found.shape)}.")
    # Another tensor, because a batch made by hand may be what is stored.
    batch.set(key, entry.index_copy(0, rows.to(entry.device), found.reshape(shape).to(entry)))
