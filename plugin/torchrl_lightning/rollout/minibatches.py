"""Sample mini-batches of steps or whole environments from a rollout, in epochs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torchrl.data.replay_buffers.storages import Storage

from torchrl_lightning._core.state import GENERATOR, Attribute, Stateful, bounded_integer, flag, tensor
from torchrl_lightning._core.torchrl_compat import SamplerBase
from torchrl_lightning._core.validators import Checked, boolean, integer, one_of, optional

UNITS = ("steps", "environments")


class MinibatchSampler(Stateful, SamplerBase):
    """Visit every sample of a rollout exactly once per epoch, shuffled or in order.

    With ``by="steps"``, a batch has the steps ``[B]``. With ``by="environments"``, a batch has whole environments
    ``[B, T]`` for recurrent policies, and the batch size counts environments. A write starts a new epoch.

    Args:
        drop_last: drop the last batch of an epoch if it is smaller than the batch size.
        shuffle: draw a new order for each epoch; False visits the steps in time-major order.
        by: ``"steps"`` or ``"environments"``.
        generator: random generator; ``None`` seeds a new one from torch's global generator.

    Raises:
        ValueError: ``by`` is unknown.

    Examples:
        >>> sampler = MinibatchSampler(shuffle=False)
        >>> [batch.tolist() for batch in sampler.epoch(5, 2)]
        [[0, 1], [2, 3], [4]]
    """

    OWNER, VERSION = "mini-batch sampler", 1
    STATE = {
        "len_storage": Attribute(bounded_integer()),
        "remaining": Attribute(optional(tensor(torch.int64, None, low=0, anywhere=True))),
        "drop_last": Attribute(flag),
        "shuffle": Attribute(flag),
        "by": Attribute(),
        "ran_out": Attribute(flag),
        "generator": GENERATOR,
    }

    drop_last = Checked(boolean)
    shuffle = Checked(boolean)

    def __init__(
        self,
        drop_last: bool = False,
        shuffle: bool = True,
        *,
        by: str = "steps",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(drop_last=drop_last, shuffle=shuffle)
        self.by = one_of(by, "by", UNITS)
        self._generator = generator

    def order(self, count: int, shuffle: bool | None = None, device: torch.device | str = "cpu") -> Tensor:
        """Return the indices ``0 .. count - 1`` of one epoch, permuted if ``shuffle`` is set."""
        if not (self.shuffle if shuffle is None else shuffle):
            return torch.arange(count, device=device)
        rng = self.generator
        return torch.randperm(count, generator=rng, device=rng.device).to(device)

    def epoch(
        self,
        count: int,
        batch_size: int | None,
        *,
        shuffle: bool | None = None,
        drop_last: bool | None = None,
        num_batches: int | None = None,
        device: torch.device | str = "cpu",
    ) -> Iterator[Tensor]:
        """Yield the index batches of one epoch over ``count`` units.

        Args:
            count: number of units (steps or environments).
            batch_size: units per batch; None splits the epoch into ``num_batches`` of nearly equal size.
            shuffle: overrides the sampler's ``shuffle``.
            drop_last: overrides the sampler's ``drop_last``.
            num_batches: maximum number of batches.
            device: device of the indices.

        Raises:
            ValueError: the batch size is not positive.
        """
        if batch_size is None:
            yield from self.order(count, shuffle, device).tensor_split(num_batches or 1)
            return
        batch_size = integer(batch_size, "batch_size")
        drop_last = self.drop_last if drop_last is None else drop_last
        for number, batch in enumerate(self.order(count, shuffle, device).split(batch_size)):
            if (drop_last and batch.shape[0] < batch_size) or (num_batches is not None and number >= num_batches):
                return
            yield batch

    def _validate_consistency(self, values: Mapping[str, Any]) -> None:
        remaining, count = values["remaining"], values["len_storage"]
        if remaining is not None:
            tensor(torch.int64, None, high=count - 1, anywhere=True)(remaining, "'remaining'")

    def sample(self, storage: Storage, batch_size: int) -> tuple[tuple[Tensor, ...] | Tensor, dict[str, Any]]:
        """Return the coordinates ``(t, n)`` of the next batch of this epoch, in the format of TorchRL's buffers.

        Raises:
            RuntimeError: the storage is empty.
            ValueError: an epoch has no full batch and ``drop_last`` is set, or the batch size is not positive.
        """
        batch_size = integer(batch_size, "batch_size")
        if not len(storage):
            raise RuntimeError("The storage is empty, so there is nothing to sample. Extend the buffer first.")
        by_environment = self.by == "environments"
        if by_environment and storage.ndim != 2:
            raise ValueError(f'by="environments" needs a storage [T, N] with ndim=2, got ndim={storage.ndim}.')
        steps, count = storage.shape if by_environment else (1, len(storage))
        if self.drop_last and batch_size > count:
            raise ValueError(
                f"batch_size must be at most {count}, the number of stored {self.by}, got {batch_size}, and "
                "drop_last=True excludes smaller batches."
            )
        device = getattr(storage, "device", "cpu")
        if self.remaining is None or self.len_storage != count:
            self.remaining = self.order(count, device=device)
            self.len_storage = count
        index, remaining = self.remaining[:batch_size], self.remaining[batch_size:]
        count = remaining.shape[0]
        self.remaining_batches = count // batch_size if self.drop_last else -(count // -batch_size)
        self.ran_out = self.remaining_batches == 0
        self.remaining = None if self.ran_out else remaining
        if storage.ndim == 1:
            return index, {}
        if not by_environment:
            return torch.unravel_index(index, storage.shape), {}
        time = torch.arange(steps, device=device).expand(index.shape[0], -1)
        return (time, index.unsqueeze(1).expand_as(time)), {}

    def extend(self, index: Any) -> None:
        """Start a new epoch after a write."""
        self.clear()

    add = extend

    def __repr__(self) -> str:
        return f"{type(self).__name__}(by={self.by!r}, shuffle={self.shuffle}, drop_last={self.drop_last})"
