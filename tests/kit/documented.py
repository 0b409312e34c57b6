"""Steps with the names of l2r-lab and Velora. Their numbers identify them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_lightning import RecurrentReplayBuffer
from torchrl_lightning.velora.buffer_files import NAMES


def simple_step(number: float, **changes: Any) -> dict[str, Any]:
    """Build a step of l2r-lab's simple buffer; odd steps are terminal."""
    act = SimpleNamespace(action=np.array([number, -number]))
    step = {"obs": [number], "next_obs": [number + 0.5], "act": act, "rew": 2 * number, "done": number % 2 == 1}
    return {**step, **changes}


def choice(value: float = 0.0) -> SimpleNamespace:
    """Build the output of an l2r-lab agent for one observation."""
    return SimpleNamespace(action=torch.zeros(1), value=torch.tensor([value]), logp=-1.0)


def path_step(number: int, reward: float = 1.0, value: float = 0.0, **flags: Any) -> dict[str, Any]:
    """Build a step of l2r-lab's buffer of paths."""
    return {"obs": torch.tensor([float(number)]), "act": choice(value), "rew": reward, **flags}


def columns(start: int, count: int) -> dict[str, Tensor]:
    """Build transitions of Velora's buffer; every third one is terminal."""
    number = torch.arange(start, start + count, dtype=torch.float32).unsqueeze(1)
    return {
        "states": number.expand(count, 3),
        "actions": number.expand(count, 2) + 0.1,
        "rewards": number.squeeze(1) + 0.2,
        "next_states": number.expand(count, 3) + 1,
        "dones": number.squeeze(1) % 3 == 2,
        "hiddens": number.expand(count, 4) + 0.3,
    }


def stored(buffer: RecurrentReplayBuffer) -> dict[str, Tensor]:
    """Return the six public tensors of Velora's buffer."""
    state = buffer.state_dict()
    return {name: state[name] for name in NAMES}
