from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from datamodules.replay_parts import dqn, fit, replay_data, stored, trainer
from kit.normalized import all_of, check_statistics, recording, statistics_of
from kit.runs import parameters
from torchrl_lightning import PPOModule, load_policy, play_episodes
from torchrl_lightning.collectors import environment_specs, make_vector_env, spawn_seed
from torchrl_lightning.learn import MLPNetwork

NORMALISED = {"normalize_observation": True, "normalize_reward": True}
# A resumed run writes beside the checkpoint that it came from.
pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")


def ppo(seed=0, **kwargs):
    torch.manual_seed(seed)
    return PPOModule(MLPNetwork([8]), **kwargs)


class Watching(PPOModule):
    """Looks at what it is given."""

    def on_train_epoch_end(self):
        data = self.trainer.datamodule
        check_statistics(data)
        self.checked = getattr(self, "checked", 0) + 1

    def minimise(self, terms, **kwargs):
        self.first_kl = getattr(self, "first_kl", [])
        if self.trainer.fit_loop.epoch_loop.batch_progress.current.ready == 1:
            self.first_kl.append(float(terms["kl_approx"]))
        super().minimise(terms, **kwargs)


def test_on_policy_statistics_are_float64_moments_of_all_steps(tmp_path, make_data):
    module = Watching(MLPNetwork([8]), target_kl=1.0, clip_value=0.2)
    data = make_data(**NORMALISED, collector=recording(4, 64), eval_episodes=3)
    trainer(tmp_path, max_epochs=3, limit_val_batches=1).fit(module, datamodule=data)
    assert module.checked == 3
    # The first update of a rollout sees exactly what acted.
    assert module.first_kl == pytest.approx([0.0, 0.0, 0.0], abs=1e-6)


def test_replay_statistics_are_those_of_all_steps_and_the_buffer_is_raw(tmp_path):
    seen = []

    class Agent(type(dqn())):
        def training_step(self, batch, batch_idx):
            seen.append(batch.clone())
            super().training_step(batch, batch_idx)

        def on_train_epoch_end(self):
            data = self.trainer.datamodule
            check_statistics(data)
            raw, rows = stored(data), all_of(data, "observation")
            assert raw.numel() > 0
            cells = data.buffer.storage.get(torch.arange(len(data.buffer)))["observation"]
            assert torch.equal(cells, rows.transpose(0, 1).flatten(0, 1))

    fit(tmp_path, replay_data(**NORMALISED, collector=recording(2, 2), num_envs=2), dqn(Agent))
    assert seen
    rewards = torch.cat([batch["next", "reward"] for batch in seen])
    assert (rewards < 1).all()
    assert (rewards > 0).all()


@pytest.mark.parametrize(("frames", "cut"), [(2, False), (6, False), (4, True), (6, True)])
def test_the_fast_path_of_replay_notes_the_same(tmp_path, cut, frames):
    """Our collector writes rows of the same memory again and again."""
    moments = {}
    for name, extra in {"rows": {}, "rollouts": {"collector": recording(2, frames, init_random_frames=40)}}.items():
        data = replay_data(**NORMALISED, num_envs=2, reset_at_each_batch=cut, frames_per_batch=frames, **extra)
        fit(tmp_path, data)
        moments[name] = statistics_of(data)
    assert str(moments["rows"]) == str(moments["rollouts"])


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_the_whole_returns_are_reported_raw(env, tmp_path, make_data):
    data = make_data(env=env, **NORMALISED, frames_per_batch=4 * 210, mini_batch_size=420)
    module = ppo()
    trainer(tmp_path, max_epochs=1).fit(module, datamodule=data)
    metrics = data.metrics()
    steps = metrics["train/length"]
    assert metrics["train/return"] == steps if env == "CartPole-v1" else metrics["train/return"] < -500


