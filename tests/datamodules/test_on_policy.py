from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torchrl.collectors import Collector
from torchrl.envs import GymEnv, InitTracker, SerialEnv, TransformedEnv

from torchrl_lightning import GAEBuffer, OnPolicyDataModule, VanillaOnPolicyBuffer, VTraceBuffer, make_vector_env


def test_an_epoch_is_one_rollout_in_all_its_mini_batches(make_data, make_trainer, make_module, tiny_actor_critic):
    class Recorder(tiny_actor_critic):
        seen = []  # noqa: RUF012

        def training_step(self, batch, batch_idx):
            self.seen.append((self.current_epoch, batch["observation"].clone()))
            return super().training_step(batch, batch_idx)

    data, module = make_data(), make_module(Recorder)
    trainer = make_trainer(max_epochs=2)
    trainer.fit(module, datamodule=data)
    assert data.frames == 2 * 64
    assert trainer.global_step == 2 * 2 * 2
    for epoch in range(2):
        batches = [observation for at, observation in module.seen if at == epoch]
        first_pass, second_pass = torch.cat(batches[:2]), torch.cat(batches[2:])
        assert len(first_pass) == 64
        # Two passes see the same samples, in another order.
        assert not torch.equal(first_pass, second_pass)
        assert torch.equal(first_pass.unique(dim=0), second_pass.unique(dim=0))


@pytest.mark.parametrize("buffer", [VanillaOnPolicyBuffer, GAEBuffer, VTraceBuffer])
def test_every_buffer_serves_batches_without_staleness(buffer, make_data, make_trainer, make_module, tiny_actor_critic):
    """Each rollout was acted with the weights that the last update had left."""

    class Stamping(tiny_actor_critic):
        def configure_model(self):
            super().configure_model()
            self.policy.register_forward_hook(self.stamp)

        def stamp(self, policy, args, out):
            if not torch.is_grad_enabled():
                out["acted_after"] = torch.full((*out.batch_size, 1), self.updates)

        def training_step(self, batch, batch_idx):
            if batch_idx == 0:
                self.began = self.updates
            assert batch["acted_after"].unique().tolist() == [self.began]
            return super().training_step(batch, batch_idx)

    data, module = make_data(buffer=buffer), make_module(Stamping)
    make_trainer(max_epochs=3).fit(module, datamodule=data)
    assert module.updates == 3 * data.batches_per_epoch


def test_the_loader_is_sized_and_does_nothing_before_it_is_iterated(make_data):
    data = make_data()
    data.setup("fit")
    loader = data.train_dataloader()
    assert len(loader) == len(data.train_dataloader()) == 4
    assert data.collector is None
    assert data.frames == 0


def test_printing_touches_no_loader(make_data, make_trainer, make_module):
    data = make_data()
    assert str(data) == repr(data)
    make_trainer(max_epochs=1).fit(make_module(), datamodule=data)
    frames = data.frames
    assert f"frames={frames}" in str(data)
    assert data.frames == frames


def test_a_second_fit_goes_on_with_the_same_buffer_and_count(make_data, make_trainer, make_module):
    data, module = make_data(), make_module()
    make_trainer(max_epochs=1).fit(module, datamodule=data)
    buffer = data.buffer
    make_trainer(max_epochs=1).fit(module, datamodule=data)
    assert data.buffer is buffer
    assert data.frames == 2 * 64


def test_evaluation_changes_nothing_in_training(make_data, make_trainer, make_module):
    weights = []
    for limit_val_batches in (0, 1):
        module = make_module()
        make_trainer(limit_val_batches=limit_val_batches).fit(module, datamodule=make_data())
        weights.append(torch.cat([parameter.flatten() for parameter in module.parameters()]))
    assert torch.equal(*weights)


def test_a_buffer_has_its_say_on_environment_and_policy(make_data, make_trainer, make_module):
    class Wrapping(GAEBuffer):
        wrapped: ClassVar[list] = []

        def wrap_env(self, env):
            self.wrapped.append(env)
            return env

        def wrap_policy(self, policy):
            self.wrapped.append(policy)
            return policy

    data, module = make_data(buffer=Wrapping), make_module()
    make_trainer(max_epochs=2).fit(module, datamodule=data)
    env, policy = Wrapping.wrapped
    assert policy is module.policy
    assert env.num_envs == data.num_envs


