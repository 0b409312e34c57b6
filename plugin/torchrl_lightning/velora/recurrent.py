"""Replay buffer with Velora's interface: transitions with the actor's recurrent state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.data import Unbounded
from torchrl.envs.transforms import TensorDictPrimer

from torchrl_lightning._core.validators import integer
from torchrl_lightning.replay.builders import check_single_steps
from torchrl_lightning.velora.experience import COLUMNS, PREVIOUS, BatchExperience
from torchrl_lightning.velora.velora_buffer import BufferBase

STEPS = 64  # maximum number of steps in one batch of ``warm``


@dataclass(frozen=True)
class BufferConfig:
    """Constructor arguments of a buffer."""

    type: Literal["ReplayBuffer"]
    capacity: int
    state_dim: int | None
    action_dim: int | None
    hidden_dim: int | None


class RecurrentReplayBuffer(BufferBase):
    """FIFO replay buffer with recurrent states and the interface of Velora's ``ReplayBuffer``.

    ``hidden`` is the recurrent state *after* acting in ``state``; use it to evaluate ``next_state``. To evaluate
    ``state`` as well, also store the recurrent state before acting as ``previous_hidden``. :class:`BufferBase`
    describes the arguments.

    Source:
        https://github.com/Achronus/Velora

    Examples:
        >>> import torch
        >>> buffer = RecurrentReplayBuffer(100, state_dim=3, action_dim=1, hidden_dim=8)
        >>> buffer.add(torch.zeros(3), torch.ones(1), 0.5, torch.ones(3), False, torch.zeros(8))
        >>> len(buffer), buffer.sample(1).hiddens.shape
        (1, torch.Size([1, 8]))
    """

    def sample(self, batch_size: int | None = None) -> BatchExperience:  # type: ignore[override]
        """Sample single transitions uniformly with replacement, or with the given ``sampler``.

        Args:
            batch_size: number of transitions; ``None`` uses the buffer's ``batch_size``.

        Raises:
            ValueError: fewer than ``batch_size`` transitions are stored, ``batch_size`` is invalid, or the sampler
                draws windows of steps, which only ``draw`` returns.
        """
        check_single_steps(self.sampler, "draw")
        count = self.batch_size if batch_size is None else integer(batch_size, "batch_size", 0)
        if count is not None and len(self) < count:
            raise ValueError(
                f"The buffer does not hold enough transitions. Available: {len(self)}, Requested: {count}."
            )
        return self.experience(self.draw(batch_size))

    def config(self) -> BufferConfig:
        """Return the constructor arguments, with Velora's type name."""
        return BufferConfig("ReplayBuffer", self.capacity, self.state_dim, self.action_dim, self.hidden_dim)

    def warm(self, agent: Any, n_samples: int, num_envs: int = 8, *, previous_hidden: bool | None = None) -> None:
        """Fill the buffer with transitions of an agent until it stores exactly ``n_samples``.

        The agent acts in new copies of its environment, with a zero recurrent state at the start of each episode.
        ``dones`` mark terminal successors, and every stored successor is the true successor.

        Args:
            agent: an object with ``env.spec`` and ``predict(states, hidden, train_mode=True) -> (actions, hidden)``;
                ``hidden`` is ``None`` at the first step.
            n_samples: final number of stored transitions; a buffer with this number or more stays unchanged.
            num_envs: number of parallel environments, at least 2.
            previous_hidden: also store the recurrent states before acting; by default, only if the stored transitions
                contain them.

        Raises:
            ValueError: ``num_envs`` is below 2, ``n_samples`` exceeds the capacity, or the agent, environment or
                recurrent state does not fit; nothing is stored then.
        """
        if num_envs < 2:
            raise ValueError(f"'{num_envs=}' cannot be smaller than 2.")
        integer(n_samples, "n_samples", 0)
        if n_samples > self.capacity:
            raise ValueError(f"n_samples must be at most capacity={self.capacity}, got {n_samples}.")
        if self.writer.num_envs not in (1, num_envs):
            raise ValueError(f"num_envs must be {self.writer.num_envs}, as in this buffer, got {num_envs}.")
        missing = n_samples - len(self)
        if missing <= 0:
            return
        if missing % self.writer.num_envs:
            raise ValueError(f"The {missing} missing transitions must be a multiple of num_envs={num_envs}.")
        if previous_hidden is None:
            previous_hidden = PREVIOUS in self.storage.tree
        if self.hidden_dim is None:
            raise ValueError("hidden_dim must be known before warm. Pass it to the constructor.")
        dims = (self.state_dim, self.hidden_dim)
        batches = list(_collect_transitions(agent, missing, num_envs, dims, self.generator))
        for batch in batches:
            previous = batch.pop("previous_hiddens")
            self.add_multi(**batch, previous_hiddens=previous if previous_hidden else None)