@pytest.mark.parametrize("stopped_after", [1, 2])
def test_a_resumed_on_policy_run_equals_an_uninterrupted_one(stopped_after, tmp_path, make_data):
    settings = {**NORMALISED, "reset_at_each_batch": True}
    whole = ppo()
    trainer(tmp_path, max_epochs=4).fit(whole, datamodule=make_data(**settings))
    checkpoint = ModelCheckpoint(dirpath=tmp_path, save_last=True, filename="at")
    run = trainer(tmp_path, max_epochs=stopped_after, enable_checkpointing=True, callbacks=[checkpoint])
    run.fit(ppo(), datamodule=make_data(**settings))
    resumed = ppo(seed=9)
    trainer(tmp_path, max_epochs=4, enable_checkpointing=True, callbacks=[checkpoint]).fit(
        resumed, datamodule=make_data(**settings), ckpt_path=checkpoint.last_model_path
    )
    assert torch.equal(parameters(resumed), parameters(whole))


def test_a_resumed_replay_run_equals_an_uninterrupted_one(tmp_path):
    settings = {**NORMALISED, "reset_at_each_batch": True, "frames_per_batch": 8, "updates_per_epoch": 7}
    whole, _ = fit(tmp_path, replay_data(**settings), max_epochs=3)
    checkpoint = ModelCheckpoint(dirpath=tmp_path, save_last=True, filename="at")
    fit(tmp_path, replay_data(**settings), max_epochs=1, enable_checkpointing=True, callbacks=[checkpoint])
    resumed, _ = fit(
        tmp_path,
        replay_data(**settings),
        dqn(seed=9),
        checkpoint.last_model_path,
        max_epochs=3,
        enable_checkpointing=True,
        callbacks=[checkpoint],
    )
    assert torch.equal(parameters(resumed), parameters(whole))


def test_a_loaded_policy_acts_as_in_evaluation(tmp_path, make_data):
    module, data = ppo(), make_data(**NORMALISED)
    run = trainer(tmp_path, max_epochs=2)
    run.fit(module, datamodule=data)
    run.save_checkpoint(tmp_path / "at.ckpt")
    other = make_data(**NORMALISED)
    other.load_state_dict(data.state_dict())
    evaluated = data.evaluate(module.policy, 4)
    loaded = load_policy(tmp_path / "at.ckpt", ppo(seed=5))
    played = play_episodes("CartPole-v1", loaded, 4, num_envs=2, seed=spawn_seed(0, "evaluation", 0, 1))
    assert (evaluated == played).all(), (evaluated["episode_return"], played["episode_return"])
    assert loaded.specs.observation == environment_specs(make_vector_env("CartPole-v1", 1)).observation
    # It normalises itself, and is not given normalised observations a second time.
    assert (other.evaluate(loaded, 4) == evaluated).all()


def test_a_validation_alone_takes_the_statistics_of_its_checkpoint(tmp_path, make_data):
    module, data = ppo(), make_data(**NORMALISED)
    run = trainer(tmp_path, max_epochs=1)
    run.fit(module, datamodule=data)
    run.save_checkpoint(tmp_path / "at.ckpt")
    other = make_data(**NORMALISED)
    trainer(tmp_path, limit_val_batches=1).validate(ppo(), datamodule=other, ckpt_path=tmp_path / "at.ckpt")
    assert str(statistics_of(other)) == str(statistics_of(data))


@pytest.mark.parametrize("changed", [{"normalize_observation": False}, {"normalize_clip": 3.0}])
def test_resuming_with_other_settings_is_refused(changed, tmp_path, make_data):
    run = trainer(tmp_path, max_epochs=1)
    run.fit(ppo(), datamodule=make_data(**NORMALISED))
    run.save_checkpoint(tmp_path / "at.ckpt")
    (name,) = changed
    with pytest.raises(ValueError, match=f"written with {name}="):
        trainer(tmp_path, max_epochs=2).fit(
            ppo(), datamodule=make_data(**{**NORMALISED, **changed}), ckpt_path=tmp_path / "at.ckpt"
        )


def test_a_discrete_observation_is_refused_before_anything_is_trained(tmp_path, make_data):
    data = make_data(env="Taxi-v4", **NORMALISED)
    with pytest.raises(ValueError, match="cannot normalise 'observation', whose values are choices"):
        trainer(tmp_path, max_epochs=1).fit(ppo(), datamodule=data)
