"""Reads of a rollout that compute what is due: its advantages and value targets."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict
from tensordict.utils import NestedKey
from torchrl.data import TensorDictReplayBuffer

from torchrl_lightning.rollout.storage import RolloutStorage


class EstimatedReads(TensorDictReplayBuffer):
    """A buffer whose first read after a write, by TorchRL's verbs as by any other, computes what the losses need.

    A loss that finds no advantage estimates one itself, over samples in any order, which is noise.
    """

    storage: RolloutStorage
    advantage_key: NestedKey

    @property
    def rollout(self) -> TensorDict:
        """The stored rollout, ``[T, N]``, live: entries set on it go into mini-batches until the next write."""
        return self.storage.rollout

    def write_estimates(self) -> None:
        """Write values, advantages and targets on the stored rollout."""
        raise NotImplementedError

    @property
    def is_due(self) -> bool:
        """Whether the stored rollout has no advantages yet: neither brought nor computed since the last write."""
        return self.storage.num_steps > 0 and self.rollout.get(self.advantage_key, None) is None

    def estimated(self) -> TensorDict:
        """Return the stored rollout, live, with advantages and targets; compute them if they are due.

        Raises:
            RuntimeError: nothing is stored, or a critic (for V-trace, an actor) is needed and missing.
        """
        if self.is_due:
            self.write_estimates()
        return self.rollout

    def sample(self, batch_size: int | None = None, return_info: bool = False, include_info: bool | None = None) -> Any:
        """Sample the next batch of this epoch (TorchRL's verb); compute what is due before."""
        if self.storage.num_steps:
            self.estimated()
        return super().sample(batch_size, return_info, include_info)

    def __getitem__(self, index: Any) -> Any:
        if self.storage.num_steps:
            self.estimated()
        return super().__getitem__(index)
