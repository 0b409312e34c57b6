"""What acts and estimates does so in evaluation mode, shared trunks and fixed targets included."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn
from torchrl.data import Categorical, Composite, Unbounded

from rollout.helpers import make_rollout
from torchrl_lightning import GAEBuffer
from torchrl_lightning.learn import MLPNetwork, PPOModule, RandomNetworkDistillation

SPECS = SimpleNamespace(observation=Composite(observation=Unbounded(1)), action=Categorical(2))


def dropping(module: Any) -> Any:
    """Put dropout behind each hidden activation."""
    for part in list(module.modules()):
        for name, child in list(part.named_children()):
            if isinstance(child, nn.Tanh | nn.ReLU):
                setattr(part, name, nn.Sequential(child, nn.Dropout(0.5)))
    return module.train()


def test_values_over_a_shared_trunk_are_estimated_in_evaluation_mode() -> None:
    module = dropping(PPOModule(MLPNetwork([32], shared=True)).build(SPECS))
    buffer = GAEBuffer(5, critic=module.critic)
    buffer.insert_data_slice(make_rollout())
    buffer.before_gradients()
    assert all(part.training for part in module.modules())
    module.eval()
    expected = module.critic(buffer.rollout.select("observation"))["state_value"]
    torch.testing.assert_close(buffer.rollout["state_value"], expected)


def test_rewards_for_novelty_are_estimated_in_evaluation_mode() -> None:
    rnd: Any = dropping(RandomNetworkDistillation(MLPNetwork([32], "relu")).build(SPECS))
    modes: set[bool] = set()
    rnd.target.register_forward_hook(lambda module, *_: modes.add(module.encoder.training))
    rewards = []
    for _ in range(2):
        rollout = TensorDict({"next": {"observation": torch.arange(8.0).view(4, 2, 1)}}, [4, 2])
        rnd.count.zero_()
        rnd.annotate(rollout)
        rewards.append(rollout["next", "intrinsic_reward"])
    assert torch.equal(*rewards)
    rnd.loss(rollout)
    assert modes == {False}
    assert all(part.training for part in rnd.modules())