def test_metrics_tell_returns_and_timings(make_data, make_trainer, make_module):
    data = make_data(frames_per_batch=512, mini_batch_size=256)
    make_trainer(max_epochs=1).fit(make_module(), datamodule=data)
    metrics = data.metrics()
    assert metrics["frames"] == 512
    assert metrics["train/return"] == metrics["train/length"] > 5
    assert metrics["time/collect"] > 0
    assert metrics["time/estimate"] > 0


@pytest.mark.parametrize("num_envs", [1, 2])
def test_any_torchrl_collector_serves(num_envs, make_data, make_trainer, make_module):
    def make_env():
        return TransformedEnv(GymEnv("CartPole-v1", categorical_action_encoding=True), InitTracker())

    def collector(policy):
        env = make_env() if num_envs == 1 else SerialEnv(num_envs, make_env)
        return Collector(env, policy, frames_per_batch=64, total_frames=128)

    data = make_data(num_envs=num_envs, collector=collector)
    trainer = make_trainer(max_epochs=-1)
    trainer.fit(make_module(), datamodule=data)
    # The collector ended of its own accord, and so did the training.
    assert data.frames == 128


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"frames_per_batch": 63}, "frames_per_batch=63 is no multiple of num_envs=4; take 64"),
        ({"reset_at_each_batch": True, "frames_per_batch": 4}, "would end each episode after its first step"),
        ({"mini_batch_size": 128}, "mini_batch_size=128 is larger than a rollout of frames_per_batch=64"),
        ({"mini_batch_size": None, "num_mini_batch": 65}, "num_mini_batch=65 batches"),
        ({"mini_batch_size": 32, "num_mini_batch": 3}, "need 96"),
        ({"num_epochs": 0}, "num_epochs must be a positive integer, got 0"),
        ({"num_envs": 0}, "num_envs must be a positive integer, got 0"),
        ({"mini_batch_size": 0}, "mini_batch_size must be a positive integer, got 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(settings, message, make_data):
    with pytest.raises(ValueError, match=message):
        make_data(**settings)


def test_a_collector_of_another_size_is_refused(make_data, make_trainer, make_module):
    def collector(policy):
        env = TransformedEnv(GymEnv("CartPole-v1", categorical_action_encoding=True), InitTracker())
        return Collector(env, policy, frames_per_batch=32)

    data = make_data(num_envs=1, collector=collector)
    with pytest.raises(ValueError, match=r"rollout of shape \(1, 32\), expected .* = \(1, 64\)"):
        make_trainer().fit(make_module(), datamodule=data)


def test_a_policy_without_log_probabilities_is_refused_by_vtrace(
    make_data, make_trainer, make_module, tiny_actor_critic
):
    class WithoutLogProb(tiny_actor_critic):
        def configure_model(self):
            super().configure_model()
            self.policy.register_forward_hook(lambda policy, args, out: out.exclude("action_log_prob", inplace=True))

    with pytest.raises(KeyError, match="action_log_prob"):
        make_trainer().fit(make_module(WithoutLogProb), datamodule=make_data(buffer=VTraceBuffer))


def test_a_module_without_a_policy_is_told_how_to_get_one(make_data, make_trainer, make_module, tiny_actor_critic):
    class WithoutPolicy(tiny_actor_critic):
        def configure_model(self):
            super().configure_model()
            policy = self.policy
            del self.policy
            self.actor = policy

    with pytest.raises(TypeError, match="no attribute `policy`"):
        make_trainer().fit(make_module(WithoutPolicy), datamodule=make_data())


def test_true_precision_is_refused(make_data, make_trainer, make_module):
    with pytest.raises(ValueError, match="precision='64-true'"):
        make_trainer(precision="64-true").fit(make_module(), datamodule=make_data())


def test_a_ready_environment_needs_a_second_one_for_evaluation():
    env = make_vector_env("CartPole-v1", 2)
    try:
        with pytest.raises(ValueError, match="Pass eval_env="):
            OnPolicyDataModule(env, num_envs=2)
    finally:
        env.close()
