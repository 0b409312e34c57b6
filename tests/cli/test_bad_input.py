"""Each mistake gets a message without a traceback. Tests of wrong settings are in ``tests/conf``."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from cli.commands import TINY, unchanged_process
from kit.store import composed_run
from torchrl_lightning._core.file_limits import YAML_BYTES
from torchrl_lightning.cli.error_messages import UsageError
from torchrl_lightning.cli.train import train


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["+data=gae"], "error: +data=gae would be merged into the selected option; select another one with data=gae."),
        (["data.total_frames=-1"], "error: the run would never end; set data.total_frames=N"),
        (["data.env=nowhere:Nope-v0"], "of 'nowhere:Nope-v0' cannot be imported: No module named 'nowhere'. Install"),
        (
            ["ckpt_path=nowhere.ckpt"],
            "error: ckpt_path=nowhere.ckpt is not a file; checkpoints are in RUN/checkpoints/.",
        ),
        (
            ["~experiment", "data=offline", "model=dqn", "trainer.max_epochs=1"],
            "error: data.dataset=demonstrations: demonstrations does not exist. Name a",
        ),
    ],
)
def test_mistake_is_named(arguments, message, run, tmp_path):
    done = run("train", *arguments, "hydra.run.dir=run", "hydra.sweep.dir=run", expect=1)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "run").glob("**/*.ckpt"))


def test_environment_id_over_a_recipe_in_an_experiment_is_explained(run, tmp_path):
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ndefaults: [override /env: recipe]\ndata: {env: Acrobot-v1, total_frames: 9}\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    said = run("train", "--config-dir", str(tmp_path), "experiment=mine", expect=1).stderr
    assert said.startswith("error: in experiment/mine: ")
    assert said.endswith(
        "value: Acrobot-v1; set data.env: {id: NAME}, or select another group, such as env=cartpole.\n"
    )


NANS = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
class Nans(CartPoleEnv):
    def step(self, action):
        return super().step(action)[0], float("nan"), False, False, {}
gymnasium.register("Nans-v0", Nans, disable_env_checker=True)
"""


def test_environment_failure_in_training_exits_with_one_line(run, tmp_path):
    (tmp_path / "own_nans.py").write_text(NANS)
    said = run("train", "data.env=own_nans:Nans-v0", *TINY, "hydra.run.dir=run", expect=1).stderr
    assert "error: At step 0 of the rollout, environment 0 returned reward with nan, expected finite numbers." in said
    assert "Traceback" not in said


@pytest.mark.parametrize("model", ["dqn", "a2c"])
def test_default_experiment_is_named_if_it_does_not_fit(model, run):
    chosen = ["data=uniform", f"model={model}"]
    said = run("train", *chosen, expect=1).stderr
    assert said == (
        "error: in experiment/ppo_cartpole: data.num_epochs: unknown setting; experiment=ppo_cartpole is "
        "the default: remove it with '~experiment' data.total_frames=N, or select another one.\n"
    )
    said = run("train", *chosen, "experiment=ppo_cartpole", expect=1).stderr
    assert said.startswith("error: in experiment/ppo_cartpole: data.num_epochs: unknown setting")
    assert "is the default" not in said


def test_note_names_the_experiment_that_groups_run_with(run):
    done = run("train", "data=vanilla", "model=a2c", *TINY, "data.total_frames=128", "eval_episodes=1")
    assert "mean evaluation return" in done.stdout
    assert "note: experiment=ppo_cartpole is also selected; '~experiment' removes it." in done.stderr


