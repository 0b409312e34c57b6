"""A bare TorchRL loop over our buffers: its collector, its loss."""

from __future__ import annotations

import pytest
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import GymEnv, InitTracker, SerialEnv, TransformedEnv
from torchrl.objectives import ClipPPOLoss

from kit.rollouts import categorical_actor
from torchrl_lightning import GAEBuffer, VanillaOnPolicyBuffer, VTraceBuffer


def make_env() -> TransformedEnv:
    return TransformedEnv(GymEnv("CartPole-v1", categorical_action_encoding=True), InitTracker())


@pytest.mark.parametrize("num_envs", [1, 2])
def test_collector_buffer_and_loss_fit_together(num_envs: int) -> None:
    actor = categorical_actor(nn.Linear(4, 2))
    critic = TensorDictModule(nn.Linear(4, 1), in_keys=["observation"], out_keys=["state_value"])
    buffers = [cls(32, actor=actor, critic=critic) for cls in (VanillaOnPolicyBuffer, GAEBuffer, VTraceBuffer)]
    loss_module = ClipPPOLoss(actor, critic)
    env = make_env() if num_envs == 1 else SerialEnv(num_envs, make_env)
    collector = Collector(env, actor, frames_per_batch=32 * num_envs, total_frames=64 * num_envs)
    for rollout in collector:
        for buffer in buffers:
            buffer.insert_data_slice(rollout)
            buffer.before_gradients()
            assert buffer.rollout.shape == (32, num_envs)
            for batch in buffer.generate_batches(4):
                losses = loss_module(batch)
                (losses["loss_objective"] + losses["loss_critic"]).backward()
    assert all(parameter.grad is not None for parameter in loss_module.parameters())
    collector.shutdown()
