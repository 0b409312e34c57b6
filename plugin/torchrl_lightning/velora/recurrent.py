"""Velora's replay buffer: transitions with the recurrent state that the actor had reached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torchrl_lightning.ranges import integer
from torchrl_lightning.velora.base import BufferBase
from torchrl_lightning.velora.experience import BatchExperience
from torchrl_lightning.velora.warm import collect


@dataclass(frozen=True)
class BufferConfig:
    """What a buffer was built with.

    Example:
        >>> BufferConfig("ReplayBuffer", 100, 3, 1, 8).capacity
        100
    """

    type: Literal["ReplayBuffer"]
    capacity: int
    state_dim: int | None
    action_dim: int | None
    hidden_dim: int | None


class RecurrentReplayBuffer(BufferBase):
    """FIFO replay buffer with recurrent states, as Velora's ``ReplayBuffer``.

    ``hidden`` is the state *after* acting in ``state``: it is the one to evaluate ``next_state`` from. The one for
    ``state`` is the hidden state before; give it as ``previous_hidden`` to have both. Arguments as of
    :class:`BufferBase`.

    Source:
        https://github.com/Achronus/Velora

    Example:
        >>> import torch
        >>> buffer = RecurrentReplayBuffer(100, state_dim=3, action_dim=1, hidden_dim=8)
        >>> buffer.add(torch.zeros(3), torch.ones(1), 0.5, torch.ones(3), False, torch.zeros(8))
        >>> len(buffer), buffer.sample(1).hiddens.shape
        (1, torch.Size([1, 8]))
    """

    def sample(self, batch_size: int | None = None) -> BatchExperience:  # type: ignore[override]
        """Sample transitions uniformly, with replacement (or as the given ``sampler`` does).

        Args:
            batch_size: how many; the buffer's own by default.

        Raises:
            ValueError: fewer are stored (names both numbers), or ``batch_size`` is not a size.
        """
        wanted = self.batch_size if batch_size is None else integer(batch_size, "batch_size", 0)
        if wanted is not None and len(self) < wanted:
            raise ValueError(
                f"The buffer does not hold enough transitions. Available: {len(self)}, Requested: {wanted}."
            )
        return self.experience(self.draw(batch_size))

    def config(self) -> BufferConfig:
        """Return what the buffer was built with, under the type name that Velora knows."""
        return BufferConfig("ReplayBuffer", self.capacity, self.state_dim, self.action_dim, self.hidden_dim)

    def warm(self, agent: Any, n_samples: int, num_envs: int = 8, *, previous_hidden: bool | None = None) -> None:
        """Fill the buffer up to exactly ``n_samples`` transitions of an agent.

        It acts in fresh copies of its environment, with a zero recurrent state at the start of each episode. ``dones``
        mark terminal successors, and every stored successor is the true one.

        Args:
            agent: has ``env.spec`` and ``predict(states, hidden, train_mode=True) -> (actions, hidden)``; ``hidden`` is
                ``None`` at the first step.
            n_samples: transitions stored afterwards; nothing happens where there are as many already.
            num_envs: copies stepped side by side, at least 2.
            previous_hidden: also store the states before acting; as what is stored already by default.

        Raises:
            ValueError: ``num_envs`` below 2, more samples than the capacity, or an agent, environment or recurrent
                state that does not fit; nothing is stored then.
        """
        if num_envs < 2:
            raise ValueError(f"'{num_envs=}' cannot be smaller than 2.")
        integer(n_samples, "n_samples", 0)
        if n_samples > self.capacity:
            raise ValueError(f"n_samples={n_samples} transitions do not fit into capacity={self.capacity}.")
        if self.writer.num_envs not in (1, num_envs):
            raise ValueError(f"num_envs={num_envs}, but this buffer has rings for {self.writer.num_envs} environments.")
        missing = n_samples - len(self)
        if missing <= 0:
            return
        if missing % self.writer.num_envs:
            raise ValueError(f"{missing} transitions do not divide by the {num_envs} environments of this buffer.")
        if previous_hidden is None:
            previous_hidden = "recurrent_state" in self.storage.tree
        if self.hidden_dim is None:
            raise ValueError("hidden_dim of this buffer is not known; give it to the constructor before warm.")
        dims = (self.state_dim, self.hidden_dim)
        batches = list(collect(agent, missing, num_envs, dims, self.generator))
        for batch in batches:
            previous = batch.pop("previous_hiddens")
            self.add_multi(**batch, previous_hiddens=previous if previous_hidden else None)