def test_checkpoint_of_another_run_is_refused(run, trained):
    checkpoint = trained[0] / "checkpoints" / "last.ckpt"
    done = run("train", *TINY, "data.env=Pendulum-v1", f"ckpt_path={checkpoint}", expect=1)
    assert f"error: {checkpoint} does not fit this run" in done.stderr
    assert "environment differs: id: CartPole-v1 in the checkpoint, Pendulum-v1 here" in done.stderr
    assert "The overrides of the checkpoint's run: data.num_envs=4" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data.frames_per_batch=256"], r"frames_per_batch=128, but this run has frames_per_batch=256"),
        (["model.network.hidden_sizes=[64,32]"], r"weight is \[64, 64\] in the checkpoint and \[32, 64\] in this run "),
        (["model.network.hidden_sizes=[32]"], r"model.network.hidden_sizes was \[64, 64\] and is \[32\] now\."),
        (
            ["trainer.devices=2", "trainer.strategy=ddp", "trainer.accelerator=cpu"],
            r"the experience state of 1 rank\(s\), but this run has 2",
        ),
    ],
)
def test_misfit_of_a_checkpoint_is_named(arguments, message, trained, tmp_path):
    checkpoint = trained[0] / "checkpoints" / "last.ckpt"
    cfg = composed_run(*TINY, *arguments, "logger=none", f"ckpt_path={checkpoint}", into=tmp_path / "run")
    with unchanged_process(), pytest.raises(UsageError, match=message):
        train(cfg)


def test_checkpoint_of_another_stream_is_refused(run, trained, tmp_path):
    stored = torch.load(trained[0] / "checkpoints" / "last.ckpt", weights_only=True)
    del stored["command"]  # a checkpoint of a user's own Trainer does not store the groups
    torch.save(stored, tmp_path / "own.ckpt")
    groups = ["~experiment", "data=uniform", "model=dqn", "data.total_frames=512"]
    done = run("train", *groups, "ckpt_path=own.ckpt", expect=1)
    assert "it contains OnPolicyDataModule, but this run has data=ReplayDataModule" in done.stderr


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (BOMB, "values, counting each alias"),
        ("a: &a [*a]\n", "refers to a node that contains it"),
        ("a: " + "[" * 100_000, "levels"),
        ("seed: 1\n#" + "x" * YAML_BYTES, "must have at most"),
        ("a: !!python/object/apply:os.system [touch CANARY]", "not a tag of plain values"),
        ("a: " + "${b" * 1000, "an interpolation has more than"),
    ],
)
@pytest.mark.parametrize(
    "given",
    [
        ["--config-dir", "sent", "experiment=mine"],
        ["--config-dir=sent", "+experiment/more=mine"],
        ["hydra.searchpath=[file://sent]", "experiment=mine"],
        ["--config-dir", "sent", "--config-name", "mine"],
        ["--config-dir", "sent", "--multirun", "experiment=mine", "seed=0,1"],
    ],
)
def test_foreign_config_file_is_read_within_limits(given, text, told, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("sent", "sent/experiment", "sent/experiment/more"):
        Path(folder).mkdir()
        (Path(folder) / "mine.yaml").write_text(f"# @package _global_\n{text}")
    began = time.process_time()
    said = run("train", *given, expect=1).stderr
    assert time.process_time() - began < 10
    assert said.startswith("error: ")
    assert "mine.yaml must " in said
    assert told in said
    assert len(said.splitlines()) == 1
    assert not Path("CANARY").exists()


def test_folder_of_configs_may_contain_runs(run, tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ndata: {total_frames: 777}\n")
    record = tmp_path / "logs" / "run" / ".hydra"
    record.mkdir(parents=True)
    (record / "overrides.yaml").write_text("- seed=1\n")
    search = f"hydra.searchpath=[file://{tmp_path}]"
    assert "total_frames: 777" in run("train", search, "experiment=mine", "--cfg", "job").stdout
    (record / "overrides.yaml").write_text(BOMB)
    assert "values, counting each alias" in run("train", search, "experiment=mine", expect=1).stderr


def test_fifo_among_config_files_is_no_config(run, tmp_path):
    (tmp_path / "experiment").mkdir()
    os.mkfifo(tmp_path / "experiment" / "mine.yaml")
    said = run("train", "--config-dir", str(tmp_path), "experiment=mine", expect=1).stderr
    assert said.startswith("error: experiment=mine: unknown option")
