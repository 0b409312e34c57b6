"""An edited state is refused before anything changes, or it is one that the buffer can go on from."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from mutations import check_mutants
from rollout.helpers import make_critic, make_rollout
from torchrl_lightning import GAEBuffer, PPOBuffer


def gae(seed: int) -> GAEBuffer:
    buffer = GAEBuffer(5, critic=make_critic(), generator=torch.Generator().manual_seed(seed))
    buffer.insert_data_slice(make_rollout(seed=seed).exclude("action_log_prob", "collector"))
    buffer.before_gradients()
    next(iter(buffer.generate_batches(2)))
    return buffer


def test_a_rollout_takes_a_state_wholly_or_not_at_all() -> None:
    parts = ("storage", "sampler", "writer", "transforms", "consumed", "schema_version")
    check_mutants(gae(0), gae(1).state_dict(), lambda buffer: list(buffer.generate_batches(2)), parts)


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
