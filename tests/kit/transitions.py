"""Batches in the form of a replay buffer, and their conversion for learners."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import Bounded, OneHot

from torchrl_lightning.agents.transitions import Transitions, read_transitions


def transitions(specs: Any, *shape: int, generator: torch.Generator | None = None) -> TensorDict:
    """Return random transitions. About a fifth end an episode, half of them by truncation."""

    def flags(share: float) -> torch.Tensor:
        return torch.rand(*shape, 1, generator=generator) < share

    observation = torch.randn(*shape, 2, 4, generator=generator)
    terminated, truncated = flags(0.1), flags(0.1)
    if isinstance(specs.action, Bounded):
        low, high = specs.action.space.low, specs.action.space.high
        action = low + (high - low) * torch.rand(*shape, len(low), generator=generator)
    else:
        action = torch.randint(3, shape, generator=generator)
        if isinstance(specs.action, OneHot):
            action = torch.nn.functional.one_hot(action, 3).bool()
    after = {
        "observation": observation[..., 1, :],
        "reward": torch.randn(*shape, 1, generator=generator),
        "terminated": terminated,
        "truncated": truncated & ~terminated,
        "done": terminated | truncated,
    }
    return TensorDict(
        {"observation": observation[..., 0, :], "action": action, "is_init": flags(0.0), "next": after}, shape
    )


def sequences(
    specs: Any, module: Any, rows: int, steps: int, generator: torch.Generator | None = None, *, ends: bool = True
) -> TensorDict:
    """Return sequences `[rows, steps]` with stored states for a recurrent module, and with ends of episodes inside."""
    batch = transitions(specs, rows, steps, generator=generator)
    batch.names = [None, "time"]
    if not ends:
        for flag in ("done", "terminated", "truncated"):
            batch["next", flag][:] = False
    done = batch["next", "done"]
    batch["is_init"][:, 1:] = done[:, :-1]
    observation, after = batch["observation"], batch["next", "observation"]
    # Inside an episode the successor is the observation of the next step.
    after[:, :-1] = torch.where(done[:, :-1], after[:, :-1], observation[:, 1:])
    network = module.network
    shape = (rows, steps, network.num_layers, network.hidden_size)
    if network.cell == "gru":
        batch["recurrent_state"] = torch.randn(shape, generator=generator)
    else:
        state = {name: torch.randn(shape, generator=generator) for name in "hc"}
        batch["recurrent_state"] = TensorDict(state, [rows, steps])
    return batch


def read(module: Any, batch: TensorDict, gamma: float = 0.9) -> Transitions:
    """Return the transitions that a recurrent module reads from a batch."""
    return read_transitions(batch, ["observation"], gamma, module.memory.state_keys)


def shake_targets(module: Any) -> None:
    """Change the weights of the target networks, so that they differ from the trained networks."""
    with torch.no_grad():
        for name, parameter in module.targets.named_parameters():
            if "weight" in name:
                parameter += 0.1 * torch.randn_like(parameter)
