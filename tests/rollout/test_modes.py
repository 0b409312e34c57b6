"""Critics and actors estimate in evaluation mode, and their training mode is restored afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from kit.rollouts import estimated, holding, linear_actor, make_rollout
from torchrl_lightning import GAEBuffer, GeneralizedAdvantages, VanillaOnPolicyBuffer, VTraceAdvantages, VTraceBuffer


def critic(network: nn.Module | None = None) -> TensorDictModule:
    """Return a critic that outputs the observation in evaluation mode and other values in training mode."""
    return TensorDictModule(network or nn.Dropout(0.9), in_keys=["observation"], out_keys=["state_value"]).train()


def dropping_actor() -> Any:
    actor = linear_actor()
    actor.module[0].module = nn.Sequential(nn.Dropout(0.9), actor.module[0].module)
    return actor.train()


@pytest.mark.parametrize("cls", [VanillaOnPolicyBuffer, GAEBuffer, VTraceBuffer])
def test_buffer_estimates_in_evaluation_mode(cls: type[VanillaOnPolicyBuffer]) -> None:
    buffer = cls(5, actor=dropping_actor(), critic=critic())
    data = make_rollout()
    estimated(buffer, data)
    assert torch.equal(buffer.rollout["state_value"], buffer.rollout["observation"])
    not_terminated = ~data.transpose(0, 1)["next", "terminated"][-1]
    last = buffer.rollout["next", "observation"][-1]
    assert torch.equal(buffer.rollout["next", "state_value"][-1], last * not_terminated)
    for module in (buffer.actor, buffer.critic):
        assert all(submodule.training for submodule in module.modules())
    if isinstance(buffer, VTraceBuffer):
        expected = linear_actor().get_dist(buffer.rollout).log_prob(buffer.rollout["action"])
        assert torch.equal(buffer.get_updated_action_log_probs(), expected)


@pytest.mark.parametrize("cls", [GeneralizedAdvantages, VTraceAdvantages])
def test_transform_estimates_in_evaluation_mode(cls: Any) -> None:
    options = {"actor": dropping_actor()} if cls is VTraceAdvantages else {}
    data = cls(critic=critic(), **options)(make_rollout())
    assert torch.equal(data["state_value"], data["observation"])


def test_modes_are_restored_after_an_error() -> None:
    buffer = holding(GAEBuffer(5, critic=critic(nn.Linear(7, 1))))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        buffer.before_gradients()
    assert buffer.critic is not None
    assert all(submodule.training for submodule in buffer.critic.modules())
