"""Moments for normalisation cover all steps, apply in evaluations, and are stored in checkpoints."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict import TensorDict

from kit.actor_critic import rollouts
from kit.demonstrated_runs import ppo
from kit.normalized import Checking, all_of, recording, statistics_of
from kit.replay import cells, dqn, fit, replay_data
from kit.runs import trainer
from kit.states import differences
from torchrl_lightning import PPOModule, load_policy, play_episodes
from torchrl_lightning._core.moments import Moments
from torchrl_lightning.agents import DQNModule, MLPNetwork
from torchrl_lightning.datamodules._run.normalization import Normalization
from torchrl_lightning.environments import environment_specs, make_vector_env, spawn_seed

NORMALISED = {"normalize_observation": True, "normalize_reward": True}


class NotedUpdates(PPOModule):
    """Record the divergence from the acting policy in each update."""

    def minimise(self, terms, **kwargs):
        self.__dict__.setdefault("kl", []).append(float(terms["kl_approx"]))
        super().minimise(terms, **kwargs)


def test_on_policy_statistics_are_float64_moments_of_two_steps(tmp_path):
    module, checking = NotedUpdates(MLPNetwork([8]), target_kl=1.0, clip_value=0.2), Checking()
    data = rollouts(**NORMALISED, collector=recording(4, 64), eval_episodes=3)
    fit(tmp_path, data, module, max_epochs=3, limit_val_batches=1, callbacks=[checking])
    assert checking.checks == 3
    # The policy has not changed before the first update of a rollout.
    assert module.kl[:: data.resolved_updates_per_epoch] == pytest.approx([0.0, 0.0, 0.0], abs=1e-6)


class CheckingCells(Checking):
    """Also check that the buffer stores raw observations."""

    def on_train_epoch_end(self, trainer, pl_module):
        super().on_train_epoch_end(trainer, pl_module)
        data = trainer.datamodule
        assert torch.equal(cells(data)["observation"], all_of(data, "observation").transpose(0, 1).flatten(0, 1))


def test_replay_statistics_are_moments_of_two_steps_and_the_buffer_is_raw(tmp_path):
    rewards, checking = [], CheckingCells()

    class Agent(DQNModule):
        def training_step(self, batch, batch_idx):
            rewards.append(batch["next", "reward"].clone())
            super().training_step(batch, batch_idx)

    data = replay_data(**NORMALISED, collector=recording(2, 2), num_envs=2)
    fit(tmp_path, data, dqn(Agent), callbacks=[checking])
    assert checking.checks == 2
    assert all(((reward > 0) & (reward < 1)).all() for reward in rewards)


@pytest.mark.parametrize(("frames", "cut"), [(2, False), (6, False), (4, True), (6, True)])
def test_fast_path_of_replay_records_the_same_statistics(tmp_path, cut, frames):
    """Our collector writes all rows into the same memory."""
    moments = {}
    for name, extra in {"rows": {}, "rollouts": {"collector": recording(2, frames, init_random_frames=40)}}.items():
        data = replay_data(**NORMALISED, num_envs=2, reset_at_each_batch=cut, frames_per_batch=frames, **extra)
        fit(tmp_path, data)
        moments[name] = statistics_of(data)
    assert str(moments["rows"]) == str(moments["rollouts"])


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_returns_are_reported_unscaled(env, tmp_path):
    data = rollouts(env=env, **NORMALISED, frames_per_batch=4 * 210, mini_batch_size=420)
    fit(tmp_path, data, ppo(), max_epochs=1)
    metrics = data.metrics()
    steps = metrics["train/length"]
    assert metrics["train/return"] == steps if env == "CartPole-v1" else metrics["train/return"] < -500


@pytest.fixture
def trained(tmp_path):
    """Train for two rollouts; return module, data and checkpoint."""
    data = rollouts(**NORMALISED)
    module, run = fit(tmp_path, data, ppo())
    run.save_checkpoint(tmp_path / "at.ckpt")
    return module, data, tmp_path / "at.ckpt"


def test_loaded_policy_acts_as_in_evaluation(trained):
    module, data, path = trained
    other = rollouts(**NORMALISED)
    other.load_state_dict(data.state_dict())
    evaluated = data.evaluate(module.policy, 4)
    loaded = load_policy(path, ppo(seed=5))
    played = play_episodes("CartPole-v1", loaded, 4, num_envs=2, seed=spawn_seed(0, "evaluation", 0, 1))
    assert (evaluated == played).all(), (evaluated["episode_return"], played["episode_return"])
    assert loaded.specs.observation == environment_specs(make_vector_env("CartPole-v1", 1)).observation
    # The loaded policy normalises its input, so the DataModule must not normalise it again.
    assert (other.evaluate(loaded, 4) == evaluated).all()


def test_validation_without_a_fit_uses_the_statistics_of_its_checkpoint(trained):
    _, data, path = trained
    other = rollouts(**NORMALISED)
    trainer(limit_val_batches=1).validate(ppo(), datamodule=other, ckpt_path=path, verbose=False)
    assert str(statistics_of(other)) == str(statistics_of(data))


def of_cartpole(observation: bool = True, **settings: bool) -> Normalization:
    kept = Normalization(observation, True, 10.0, **settings)
    kept.specs(environment_specs(make_vector_env("CartPole-v1", 1)))
    return kept


def test_frozen_statistics_come_from_another_run_and_a_misfit_changes_nothing(trained):
    _, data, _ = trained
    there = data.state_dict()["normalization"]
    kept = of_cartpole(frozen=True)
    with pytest.raises(ValueError, match=r"data.normalize_reward=false"):
        kept.load_normalization({**there, "reward": Moments.empty().state_dict()})
    assert kept.statistics()["observation"]["entries"][0]["moments"]["count"] == 0
    kept.load_normalization(there)
    rollout = two_steps()
    for _ in range(3):
        kept.update(rollout, None, cut=True, gamma=0.9)
        kept.advance_if_due()
        kept.advance()
    assert not differences(kept.statistics(), there)
    raw = of_cartpole(observation=False)
    with pytest.raises(ValueError, match=r"data\.normalize_observation=true\.$"):
        raw.load_normalization(there)
    two = copy.deepcopy(there)
    two["observation"]["entries"] = [{"key": key} for key in (["goal"], ["sight", "far"])]
    with pytest.raises(ValueError, match=r"'data\.normalize_observation=\[goal,sight\.far\]'\.$"):
        raw.load_normalization(two)
    with pytest.raises(ValueError, match=r"raw observations, .* normalised .*=false\.$"):
        kept.load_normalization(raw.statistics())


def two_steps() -> TensorDict:
    """Return one step of each of two environments."""
    ends = {"reward": torch.ones(2, 1, 1), "done": torch.zeros(2, 1, 1, dtype=torch.bool)}
    return TensorDict({"observation": torch.ones(2, 1, 4), "next": ends}, [2, 1])


def test_discrete_observation_is_refused_before_anything_is_trained(tmp_path):
    with pytest.raises(ValueError, match="'observation'"):
        fit(tmp_path, rollouts(env="Taxi-v4", **NORMALISED), ppo())


def noted(normalization, rewards, **settings):
    """Update the moments with rewards of one environment in an unfinished episode."""
    steps = len(rewards)
    following = {"reward": torch.tensor(rewards).view(1, steps, 1), "done": torch.zeros(1, steps, 1, dtype=torch.bool)}
    normalization.update(TensorDict({"next": following}, [1, steps]), None, **{"cut": False, "gamma": 0.5, **settings})


@pytest.mark.parametrize(("cut", "sums"), [(False, [1.0, 1.5, 1.75, 1.875]), (True, [1.0, 1.5, 1.0, 1.5])])
def test_rewards_after_a_cut_are_the_first_of_their_episodes(cut, sums):
    normalization = Normalization(False, True, 10.0)
    for _ in range(2):
        noted(normalization, [1.0, 1.0], cut=cut)
    normalization.advance()
    reward, expected = normalization.statistics()["reward"], torch.tensor(sums, dtype=torch.float64)
    assert reward["count"] == 4
    assert float(reward["mean"]) == pytest.approx(float(expected.mean()))
    assert float(reward["spread"]) == pytest.approx(float(((expected - expected.mean()) ** 2).sum()))


def test_statistics_advance_with_enough_frames_and_a_hundredth_of_those_before(monkeypatch):
    monkeypatch.setattr("torchrl_lightning.datamodules._run.normalization._CHUNK", 4)
    normalization, counts = Normalization(False, True, 10.0), []
    for frames in (2, 3, 1, 394, 3, 1, 4, 1):
        noted(normalization, [1.0] * frames)
        normalization.advance_if_due()
        counts.append(int(normalization.statistics()["reward"]["count"]))
    # The first frames count immediately. Later, 4 frames are needed, and at least a hundredth of the earlier ones.
    assert counts == [2, 2, 6, 400, 400, 404, 404, 409]


def test_frozen_statistics_do_not_advance():
    normalization = Normalization(False, True, 10.0, frozen=True)
    noted(normalization, [1.0] * 8)
    normalization.advance_if_due()
    assert normalization.statistics()["reward"]["count"] == 0


def test_recorded_rewards_are_restored():
    def note(made, start):
        number = torch.arange(start, start + 10.0).view(2, 5, 1)
        after = {"reward": number, "done": torch.zeros(2, 5, 1, dtype=torch.bool)}
        made.update(TensorDict({"observation": number, "next": after}, [2, 5]), None, cut=False, gamma=0.9)

    one, other = (Normalization(False, True, 10.0) for _ in range(2))
    for made in (one, other):
        made.specs(environment_specs(make_vector_env("CartPole-v1", 2)))
    note(one, 0)
    other.load_state_dict(one.state_dict())
    other.load_statistics(one.statistics())
    for made in (one, other):
        note(made, 7)
        made.advance()
    assert not differences(other.statistics(), one.statistics())
