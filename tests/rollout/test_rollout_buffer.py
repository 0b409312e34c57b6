"""A rollout buffer composed of its parts. The documented buffers are thin wrappers around it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import GymEnv, InitTracker, SerialEnv, TransformedEnv
from torchrl.objectives import ClipPPOLoss

from kit.rollouts import both_values, categorical_actor, linear_actor, make_rollout
from torchrl_lightning import GAE, GAEBuffer, MonteCarlo, RolloutBuffer, VanillaOnPolicyBuffer, VTrace, VTraceBuffer
from torchrl_lightning.rollout.estimates import Estimator

SUBCLASSES: dict[str, tuple[Estimator, Any]] = {
    "returns": (MonteCarlo(standardize=True), VanillaOnPolicyBuffer(5)),
    "GAE": (GAE(standardize=True, lmbda=0.8), GAEBuffer(5, gae_lambda=0.8)),
    "V-trace": (VTrace(standardize=True, rho_clip=0.7), VTraceBuffer(5, clip_rho_thres=0.7)),
}
ESTIMATES = ("advantage", "value_target", "intrinsic_advantage", "intrinsic_value_target")


@pytest.mark.parametrize("name", SUBCLASSES)
def test_documented_buffer_equals_rollout_buffer_with_its_estimator(name: str) -> None:
    estimator, documented = SUBCLASSES[name]
    data, actor = make_rollout(), linear_actor()
    data["next", "intrinsic_reward"] = data["next", "reward"].abs()
    plain = RolloutBuffer(5, estimator)
    for buffer in (plain, documented):
        buffer.extend(data)
        buffer.before_gradients(actor, both_values())
    advantage = plain.rollout["advantage"].clone()
    actor.module[0].module.weight.data[1] = -0.5
    for buffer in (plain, documented):
        buffer.before_epoch(actor, both_values())
    assert plain.required_keys == documented.required_keys
    assert plain.metrics() == documented.metrics()
    assert all(torch.equal(plain.rollout[key], documented.rollout[key]) for key in ESTIMATES)
    assert torch.equal(advantage, plain.rollout["advantage"]) is not estimator.follows_policy


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
