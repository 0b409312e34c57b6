"""The loader that Lightning iterates: sized, so that no batch is fetched before the previous one was learned from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class Batches:
    """A sized, re-iterable stream of ``length`` batches that does nothing before it is iterated.

    When a loader has no length, Lightning fetches one batch ahead of the training step, so that every batch would be
    one update stale. It is not a :class:`torch.utils.data.DataLoader`, whose collation takes a TensorDict apart.
    """

    def __init__(self, length: int, make_iterator: Callable[[], Iterator[Any]]) -> None:
        self._length = length
        self._make_iterator = make_iterator

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return self._make_iterator()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(length={self._length})"

    def state_dict(self) -> dict[str, int]:
        """Return nothing, as the DataModule knows where the stream is; Lightning resumes within an epoch unwarned."""
        return {}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Do nothing, as there is nothing to load."""
