from __future__ import annotations

import logging
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import gymnasium
import pytest
import torch
import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from tensordict import TensorDict

from cli.commands import TINY, last_line
from kit.files import logged
from kit.runs import trainer
from kit.states import differences
from kit.store import composed
from torchrl_lightning import MLPNetwork, OnPolicyDataModule, PPOModule
from torchrl_lightning._core.run_names import folder_name, recorded_command
from torchrl_lightning._hydra.compat import instantiate
from torchrl_lightning.cli.train import load_weights, summary


def weights(path):
    return torch.load(path, weights_only=True)["state_dict"]


def test_run_ends_with_its_score_and_leaves_curve_rows_and_checkpoints(trained):
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


def test_best_policy_is_played_with_the_statistics_that_it_was_evaluated_with(tmp_path):
    def fit(epochs, path):
        settings = {"num_envs": 2, "frames_per_batch": 32, "normalize_observation": True, "normalize_reward": True}
        module, data = PPOModule(MLPNetwork([4])), OnPolicyDataModule("CartPole-v1", **settings, seed=0)
        run = trainer(max_epochs=epochs, limit_val_batches=0)
        run.fit(module, datamodule=data)
        run.save_checkpoint(path)
        return module, data

    best = tmp_path / "best.ckpt"
    fit(1, best)
    module, data = fit(2, tmp_path / "last.ckpt")
    chooser = SimpleNamespace(checkpoint_callbacks=[SimpleNamespace(best_model_path=str(best))])
    assert load_weights(module, data, chooser, "last") is None
    assert load_weights(module, data, chooser, "best") == str(best)
    stored = torch.load(best, weights_only=True)
    assert str(data.state_dict()["normalization"]) == str(stored["OnPolicyDataModule"]["normalization"])
    assert data.state_dict()["normalization"]["reward"]["count"] == 32


@pytest.mark.parametrize(
    ("returns", "shown"),
    [([0.97, 0.96], "0.965 +- 0.005"), ([9.0, 12.5], "10.8 +- 1.8"), ([-20.0, 1.0], "-9.5 +- 10.5")],
)
def test_score_shows_the_digits_that_matter(returns, shown):
    episodes = TensorDict({"episode_return": torch.tensor(returns)}, [2])
    assert summary(episodes, (5, "frames"), 1.0) == f"mean evaluation return: {shown} over 2 episodes, 5 frames, 1 s"
    episodes["success"] = torch.tensor([True, False])
    assert "over 2 episodes, success rate 0.50, 5 frames" in summary(episodes, (5, "frames"), 1.0)


@pytest.mark.parametrize(
    ("chosen", "name"),
    [
        (["env=acrobot", "seed=2"], "ppo_cartpole-callbacks_none-env_acrobot-data.num_envs_4"),
        (["~experiment", "data=vanilla", "model=a2c"], "a2c_cartpole_vanilla-callbacks_none-data.num_envs_4"),
    ],
)
def test_folder_is_named_by_what_ran(chosen, name):
    given = [*chosen, "callbacks=none", "logger=none", "data.num_envs=4", "eval_episodes=1"]
    assert folder_name(*recorded_command(composed("train", *given, hydra=True).hydra)) == name


def test_long_names_of_different_runs_differ():
    long = [f"+data.env_kwargs.a_setting_with_a_long_name_{number}=1" for number in range(4)]
    names = {folder_name({"experiment": "ppo_cartpole"}, [*long, f"model.gamma={gamma}"]) for gamma in (0.9, 0.95)}
    assert [len(name) for name in names] == [120, 120]


def test_config_is_composed_once_and_recorded_as_hydra_does(run, tmp_path):
    original = ConfigLoaderImpl._load_configuration_impl
    with mock.patch.object(
        ConfigLoaderImpl, "_load_configuration_impl", autospec=True, side_effect=original
    ) as compose:
        run("train", "data.num_envs=0", "hydra.run.dir=run", expect=1)
    assert compose.call_count == 1
    kept = yaml.safe_load((tmp_path / "run/.hydra/hydra.yaml").read_text())["hydra"]
    assert kept["mode"] == "RUN"
    assert kept["overrides"] == {"hydra": ["hydra.run.dir=run", "hydra.mode=RUN"], "task": ["data.num_envs=0"]}


def test_powers_of_ten_are_integers_where_frames_are_counted(run, tmp_path):
    quiet = ["data.updates_per_step=1", "hydra.run.dir=run"]  # the default logs the chosen number
    run("train", *TINY, "data.total_frames=1.28e2", "model.learning_rate=1e-3", *quiet)
    assert yaml.safe_load((tmp_path / "run/.hydra/config.yaml").read_text())["data"]["total_frames"] == 128
    assert not (tmp_path / "run/train.log").exists()


