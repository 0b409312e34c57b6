"""Each mistake gets a message that names what is wrong, and no traceback."""

from __future__ import annotations

import subprocess

import pytest
import torch

from cli.commands import TINY, command_line
from kit.processes import environment


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data.batchsize=3"], "Key 'batchsize' not in 'OnPolicyDataSchema'"),
        (["experiment=nope"], "Could not find 'experiment/nope'"),
        (["+data=gae"], "error: +data=gae would add to what is there; select a group as data=gae."),
        (["data.total_frames=-1"], "error: nothing would end this run; give data.total_frames=N"),
        (["model.learning_rate=???"], "error: the config has no value for model.learning_rate; give"),
        (["model=default"], "error: model names no class (_target_); select one as model=NAME"),
        (["model.network=gru"], "error: model.network is 'gru', expected a config; select it as model/network=gru."),
        (["eval_checkpoint=worst"], "error: eval_checkpoint is 'worst'; expected 'best' or 'last'."),
        (["ckpt_path=nowhere.ckpt"], "error: ckpt_path=nowhere.ckpt is not a file; checkpoints lie in"),
        (["data.frames_per_batch=1001"], "frames_per_batch=1001 is no multiple of num_envs=8; take 1008."),
        (["data.buffer.gamma=1.5"], "error: data.buffer.gamma=1.5: gamma must be between 0 and 1, got 1.5."),
        (["data.env=Nope-v0"], "error: data.env: Gymnasium does not know the environment 'Nope-v0'"),
        (["data.env=nowhere:Nope-v0"], "of 'nowhere:Nope-v0' cannot be imported: No module named 'nowhere'. Install"),
        (["data.env=gymnasium:Nope-v0"], "know the environment 'gymnasium:Nope-v0': Environment `Nope` doesn't"),
        (["env=recipe", "data.env.id=Nope-v0"], "error: data.env: Gymnasium does not know the environment 'Nope-v0'"),
        (
            ["data.normalize_observation=[foo]"],
            "error: data.normalize_observation=['foo']: normalize_observation na",
        ),
        (["data.normalize_clip=0"], "error: data.normalize_clip=0.0: normalize_clip must be above 0, got 0.0."),
        (["env=recipe", "data.env.frame_stack=2"], "error: data.env.frame_stack=2: frame_stack=2 stacks images, but"),
        (["env=recipe", "data.env.drop=[sight]"], "error: data.env.drop=['sight']: drop=['sight'] names entries of"),
        (
            ["env=recipe", "data.env.rename={gamma: reward}"],
            "error: data.env.rename={'gamma': 'reward'}: rename={'gamma': 'reward'} takes 'reward', which a run keeps",
        ),
        (["--multirun", "seed=0,1", "trainer.strategy=ddp"], "take trainer.strategy=ddp_spawn"),
        (
            ["~experiment", "data=offline", "model=dqn", "trainer.max_epochs=1"],
            "error: dataset=demonstrations: demonstrations is no directory; name one that holds demonstrations.",
        ),
    ],
)
def test_a_mistake_is_named(arguments, message, run, tmp_path):
    done = run("train", *arguments, "hydra.run.dir=run", "hydra.sweep.dir=run", expect=1)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "run").glob("**/*.ckpt"))


def test_an_id_over_a_recipe_in_an_experiment_is_explained(run, tmp_path):
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ndefaults: [override /env: recipe]\ndata: {env: Acrobot-v1, total_frames: 9}\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    said = run("train", "--config-dir", str(tmp_path), "experiment=mine", expect=1).stderr
    assert (
        "error: data.env is a recipe here, as env=recipe has it, not Acrobot-v1. Say `data: {env: {id: Acrobot" in said
    )


NANS = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
class Nans(CartPoleEnv):
    def step(self, action):
        return super().step(action)[0], float("nan"), False, False, {}
