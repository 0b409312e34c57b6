"""TorchRL's losses train with our DataModules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictSequential
from torch import nn
from torchrl.data import Categorical
from torchrl.modules import MLP, EGreedyModule, ValueOperator
from torchrl.objectives import A2CLoss, SoftUpdate

from kit.fake_data import FakeReplay
from kit.rollouts import categorical_actor
from kit.runs import trainer
from kit.seeds import generator
from kit.specs import BOX, DISCRETE
from kit.torchrl_losses import dqn, iql, loss_agent, redq
from kit.transitions import transitions
from torchrl_lightning import OnPolicyDataModule, ReplayDataModule
from torchrl_lightning.agents import LossModuleAgent
from torchrl_lightning.replay import ExperienceBuffer, PrioritizedSampler, RingStorage


@pytest.mark.parametrize("make", [redq, iql])
def test_parameters_learn_targets_update_and_priorities_are_written(make: Any) -> None:
    module, source = loss_agent(make).build(BOX), FakeReplay(specs=BOX)
    before = {name: value.clone() for name, value in module.named_parameters()}
    targets = {name: value.clone() for name, value in module.named_buffers() if "target_qvalue" in name}
    trainer(max_epochs=2).fit(module, datamodule=source)
    assert all(not torch.equal(before[name], value) for name, value in module.named_parameters())
    after = dict(module.named_buffers())
    assert targets
    assert all(not torch.equal(value, after[name]) for name, value in targets.items())
    assert all(batch.get("td_error", None) is not None for batch in source.served)
    assert {"train/loss_actor", "train/loss_qvalue", "train/learning_rate"} <= module.last_epoch_metrics.keys()


def test_updates_equal_a_manual_loop() -> None:
    module, source = loss_agent(redq).build(BOX), FakeReplay(specs=BOX)
    loss = copy.deepcopy(module.loss)
    updater = SoftUpdate(loss, tau=0.1)
    trainer(max_epochs=1).fit(module, datamodule=source)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-2, fused=True)
    rng = generator(0)
    torch.manual_seed(0)
    for _ in range(3):
        terms = loss(transitions(BOX, 16, generator=rng))
        optimizer.zero_grad()
        sum(value for name, value in terms.items() if name.startswith("loss_")).backward()
        optimizer.step()
        updater.step()
    expected, actual = loss.state_dict(), module.loss.state_dict()
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name])


def test_policy_holds_the_parameters_that_are_trained() -> None:
    module = loss_agent(redq).build(BOX)
    td = transitions(BOX, 5)
    for move in (lambda: module, lambda: module.double().float(), lambda: module.load_state_dict(module.state_dict())):
        move()
        trained = {parameter.data_ptr() for parameter in module.loss.actor_network_params.parameters()}
        assert {parameter.data_ptr() for parameter in module.policy.parameters()} == trained
        assert module.policy(td)["action"].shape == (5, 2)
    assert not any(name.startswith("acting") for name in module.state_dict())
    assert module.critic is None


def test_user_policy_explores_and_is_saved() -> None:
    def explore(actor: nn.Module) -> nn.Module:
        return TensorDictSequential(actor, EGreedyModule(Categorical(3), eps_init=1.0, eps_end=0.1))

    module = loss_agent(dqn, policy=explore)
    trainer(max_epochs=1).fit(module, datamodule=FakeReplay(specs=DISCRETE))
    assert "acting.module.1.eps" in module.state_dict()
    trained = {parameter.data_ptr() for parameter in module.loss.parameters()}
    assert {parameter.data_ptr() for parameter in module.policy.parameters()} == trained
    actions = module.policy(transitions(DISCRETE, 100))["action"]
    assert len(actions.unique()) == 3


@pytest.mark.parametrize("updates_per_step", [1, 2])
def test_prioritized_replay_gets_the_losses_errors(updates_per_step: int) -> None:
    buffers: list[ExperienceBuffer] = []

    def buffer(num_envs: int) -> ExperienceBuffer:
        sampler = PrioritizedSampler(64, alpha=1.0, beta=0.0)
        buffers.append(ExperienceBuffer(storage=RingStorage(64), sampler=sampler, num_envs=num_envs))
        return buffers[0]

    source = ReplayDataModule(
        "Pendulum-v1",
        num_envs=2,
        buffer=buffer,
        batch_size=16,
        updates_per_epoch=3,
        updates_per_step=updates_per_step,
        warmup_frames=16,
        seed=0,
    )
    module = loss_agent(redq)
    trainer(max_epochs=1, limit_val_batches=0).fit(module, datamodule=source)
    tree = buffers[0].sampler.table.tree
    assert len(tree[torch.arange(len(buffers[0]))].unique()) > 3


def test_ready_on_policy_loss_learns_from_rollouts() -> None:
    actor = categorical_actor(MLP(in_features=4, out_features=2, num_cells=[8]))
    critic = ValueOperator(MLP(in_features=4, out_features=1, num_cells=[8]), in_keys=["observation"])
    module = LossModuleAgent(A2CLoss(actor, critic), learning_rate=1e-2)
    before = [parameter.clone() for parameter in module.parameters()]
    source = OnPolicyDataModule("CartPole-v1", num_envs=2, frames_per_batch=32, num_mini_batch=2, num_epochs=1, seed=0)
    trainer(max_epochs=1, limit_val_batches=0).fit(module, datamodule=source)
    assert all(not torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert "train/loss_critic" in module.last_epoch_metrics


def test_missing_loss_or_network_raises() -> None:
    with pytest.raises(RuntimeError, match="build"):
        _ = loss_agent(redq).policy
