from __future__ import annotations

import logging
import re
from types import SimpleNamespace

import gymnasium
import lightning as L
import pytest
import torch
import yaml
from tensordict import TensorDict

from cli.commands import LAST_LINE, TINY, last_line
from kit.files import logged
from torchrl_lightning import MLPNetwork, OnPolicyDataModule, PPOModule
from torchrl_lightning.cli.sweeps import read_trials
from torchrl_lightning.cli.train import load_weights, summary


def weights(path):
    return torch.load(path, weights_only=True)["state_dict"]


def test_a_run_ends_with_its_score_and_leaves_curve_rows_and_checkpoints(trained):
    folder, stdout = trained
    match = last_line(stdout)
    assert (match[3], match[4]) == ("3", "512")
    assert 1 <= float(match[1]) <= 500
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["best.ckpt", "last.ckpt"]
    assert f"learning curve: {folder / 'curve.png'}" in stdout


def test_rows_are_written_over_environment_frames(trained):
    folder, _ = trained
    table = logged(folder / "csv")
    assert [int(row["step"]) for row in table if row["eval/return"]] == [256, 512]
    assert [int(row["step"]) for row in table if row["train/grad_norm"]] == [128, 256, 384, 512]
    assert all(float(row["frames_per_second"]) > 0 for row in table if row["frames_per_second"])


def test_tensorboard_counts_in_frames_too(trained):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder, _ = trained
    events = accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("eval/return")] == [256, 512]
    assert [event.step for event in events.Scalars("train/grad_norm")] == [128, 256, 384, 512]


def test_a_resumed_run_equals_an_uninterrupted_one(trained, run, tmp_path):
    uninterrupted, _ = trained
    # The schedule runs over total_frames, so the first half is stopped by epochs instead.
    settings = [*TINY, "data.reset_at_each_batch=true", "seed=3"]
    run("train", *settings, "trainer.max_epochs=2", "hydra.run.dir=first")
    half = tmp_path / "first" / "checkpoints" / "last.ckpt"
    done = run("train", *settings, "trainer.max_epochs=-1", f"ckpt_path={half}", "hydra.run.dir=second")
    assert last_line(done.stdout)[4] == "512"
    expected, resumed = (weights(path / "checkpoints/last.ckpt") for path in (uninterrupted, tmp_path / "second"))
    assert expected.keys() == resumed.keys()
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)
    assert not all(torch.equal(expected[name], value) for name, value in weights(half).items())
    assert [int(row["step"]) for row in logged(tmp_path / "second" / "csv") if row["train/grad_norm"]] == [384, 512]


def test_the_best_policy_is_played_with_the_statistics_that_it_was_evaluated_with(tmp_path):
    def made():
        data = OnPolicyDataModule(
            "CartPole-v1", num_envs=2, frames_per_batch=32, normalize_observation=True, normalize_reward=True, seed=0
        )
        return PPOModule(MLPNetwork([4])), data

    def fit(epochs, path):
        module, data = made()
        trainer = L.Trainer(max_epochs=epochs, limit_val_batches=0, logger=False, enable_checkpointing=False)
        trainer.fit(module, datamodule=data)
        trainer.save_checkpoint(path)
        return module, data

    fit(1, tmp_path / "best.ckpt")
    module, data = fit(2, tmp_path / "last.ckpt")
    chooser = SimpleNamespace(checkpoint_callbacks=[SimpleNamespace(best_model_path=str(tmp_path / "best.ckpt"))])
    assert load_weights(module, data, chooser, "last") is None
    assert load_weights(module, data, chooser, "best") == str(tmp_path / "best.ckpt")
    stored = torch.load(tmp_path / "best.ckpt", weights_only=True)
    assert str(data.state_dict()["normalization"]) == str(stored["OnPolicyDataModule"]["normalization"])
    assert data.state_dict()["normalization"]["reward"]["count"] == 32


@pytest.mark.parametrize(
    ("returns", "shown"),
    [([0.97, 0.96], "0.965 +- 0.005"), ([9.0, 12.5], "10.8 +- 1.8"), ([-20.0, 1.0], "-9.5 +- 10.5")],
)
def test_a_score_shows_the_digits_that_matter(returns, shown):
    episodes = TensorDict({"episode_return": torch.tensor(returns)}, [2])
    assert summary(episodes, (5, "frames"), 1.0) == f"mean evaluation return: {shown} over 2 episodes, 5 frames, 1 s"
    episodes["success"] = torch.tensor([True, False])
    assert "over 2 episodes, success rate 0.50, 5 frames" in summary(episodes, (5, "frames"), 1.0)