gymnasium.register("Nans-v0", Nans, disable_env_checker=True)
"""


def test_an_environment_that_fails_in_training_is_told_in_one_line(run, tmp_path):
    (tmp_path / "own_nans.py").write_text(NANS)
    said = run("train", "data.env=own_nans:Nans-v0", *TINY, "hydra.run.dir=run", expect=1).stderr
    assert "error: At step 0 of the rollout, environment 0 returned reward with nan, expected finite numbers." in said
    assert "Traceback" not in said


def test_a_mistake_ends_a_process_with_status_one_and_one_line(tmp_path):
    # All others run in this process.
    command = command_line("train", "data.env=Nope-v0", "hydra.run.dir=run")
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (1, "")
    assert [line[:5] for line in done.stderr.splitlines()] == ["error"]


@pytest.mark.parametrize(
    ("chosen", "fitting"),
    [
        (["data=uniform", "model=dqn"], "; or take one that fits: experiment=dqn_cartpole, experiment=dqn_pong"),
        (["data=uniform", "model=a2c"], ""),
    ],
)
def test_the_experiment_that_nobody_asked_for_is_named_where_it_does_not_fit(chosen, fitting, run):
    said = run("train", *chosen, expect=1).stderr
    assert "Key 'num_epochs' not in 'ReplayDataSchema'" in said
    assert said.splitlines()[-1] == (
        f"error: the default experiment=ppo_cartpole is still composed in, and sets what {' '.join(chosen)} does not "
        f"have. Leave it out: '~experiment' data.total_frames=N{fitting}."
    )
    assert "error: the default" not in run("train", *chosen, "experiment=ppo_cartpole", expect=1).stderr


def test_groups_run_without_the_experiment_and_with_it_are_told_of_it(run):
    few = ["data.total_frames=256", "data.eval_episodes=1", "eval_episodes=1"]
    replay = ["data.warmup_frames=64", "data.updates_per_epoch=2", "trainer.check_val_every_n_epoch=64"]
    done = run("train", "data=uniform", "model=dqn", "~experiment", *few, *replay)
    assert "mean evaluation return" in done.stdout
    assert "note:" not in done.stderr
    done = run("train", "data=vanilla", "model=a2c", *few)
    assert "note: experiment=ppo_cartpole is composed in as well; '~experiment' leaves it out." in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data.env=Pendulum-v1"], "environment differs: id: CartPole-v1 in the checkpoint, Pendulum-v1 here"),
        (["data.frames_per_batch=256"], "frames_per_batch=128, but this run has frames_per_batch=256"),
        (
            ["model.network.hidden_sizes=[64,32]"],
            "weight is [64, 64] in the checkpoint and [32, 64] in this run (and ",
        ),
        (["model.network.hidden_sizes=[32]"], "model.network.hidden_sizes was [64, 64] and is [32] now."),
        (
            ["trainer.devices=2", "trainer.strategy=ddp", "trainer.accelerator=cpu"],
            "the experience state of 1 rank(s), but this run has 2",
        ),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(arguments, message, run, trained):
    checkpoint = trained[0] / "checkpoints" / "last.ckpt"
    done = run("train", *TINY, *arguments, f"ckpt_path={checkpoint}", expect=1)
    assert f"error: {checkpoint} does not fit this run" in done.stderr
    assert message in done.stderr
    assert "The run of that checkpoint was given: data.num_envs=4" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_checkpoint_of_another_stream_is_refused(run, trained, tmp_path):
    stored = torch.load(trained[0] / "checkpoints" / "last.ckpt", weights_only=True)
    del stored["command"]  # as with a Trainer of one's own: nothing says which groups it had
    checkpoint = tmp_path / "own.ckpt"
    torch.save(stored, checkpoint)
    groups = ["~experiment", "data=uniform", "model=dqn", "data.total_frames=512"]
    done = run("train", *groups, f"ckpt_path={checkpoint}", expect=1)
    assert "it holds OnPolicyDataModule, but this run has data=ReplayDataModule" in done.stderr
