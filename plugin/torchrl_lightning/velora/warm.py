"""Transitions of an agent in fresh copies of its environment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.data import Unbounded
from torchrl.envs.transforms import TensorDictPrimer

STEPS = 64  # steps of one batch, at most


def collect(
    agent: Any, count: int, num_envs: int, dims: tuple[int | None, int], generator: torch.Generator
) -> Iterator[dict[str, Any]]:
    """Yield exactly ``count`` transitions, oldest first, in batches with Velora's names."""
    # Here, so that importing the buffers costs no gymnasium.
    from torchrl_lightning.collectors import GymnasiumCollector, make_vector_env

    spec = getattr(getattr(agent, "env", None), "spec", None)
    if spec is None:
        raise ValueError("agent.env.spec is missing: warm needs an agent whose environment came from gymnasium.make.")
    env = make_vector_env(spec.id, num_envs, env_kwargs=spec.kwargs)
    try:
        shape = env.single_observation_space.shape
        width = None if shape is None else int(torch.Size(shape).numel())
        if width is None or width != (dims[0] or width):
            raise ValueError(
                f"{spec.id} has observations of {width} numbers ({shape}), the buffer state_dim={dims[0]}."
            )
        policy = _AgentPolicy(agent, dims[1], (num_envs, *(env.single_action_space.shape or ())))
        steps = min(STEPS, -(-count // num_envs))
        seed = int(torch.randint(2**31, (), generator=generator, device=generator.device))
        collector = GymnasiumCollector(env, policy, frames_per_batch=steps * num_envs, seed=seed)
        for rollout in collector:
            batch = _documented(rollout.transpose(0, 1).reshape(-1)[:count])
            count -= len(batch["states"])
            yield batch
            if not count:
                return
    finally:
        env.close()


def _documented(data: TensorDictBase) -> dict[str, Any]:
    following = data.get("next")
    return {
        "states": data.get("observation"),
        "actions": data.get("action"),
        "rewards": following.get("reward"),
        "next_states": following.get("observation"),
        "dones": following.get("terminated"),
        "hiddens": following.get("recurrent_state"),
        "truncated": following.get("truncated") & ~following.get("terminated"),
        "previous_hiddens": data.get("recurrent_state"),
    }


class _AgentPolicy(nn.Module):
    """Let a collector act with ``agent.predict``; the collector carries and resets the recurrent state."""

    def __init__(self, agent: Any, hidden_dim: int, action_shape: tuple[int, ...]) -> None:
        super().__init__()
        self._agent = [agent]  # in a list it is no submodule and keeps its own mode
        self.action_shape = action_shape
        self.hidden_dim = hidden_dim
        self.started = False

    def make_tensordict_primer(self) -> TensorDictPrimer:
        """Declare the recurrent state."""
        return TensorDictPrimer({"recurrent_state": Unbounded((self.hidden_dim,))}, default_value=0.0)

    @torch.no_grad()
    def forward(self, data: TensorDictBase) -> TensorDictBase:
        """Act once in all environments."""
        (agent,) = self._agent
        device = getattr(agent, "device", None)
        states = data.get("observation").to(device)
        hidden: Tensor | None = data.get("recurrent_state").to(device) if self.started else None
        actions, hidden = agent.predict(states, hidden, train_mode=True)
        self.started = True
        count = len(states)
        if hidden is None or hidden.numel() != count * self.hidden_dim:
            shape = None if hidden is None else tuple(hidden.shape)
            raise ValueError(f"agent.predict gave a hidden state {shape}, expected ({count}, {self.hidden_dim}).")
        data.set("action", torch.as_tensor(actions).reshape(self.action_shape))
        return data.set(("next", "recurrent_state"), hidden.reshape(count, -1).float())
