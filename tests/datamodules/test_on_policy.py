from __future__ import annotations

from functools import partial
from typing import ClassVar

import pytest
import torch
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.envs import InitTracker, SerialEnv, TransformedEnv
from torchrl.envs.utils import ExplorationType, exploration_type

from kit.actor_critic import TinyActorCritic, fit, rollouts
from kit.replay import dqn, replay_data
from kit.runs import parameters
from kit.torchrl_envs import cart_pole
from torchrl_lightning import GAEBuffer, VanillaOnPolicyBuffer, VTraceBuffer


class Recorder(TinyActorCritic):
    """Store the observations of each epoch."""

    def training_step(self, batch, batch_idx):
        seen = self.__dict__.setdefault("seen", {})
        seen.setdefault(self.current_epoch, []).append(batch["observation"].clone())
        return super().training_step(batch, batch_idx)


def test_epoch_is_one_rollout_in_all_its_mini_batches(tmp_path):
    data = rollouts()
    module, run = fit(tmp_path, data, Recorder())
    assert data.frames == 2 * 64
    assert run.global_step == 2 * 2 * 2
    for batches in module.seen.values():
        first_pass, second_pass = torch.cat(batches[:2]), torch.cat(batches[2:])
        assert len(first_pass) == 64
        # Both passes read the same samples, in different orders.
        assert not torch.equal(first_pass, second_pass)
        assert torch.equal(first_pass.unique(dim=0), second_pass.unique(dim=0))


class Stamping(TinyActorCritic):
    """Check that the policy collected each rollout with the weights of the last update."""

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


@pytest.mark.parametrize("buffer", [VanillaOnPolicyBuffer, GAEBuffer, VTraceBuffer])
def test_batches_of_all_buffers_are_not_stale(buffer, tmp_path):
    data = rollouts(buffer=buffer)
    module, _ = fit(tmp_path, data, Stamping(), max_epochs=3)
    assert module.updates == 3 * data.batches_per_epoch


def test_loader_is_sized_and_does_nothing_before_it_is_iterated():
    data = rollouts()
    data.setup("fit")
    loader = data.train_dataloader()
    assert len(loader) == len(data.train_dataloader()) == 4
    assert (data.collector, data.frames) == (None, 0)
    data.close()


def test_second_fit_continues_with_the_same_buffer_and_count(tmp_path):
    data = rollouts()
    module, _ = fit(tmp_path, data, max_epochs=1)
    buffer = data.buffer
    fit(tmp_path, data, module, max_epochs=1)
    assert data.buffer is buffer
    assert data.frames == 2 * 64
    # Printing does not iterate a loader.
    assert str(data) == repr(data)
    assert "frames=128" in str(data)
    assert data.frames == 2 * 64


@pytest.mark.parametrize("make", [lambda: (None, None), lambda: (replay_data("prioritized"), dqn())])
def test_evaluation_changes_nothing_in_training(make, tmp_path):
    weights = [parameters(fit(tmp_path, *make(), limit_val_batches=batches)[0]) for batches in (0, 1)]
    assert torch.equal(*weights)


@pytest.mark.parametrize(
    ("settings", "given", "sampled"),
    [({}, None, False), ({"eval_mode": "sampled"}, None, True), ({"eval_mode": "sampled"}, True, False)],
)
def test_evaluation_plays_the_mode_or_samples(settings, given, sampled):
    def act(observation):
        modes.add(exploration_type())
        return torch.zeros(len(observation), dtype=torch.int64)

    modes: set[ExplorationType] = set()
    rollouts(**settings).evaluate(TensorDictModule(act, ["observation"], ["action"]), 1, deterministic=given)
    assert modes == {ExplorationType.RANDOM if sampled else ExplorationType.DETERMINISTIC}


def test_unknown_eval_mode_is_refused():
    with pytest.raises(ValueError, match=r"eval_mode.*'deterministic', 'sampled'"):
        rollouts(eval_mode="both")


def test_buffer_wraps_environment_and_policy(tmp_path):
    class Wrapping(GAEBuffer):
        wrapped: ClassVar[list] = []

        def wrap_env(self, env):
            self.wrapped.append(env)
            return env

        def wrap_policy(self, policy):
            self.wrapped.append(policy)
            return policy

    module, _ = fit(tmp_path, rollouts(buffer=Wrapping))
    env, policy = Wrapping.wrapped
    assert policy is module.policy
    assert env.num_envs == 4


def test_metrics_contain_returns_and_timings(tmp_path):
    data = rollouts(frames_per_batch=512, mini_batch_size=256)
    fit(tmp_path, data, max_epochs=1)
    metrics = data.metrics()
    assert metrics["frames"] == 512
    assert metrics["train/return"] == metrics["train/length"] > 5
    assert metrics["time/collect"] > 0
    assert metrics["time/estimate"] > 0


def collector(policy, num_envs=1, frames=64):
    def make_env():
        return TransformedEnv(cart_pole(), InitTracker())

    env = make_env() if num_envs == 1 else SerialEnv(num_envs, make_env)
    return Collector(env, policy, frames_per_batch=frames, total_frames=128)


@pytest.mark.parametrize("num_envs", [1, 2])
def test_torchrl_collectors_are_accepted(num_envs, tmp_path):
    data = rollouts(num_envs=num_envs, collector=partial(collector, num_envs=num_envs))
    fit(tmp_path, data, max_epochs=-1)
    # The run ends when its collector ends.
    assert data.frames == 128


class WithoutLogProb(TinyActorCritic):
    def configure_model(self):
        super().configure_model()
        self.policy.register_forward_hook(lambda policy, args, out: out.exclude("action_log_prob", inplace=True))


class WithoutPolicy(TinyActorCritic):
    def configure_model(self):
        super().configure_model()
        self.actor = self.policy
        del self.policy


@pytest.mark.parametrize(
    ("data", "module", "settings", "error", "message"),
    [
        (
            {"num_envs": 1, "collector": partial(collector, frames=32)},
            TinyActorCritic,
            {},
            ValueError,
            r"rollouts .* = \(1, 64\), got \(1, 32\)",
        ),
        ({"buffer": VTraceBuffer}, WithoutLogProb, {}, KeyError, "action_log_prob"),
        ({}, WithoutPolicy, {}, TypeError, "must have an attribute `policy`"),
        ({}, TinyActorCritic, {"precision": "64-true"}, ValueError, "precision must be .*64-true"),
    ],
    ids=["another size", "no log-probability", "no policy", "true precision"],
)
def test_invalid_combinations_are_refused_before_training(data, module, settings, error, message, tmp_path):
    with pytest.raises(error, match=message):
        fit(tmp_path, rollouts(**data), module(), **settings)


def test_rollout_that_memory_cannot_hold_is_refused_before_anything_is_collected(tmp_path):
    data = rollouts(frames_per_batch=2**50)
    with pytest.raises(ValueError, match=rf"{2**50} frames.*frames_per_ba"):
        fit(tmp_path, data, Recorder())
    assert data.frames == 0
    assert data.collector is None
