"""An edited state is refused before anything changes, or it is one that the buffer can go on from."""

from __future__ import annotations

import torch

from kit.rollouts import make_critic, make_rollout
from kit.states import check_mutants
from torchrl_lightning import GAEBuffer


def gae(seed: int) -> GAEBuffer:
    buffer = GAEBuffer(5, critic=make_critic(), generator=torch.Generator().manual_seed(seed))
    buffer.insert_data_slice(make_rollout(seed=seed).exclude("action_log_prob", "collector"))
    buffer.before_gradients()
    next(iter(buffer.generate_batches(2)))
    return buffer


def test_a_rollout_takes_a_state_wholly_or_not_at_all() -> None:
    parts = ("storage", "sampler", "writer", "transforms", "consumed", "schema_version")
    check_mutants(gae(0), gae(1).state_dict(), lambda buffer: list(buffer.generate_batches(2)), parts)
