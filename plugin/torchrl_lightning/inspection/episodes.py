"""The episodes in a buffer: where each begins, how long it is, what it returned, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchrl_lightning.inspection.content import Content, Ints, Leaf

ENDS = ("running", "terminated", "truncated", "done", "cut")
RUNNING, TERMINATED, TRUNCATED, DONE, CUT = range(len(ENDS))


@dataclass(frozen=True)
class Episodes:
    """One row for each episode, in the order of their ends.

    Attributes:
        env: The environment.
        begin: The position of its first step that is stored.
        length: Its stored steps.
        returned: The sum of their rewards.
        end: How it ended: a place in :data:`ENDS`.
        whole: Whether its first step is known to be stored, and its last.
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


def episodes_in(content: Content) -> Episodes | None:
    """Find the episodes of the buffer's index, or by their flags if it has none; None if it has no flags either.

    Args:
        content: What is walked through.
    """
    done, reward = content.find("done", "dones"), content.find("reward", "rewards")
    flags = [content.find(name, below="next") for name in ("terminated", "truncated")]
    if content.index is not None:
        flag: Leaf = content.index.done
    elif done is not None:
        flag = content.leaves[done]
    else:
        return None
    if not content.ordered or not content.looked_at:
        return None
    ends = None if content.index is None else content.index.ends(content)
    envs = content.num_envs
    begin, partial = content.first.copy(), np.zeros(envs)
    # Where the walk begins at the first step that was ever written, so does an episode; a rollout goes on from another.
    known = (begin == 0) & (content.kind != "rollout")
    found: list[tuple[Any, ...]] = []
    for piece in content.pieces(64):
        flagged = piece.grid(flag) != 0
        ended = flagged
        if ends is not None:
            ended = piece.grid(ends) != 0
        rewards = np.zeros(piece.shape) if reward is None else piece.grid(content.leaves[reward])
        kinds = [None if path is None else piece.grid(content.leaves[path]) != 0 for path in flags]
        terminated, truncated = kinds
        total = np.cumsum(rewards, 0, dtype=np.float64)
        env, step = np.nonzero(ended.T)
        if len(env):
            position = step + piece.begin
            first = np.r_[True, env[1:] != env[:-1]]
            start = np.where(first, begin[env], np.r_[0, position[:-1] + 1])
            before = np.where(first, -partial[env], np.r_[0.0, total[step[:-1], env[:-1]]])
            end = np.where(flagged[step, env], DONE, CUT)
            if truncated is not None:
                end[flagged[step, env] & truncated[step, env]] = TRUNCATED
            if terminated is not None:
                end[flagged[step, env] & terminated[step, env]] = TERMINATED
            whole = known[env] | ~first
            found.append((env, start, position - start + 1, total[step, env] - before, end, whole))
            last = np.r_[env[1:] != env[:-1], True]
            begin[env[last]], known[env[last]] = position[last] + 1, True
            partial[env[last]] = -total[step[last], env[last]]
        partial += total[-1]
    left = np.flatnonzero(content.behind > begin)
    running = np.full(len(left), RUNNING)
    found.append((left, begin[left], content.behind[left] - begin[left], partial[left], running, running != RUNNING))
    env, start, length, returned, end, whole = (np.concatenate(column) for column in zip(*found, strict=True))
    order = np.argsort(start + length, kind="stable")
    ordered: list[Any] = [column[order] for column in (env, start, length, returned, end.astype(np.int8), whole)]
    return Episodes(*ordered)
