"""The episodes in a buffer: where each begins, how long it is, what it returned, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchrl_lightning.entries import Path
from torchrl_lightning.inspection.content import Content
from torchrl_lightning.inspection.leaves import Ints

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
        content: The buffer.
    """
    index, done = content.index, content.find("done", "dones")
    if (index is None and done is None) or content.kind == "storage" or not content.looked_at:
        return None

    def column(path: Path | None) -> NDArray[Any]:
        return np.zeros(content.looked_at) if path is None else content.column(content.leaves[path])

    env, position = content.env, content.position
    flagged = (column(done) if index is None else content.column(index.done)) != 0
    ended = flagged if index is None else index.ends(content)
    last = np.flatnonzero(ended | content.is_newest)
    first = np.r_[0, last[:-1] + 1]
    terminated, truncated = (
        column(content.find(name, below="next"))[last] != 0 for name in ("terminated", "truncated")
    )
    returned = np.add.reduceat(column(content.find("reward", "rewards")), first, dtype=np.float64)
    kinds = {RUNNING: ~ended[last], CUT: ~flagged[last], TERMINATED: terminated, TRUNCATED: truncated}
    end = np.select([*kinds.values()], [*kinds], DONE)
    # An episode begins at the first step that was ever written; but a rollout continues the one before.
    begins = (position[first] > content.first[env[first]]) | ((position[first] == 0) & (content.kind != "rollout"))
    columns = (env[last], position[first], last - first + 1, returned, end.astype(np.int8), begins & ended[last])
    order = np.lexsort((~ended[last], position[last]))
    ordered: list[Any] = [values[order] for values in columns]
    return Episodes(*ordered)