def test_a_sweep_over_seeds_makes_a_run_of_each(run, tmp_path):
    done = run("train", "--multirun", "seed=0,1", *TINY, "data.total_frames=256", "eval_episodes=1")
    assert len(re.findall(LAST_LINE, done.stdout)) == 2
    runs = sorted((tmp_path / "logs" / "train").glob("sweep_*/ppo_cartpole*/seed_*/*/checkpoints/last.ckpt"))
    assert [path.parts[-4:-2] for path in runs] == [("seed_0", "0"), ("seed_1", "1")]
    first, second = (weights(path) for path in runs)
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_a_sweep_over_a_grid_compares_what_each_run_printed(run, tmp_path):
    settings = ["data.total_frames=128", "eval_episodes=1", "seed=0"]
    overrides = ["model.learning_rate=0.001", "data.num_epochs=1,2"]
    tiny = [item for item in TINY if not item.startswith("data.num_epochs")]
    done = run("train", "--multirun", *tiny, *settings, *overrides)
    assert len(re.findall(LAST_LINE, done.stdout)) == 2
    assert len(list((tmp_path / "logs" / "train").glob("sweep_*/ppo_cartpole-*num_epochs_[12]-*/seed_0/[01]"))) == 2
    (sweep,) = (tmp_path / "logs" / "train").glob("sweep_*")
    scores = [trial.score for trial in read_trials([sweep])]
    printed = [float(found[0]) for found in re.findall(LAST_LINE, done.stdout)]
    assert scores == pytest.approx(sorted(printed, reverse=True), abs=0.05)


def test_a_folder_is_named_by_what_ran(run, tmp_path):
    few = [*TINY, "data.total_frames=128", "eval_episodes=1", "callbacks=none", "logger=none"]
    run("train", "env=acrobot", "seed=2", *few)
    run("train", "~experiment", "data=vanilla", "model=a2c", *few)
    first, second = sorted(path.parts[-2:] for path in (tmp_path / "logs" / "train").glob("*/seed_*"))
    assert first[0].startswith("a2c_cartpole_vanilla-callbacks_none-data.")
    assert second[0].startswith("ppo_cartpole-callbacks_none-env_acrobot-data.")
    assert (first[1], second[1]) == ("seed_0", "seed_2")


def test_every_logger_gets_the_resolved_settings(trained):
    folder, _ = trained
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for name in ("csv", "tensorboard"):
        # Lightning's loader for untrusted files reads plain values alone.
        kept = yaml.safe_load((folder / name / "hparams.yaml").read_text())
        assert kept["seed"] == kept["data"]["seed"] == 3
        assert kept["data"]["buffer"]["gae_lambda"] == 0.95
        assert kept["model"]["network"]["hidden_sizes"] == [64, 64]
        assert kept["paths"]["output_dir"] == str(folder)
    events = accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    shown = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert b"data/buffer/gae_lambda" in shown
    stored = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert "hyper_parameters" not in stored


MODULE = """
import gymnasium

class Reach(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self.steps += 1
        return self.observation_space.sample(), 1.0, self.steps == 5, False, {}

gymnasium.register("Reach-v0", Reach)
"""


@pytest.mark.parametrize("env", ["reach_{}:Reach-v0", "{{_target_:hydra.utils.get_class,path:reach_{}.Reach}}"])
def test_a_module_in_the_working_directory_brings_an_environment(env, run, tmp_path):
    name = "id" if "hydra" not in env else "class"
    (tmp_path / f"reach_{name}.py").write_text(MODULE)
    try:
        done = run("train", f"data.env={env.format(name)}", *TINY, "data.total_frames=128", "eval_episodes=1")
    finally:
        gymnasium.registry.pop("Reach-v0", None)
    assert last_line(done.stdout)[1] == "5.000"


def test_debug_runs_and_keeps_nothing(run, tmp_path):
    done = run("train", "debug=default", "data.num_epochs=1", "hydra.run.dir=run")
    assert last_line(done.stdout)[3] == "2"
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [".hydra", "train.log"]


def test_a_profiled_run_without_an_evaluation_draws_its_training_returns(run, tmp_path, monkeypatch):
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "propagate", False)  # Lightning was imported first
    done = run("train", "debug=profiler", *TINY, "data.total_frames=128", "hydra.run.dir=run")
    assert "run_training_epoch" in done.stdout + done.stderr
    assert last_line(done.stdout)[4] == "128"
    assert (tmp_path / "run" / "curve.png").exists()