def _collect_transitions(
    agent: Any, count: int, num_envs: int, dims: tuple[int | None, int], generator: torch.Generator
) -> Iterator[dict[str, Any]]:
    """Yield exactly ``count`` transitions, oldest first, in batches with Velora's names."""
    # Import inside the function, so that importing the buffers does not load gymnasium.
    from torchrl_lightning.collectors import GymnasiumCollector
    from torchrl_lightning.environments import make_vector_env

    spec = getattr(getattr(agent, "env", None), "spec", None)
    if spec is None:
        raise ValueError("agent.env.spec must be set. Build the agent's environment with gymnasium.make.")
    env = make_vector_env(spec.id, num_envs, env_kwargs=spec.kwargs)
    try:
        shape = env.single_observation_space.shape
        width = None if shape is None else int(torch.Size(shape).numel())
        if width is None or width != (dims[0] or width):
            raise ValueError(
                f"The observations of {spec.id} must have state_dim={dims[0]} numbers, got {width} (shape {shape})."
            )
        policy = _AgentPolicy(agent, dims[1], (num_envs, *(env.single_action_space.shape or ())))
        steps = min(STEPS, -(-count // num_envs))
        seed = int(torch.randint(2**31, (), generator=generator, device=generator.device))
        collector = GymnasiumCollector(env, policy, frames_per_batch=steps * num_envs, seed=seed)
        for rollout in collector:
            data = rollout.transpose(0, 1).reshape(-1)[:count]
            batch = {name: data.get(key) for name, key in COLUMNS.items()}
            batch["truncated"] = data.get(("next", "truncated")) & ~batch["dones"]
            count -= len(data)
            yield {**batch, "previous_hiddens": data.get(PREVIOUS)}
            if not count:
                return
    finally:
        env.close()


class _AgentPolicy(nn.Module):
    """Policy that calls ``agent.predict``; the collector carries and resets the recurrent state."""

    def __init__(self, agent: Any, hidden_dim: int, action_shape: tuple[int, ...]) -> None:
        super().__init__()
        self._agent = [agent]  # in a list, the agent is not a submodule, so it keeps its training mode
        self.action_shape = action_shape
        self.hidden_dim = hidden_dim
        self.started = False

    def make_tensordict_primer(self) -> TensorDictPrimer:
        return TensorDictPrimer({PREVIOUS: Unbounded((self.hidden_dim,))}, default_value=0.0)

    @torch.no_grad()
    def forward(self, data: TensorDictBase) -> TensorDictBase:
        (agent,) = self._agent
        device = getattr(agent, "device", None)
        states = data.get("observation").to(device)
        hidden: Tensor | None = data.get("recurrent_state").to(device) if self.started else None
        actions, hidden = agent.predict(states, hidden, train_mode=True)
        self.started = True
        count = len(states)
        if hidden is None or hidden.numel() != count * self.hidden_dim:
            shape = None if hidden is None else tuple(hidden.shape)
            raise ValueError(f"agent.predict must return a hidden state ({count}, {self.hidden_dim}), got {shape}.")
        data.set("action", torch.as_tensor(actions).reshape(self.action_shape))
        return data.set(("next", "recurrent_state"), hidden.reshape(count, -1).float())
