"""Find the episodes in a buffer, with their first step, length, return and end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from torchrl_lightning._core.tree import Path
from torchrl_lightning.inspection.buffer_views import BufferView
from torchrl_lightning.inspection.leaves import Ints, Leaf, numbers_of

ENDS = ("running", "terminated", "truncated", "done", "cut")
RUNNING, TERMINATED, TRUNCATED, DONE, CUT = range(len(ENDS))


@dataclass(frozen=True)
class Episodes:
    """One row for each episode, in the order of their ends.

    Attributes:
        env: The environment.
        begin: The position of the first stored step.
        length: Number of stored steps.
        episode_return: The sum of the stored rewards.
        end_kind: The kind of end, as an index into :data:`ENDS`.
        is_complete: Whether the first and the last step are certainly stored.
    """

    env: Ints
    begin: Ints
    length: Ints
    episode_return: NDArray[np.float64]
    end_kind: NDArray[np.int8]
    is_complete: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.env)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(of {len(self)})"


def episodes_in(view: BufferView) -> Episodes | None:
    """Find the episodes of a buffer from its index or its done flags; return None if it has neither.

    Args:
        view: The buffer.
    """
    index, done = view.index, view.find("done", "dones")
    if (index is None and done is None) or view.kind == "storage" or not view.num_inspected:
        return None

    def leaf_of(path: Path | None) -> Leaf:
        return torch.zeros(1).expand(view.count) if path is None else view.leaves[path]

    flags = leaf_of(done) if index is None else index.done
    reward = leaf_of(view.find("reward", "rewards"))
    end_leaves = [leaf_of(view.find(name, below="next")) for name in ("terminated", "truncated")]
    chunks: list[list[NDArray[Any]]] = []
    for rows, _, env, age in view.walk(32):
        order = np.argsort(env.astype(np.min_scalar_type(view.num_envs)), kind="stable")
        rows, env, age = rows[order], env[order], age[order]
        flagged = numbers_of(flags, rows) != 0
        # True at the last of these rows in each episode.
        is_last = np.r_[(np.diff(env) != 0) | (np.diff(age) != -1), True]
        if index is None:
            begins = flagged  # not used without an index
            is_last |= flagged
        else:
            begins = numbers_of(index.column, rows) >= view.stop[env] - 1 - age
            is_last[:-1] |= begins[1:]
        last = np.flatnonzero(is_last)
        first = np.r_[0, last[:-1] + 1]
        episode_return = np.add.reduceat(numbers_of(reward, rows), first, dtype=np.float64)
        end_flags = [numbers_of(leaf, rows[last]) != 0 for leaf in end_leaves]
        chunks.append(
            [env[last], age[last], last - first + 1, episode_return, flagged[last], begins[first], *end_flags]
        )
    # Join the parts of an episode that extends over several pieces.
    columns = [np.concatenate(column) for column in zip(*chunks, strict=True)]
    order = np.lexsort((-columns[1], columns[0]))
    env, age, length, episode_return, flagged, begins, terminated, truncated = (column[order] for column in columns)
    ended = flagged if index is None else np.where(age == 0, ~index.is_open[env], np.r_[begins[1:], False])
    last = np.flatnonzero(ended | (age == 0))
    first = np.r_[0, last[:-1] + 1]
    length, episode_return = np.add.reduceat(length, first), np.add.reduceat(episode_return, first)
    env, ended = env[last], ended[last]
    position = view.stop[env] - 1 - age[last]
    begin = position - length + 1
    conditions = {RUNNING: ~ended, CUT: ~flagged[last], TERMINATED: terminated[last], TRUNCATED: truncated[last]}
    end_kind = np.select([*conditions.values()], [*conditions], DONE)
    # Position 0 begins an episode, except in a rollout, which may continue an episode of the previous rollout.
    is_complete = ended & ((begin > view.first[env]) | ((begin == 0) & (view.kind != "rollout")))
    order = np.lexsort((~ended, position))
    ordered: list[Any] = [
        column[order] for column in (env, begin, length, episode_return, end_kind.astype(np.int8), is_complete)
    ]
    return Episodes(*ordered)
