"""An edited state is refused before anything changes, or it is one that the buffer can go on from."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from mutations import check_mutants
from torchrl_lightning import PPOBuffer


def ppo(steps: int) -> PPOBuffer:
    buffer = PPOBuffer(obs_dim=1, act_dim=1, size=4, batch_size=1)
    for step in range(steps):
        act = SimpleNamespace(action=torch.zeros(1), value=torch.zeros(1), logp=-1.0)
        buffer.store({"obs": torch.tensor([float(step)]), "act": act, "rew": 1.0, "done": step == 1})
        if step == 1:
            buffer.finish_path()
    return buffer


def test_open_paths_are_taken_wholly_or_not_at_all() -> None:
    check_mutants(ppo(2), ppo(3).state_dict(), lambda buffer: buffer.sample_batch(), ("paths", "writer"))
