"""Runs of CartPole that learn from demonstrations."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torchrl.envs import GymEnv, SerialEnv

from kit.demonstrations import episode
from torchrl_lightning import PPODBuffer
from torchrl_lightning.agents import MLPNetwork, PPOModule, RecurrentNetwork

CART_POLES = partial(SerialEnv, 4, partial(GymEnv, "CartPole-v1", categorical_action_encoding=True))
shown = partial(episode, total=99.0)


def demonstrated(human: str, **options: Any) -> partial[PPODBuffer]:
    """Return a factory of buffers that start with a folder of demonstrations."""
    return partial(PPODBuffer, initial_human_demos_dir=human, **{"rho": 0.5, "phi": 0.3, **options})


def ppo(recurrent: bool = False, seed: int = 0) -> PPOModule:
    """Build a small PPO module."""
    torch.manual_seed(seed)
    return PPOModule(RecurrentNetwork("gru", 8) if recurrent else MLPNetwork([8]))
