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
        returned: The sum of the stored rewards.
        end: The kind of end, as an index into :data:`ENDS`.
        whole: Whether the first and the last step are known to be stored.
    """

    env: Ints
    begin: Ints
    length: Ints
    returned: NDArray[np.float64]
    end: NDArray[np.int8]
    whole: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.env)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(of {len(self)})"


def episodes_in(content: BufferView) -> Episodes | None:
    """Return the episodes of a buffer by its index or its done flags, or None without both.

    Args:
        content: The buffer.
    """
    index, done = content.index, content.find("done", "dones")
    if (index is None and done is None) or content.kind == "storage" or not content.looked_at:
        return None

    def leaf_of(path: Path | None) -> Leaf:
        return torch.zeros(1).expand(content.count) if path is None else content.leaves[path]

    flags = leaf_of(done) if index is None else index.done
    reward = leaf_of(content.find("reward", "rewards"))
    kinds = [leaf_of(content.find(name, below="next")) for name in ("terminated", "truncated")]
    found: list[list[NDArray[Any]]] = []
    for rows, _, env, age in content.walk(32):
        order = np.argsort(env.astype(np.min_scalar_type(content.num_envs)), kind="stable")
        rows, env, age = rows[order], env[order], age[order]
        flagged = numbers_of(flags, rows) != 0
        # The last step of an episode, or of its part in these rows.
        is_last = np.r_[(np.diff(env) != 0) | (np.diff(age) != -1), True]
        if index is None:
            begins = flagged  # not used without an index
            is_last |= flagged
        else:
            begins = numbers_of(index.column, rows) >= content.behind[env] - 1 - age
            is_last[:-1] |= begins[1:]
        last = np.flatnonzero(is_last)
        first = np.r_[0, last[:-1] + 1]
        returned = np.add.reduceat(numbers_of(reward, rows), first, dtype=np.float64)
        ends = [numbers_of(leaf, rows[last]) != 0 for leaf in kinds]
        found.append([env[last], age[last], last - first + 1, returned, flagged[last], begins[first], *ends])
    # Join the parts of an episode from several pieces.
    columns = [np.concatenate(column) for column in zip(*found, strict=True)]
    order = np.lexsort((-columns[1], columns[0]))
    env, age, length, returned, flagged, begins, terminated, truncated = (column[order] for column in columns)
    ended = flagged if index is None else np.where(age == 0, ~index.is_open[env], np.r_[begins[1:], False])
    last = np.flatnonzero(ended | (age == 0))
    first = np.r_[0, last[:-1] + 1]
    length, returned = np.add.reduceat(length, first), np.add.reduceat(returned, first)
    env, ended = env[last], ended[last]
    position = content.behind[env] - 1 - age[last]
    begin = position - length + 1
    choices = {RUNNING: ~ended, CUT: ~flagged[last], TERMINATED: terminated[last], TRUNCATED: truncated[last]}
    end = np.select([*choices.values()], [*choices], DONE)
    # The first written step begins an episode, but a rollout continues the previous one.
    whole = ended & ((begin > content.first[env]) | ((begin == 0) & (content.kind != "rollout")))
    order = np.lexsort((~ended, position))
    ordered: list[Any] = [column[order] for column in (env, begin, length, returned, end.astype(np.int8), whole)]
    return Episodes(*ordered)
