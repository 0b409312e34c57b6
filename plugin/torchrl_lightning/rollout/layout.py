"""What follows from the schema of a rollout, found once for as long as it holds."""

from __future__ import annotations

from tensordict.utils import NestedKey

from torchrl_lightning.entries import Schema, join, path_of, under
from torchrl_lightning.keys import FLAGS, NEXT, REWARD


class RolloutLayout:
    """The roles of a rollout's entries.

    Args:
        schema: shape and dtype of each entry.

    Attributes:
        finite: entries that must be finite: reward and values.
        handed_on: entries of a successor that the step after it begins with, as that step names them: all but rewards,
            flags and values.
    """

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        paths = [path_of(key) for key in schema]
        self.finite: list[NestedKey] = [
            REWARD,
            *(join((), path) for path in paths if path[0].endswith("state_value")),
        ]
        self.handed_on: list[NestedKey] = [
            join((), path[1:])
            for path in paths
            if path[0] == NEXT
            and path[1] not in ("reward", *FLAGS)
            and not path[1].endswith(("state_value", "_reward"))
        ]
        self._held: dict[tuple[NestedKey, ...], bool] = {}

    def holds(self, roots: tuple[NestedKey, ...]) -> bool:
        """Return whether there is an entry at or below one of these keys."""
        if roots not in self._held:
            self._held[roots] = any(under(key, root) for key in self.schema for root in roots)
        return self._held[roots]