def test_command_may_refer_to_other_settings(run):
    own = ["data=offline", "env=mountaincar_sparse", "model=discrete_iql", "data.updates_per_epoch=2"]
    told = ["data.dataset=${paths.demonstrations}/mountaincar", "trainer.max_epochs=1", "eval_episodes=1"]
    for more in ([], ["ckpt_path=auto"]):
        assert run("train", "~experiment", *own, *told, *more).stdout.count("2 updates") == 1


def test_other_class_of_an_environment_gets_no_arguments_of_the_presets(run, tmp_path):
    other = ["env=torchrl", "data.env.id._target_=torchrl.envs.PendulumEnv", "data.env.time_limit=9"]
    run("train", *TINY, *other, "hydra.run.dir=run")
    there = yaml.safe_load((tmp_path / "run/.hydra/config.yaml").read_text())["data"]["env"]["id"]
    assert there == {"_target_": "torchrl.envs.PendulumEnv"}


def test_loggers_get_the_resolved_settings_and_count_in_frames(trained):
    folder, _ = trained
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for name in ("csv", "tensorboard"):
        # safe_load reads only plain values.
        kept = yaml.safe_load((folder / name / "hparams.yaml").read_text())
        assert kept["seed"] == kept["data"]["seed"] == 3
        assert kept["data"]["buffer"]["gae_lambda"] == 0.95
        assert kept["model"]["network"]["hidden_sizes"] == [64, 64]
        assert kept["paths"]["output_dir"] == str(folder)
    events = accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    shown = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert b"data/buffer/gae_lambda" in shown
    assert [event.step for event in events.Scalars("eval/return")] == [256, 512]
    assert [event.step for event in events.Scalars("train/grad_norm")] == [128, 256, 384, 512]
    stored = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert "hyper_parameters" not in stored


MODULE = """
import gymnasium
from kit.counting import CountingEnv
gymnasium.register("Reach-v0", CountingEnv, disable_env_checker=True)
"""


def test_module_in_the_working_directory_brings_environments(run, tmp_path):
    (tmp_path / "reach.py").write_text(MODULE)
    other = "data.eval_env={_target_: hydra.utils.get_class, path: reach.CountingEnv}"
    try:
        done = run("train", "data.env=reach:Reach-v0", other, *TINY, "data.total_frames=128", "eval_episodes=1")
    finally:
        gymnasium.registry.pop("Reach-v0", None)
    assert float(last_line(done.stdout)[1]) >= 15


def test_debug_runs_and_keeps_nothing(run, tmp_path):
    done = run("train", "debug=default", "data.num_epochs=1", "data.updates_per_step=1", "hydra.run.dir=run")
    assert last_line(done.stdout)[3] == "2"
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [".hydra"]


def test_profiled_run_without_an_evaluation_draws_its_training_returns(run, tmp_path, monkeypatch):
    # Lightning sets this at its import in a fresh process.
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "propagate", False)
    done = run("train", "debug=profiler", *TINY, "data.total_frames=128", "hydra.run.dir=run", draws=True)
    assert "run_training_epoch" in done.stdout + done.stderr
    assert last_line(done.stdout)[4] == "128"
    assert (tmp_path / "run" / "curve.png").exists()


def test_torch_and_numpy_use_the_configured_number_of_threads(monkeypatch):
    from threadpoolctl import threadpool_info

    from torchrl_lightning.cli import command

    def numpys():
        return {each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"}

    before = torch.get_num_threads(), numpys()
    with ExitStack() as run:
        monkeypatch.setattr(command, "cleanup", run)
        for number in (2, 1):
            command.limit_threads(number)
            assert (torch.get_num_threads(), numpys()) == (number, {number})
    assert (torch.get_num_threads(), numpys()) == before


def test_datamodule_of_a_run_is_rebuilt_from_its_checkpoint(trained):
    folder, _ = trained
    path = folder / "checkpoints" / "last.ckpt"
    stored = torch.load(path, weights_only=True)
    assert stored["datamodule_hyper_parameters"]["mini_batch_size"] == 64
    original = instantiate(stored["config"]["data"])
    given = {"env": original.env, "buffer": original.make_buffer}
    assert set(stored["OnPolicyDataModule"]["to_give"]) == set(given)
    with pytest.raises(TypeError, match="env=, buffer="):
        OnPolicyDataModule.load_from_checkpoint(path)
    rebuilt = OnPolicyDataModule.load_from_checkpoint(path, **given)
    rebuilt.setup("fit")
    assert (rebuilt.frames, rebuilt.num_envs, rebuilt.seed, rebuilt.num_epochs) == (512, 4, 3, 2)
    state = stored["OnPolicyDataModule"]["ranks"][0]["buffer"]
    assert not differences(rebuilt.buffer.state_dict(), state)
    rebuilt.close()
