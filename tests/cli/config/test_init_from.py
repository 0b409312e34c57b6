"""``init_from`` starts a run with another run's weights and moments, or exits with a one-line error."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from cli.commands import TINY, call, last_line
from kit.demonstrations import recorded
from kit.states import differences
from kit.store import composed_run
from torchrl_lightning import save_pretrained
from torchrl_lightning.cli.error_messages import UsageError
from torchrl_lightning.cli.train import train

NORMALISED = ["data.normalize_observation=true", "data.normalize_reward=true"]
QUIET = ["logger=none", "eval_episodes=1", "data.eval_episodes=1"]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that normalised observations and rewards."""
    folder = tmp_path_factory.mktemp("first")
    done = call("train", *TINY, *NORMALISED, "data.total_frames=256", "seed=3", "hydra.run.dir=run", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def stored(folder: Path, name: str = "last") -> dict:
    return torch.load(folder / "checkpoints" / f"{name}.ckpt", weights_only=True)


def moments(folder: Path, name: str = "last") -> dict:
    return stored(folder, name)["OnPolicyDataModule"]["normalization"]


# The second run has another time limit, schedule, learning rate and seed than the first one.
TUNED = [
    *(
        "data.env={_target_:torchrl_lightning.EnvironmentRecipe,id:CartPole-v1,time_limit:50}",
        "model.schedule=constant",
    ),
    *("model.learning_rate=1e-9", "seed=5", "data.reset_at_each_batch=true"),
]


def check_begun(first: Path, ended: Path) -> None:
    weights = stored(ended)["state_dict"]
    for name, weight in stored(first, "best")["state_dict"].items():
        assert torch.allclose(weight, weights[name], atol=1e-5), name


def test_run_begins_with_the_weights_and_moments_of_another(first, run, tmp_path):
    save_pretrained(first, tmp_path / "published")
    said = run("train", *TINY, *NORMALISED, *TUNED, *QUIET, "init_from=published", "hydra.run.dir=second").stdout
    assert "starts with the weights and moments of published\n" in said
    check_begun(first, tmp_path / "second")
    assert moments(tmp_path / "second")["observation"]["entries"][0]["moments"]["count"] == 256 + 512
    assert moments(tmp_path / "second")["reward"]["count"] == 256 + 512
    assert last_line(said)[4] == "512"


def test_run_with_frozen_moments_can_be_resumed(first, run, tmp_path):
    given = [*TINY, *NORMALISED, *TUNED, *QUIET, f"init_from={first}", "freeze_statistics=true"]
    said = run("train", *given, "hydra.run.dir=whole").stdout
    assert f"starts with the weights and moments of {first}/checkpoints/best.ckpt\n" in said
    check_begun(first, tmp_path / "whole")
    run("train", *given, "trainer.max_epochs=2", "hydra.run.dir=half")
    (first / "checkpoints").rename(tmp_path / "gone")  # a resumed run does not read init_from
    try:
        resumed = ["ckpt_path=half/checkpoints/last.ckpt", "trainer.max_epochs=-1", "hydra.run.dir=rest"]
        assert "begins with" not in run("train", *resumed).stdout
    finally:
        (tmp_path / "gone").rename(first / "checkpoints")
    ended, again = stored(tmp_path / "whole"), stored(tmp_path / "rest")
    for part in ("state_dict", "optimizer_states"):
        assert not differences(ended[part], again[part]), part
    for folder in ("whole", "half", "rest"):
        assert not differences(moments(first, "best"), moments(tmp_path / folder)), folder
    assert (again["config"]["init_from"], again["config"]["freeze_statistics"]) == (str(first), True)


SMALL = ["model/network=mlp", "model.network.hidden_sizes=[8]", "~experiment", "env=cartpole"]
CLONED = ["data=offline", "model=discrete_iql", "model.loss.temperature=0", "data.dataset=shown"]
SHOWN = [
    "data=ppod",
    "data.buffer.initial_human_demos_dir=shown",
    "data.mini_batch_size=64",
    "data.frames_per_batch=64",
]


def test_ppod_takes_the_actor_of_a_behaviour_cloning_run(run, tmp_path, monkeypatch):
    recorded(tmp_path / "shown", episodes=2)
    updates = ["data.updates_per_epoch=4", "trainer.max_epochs=1"]
    run("train", *SMALL, *CLONED, *updates, "model.network.activation=tanh", *QUIET, "hydra.run.dir=cloned")
    given = [*SMALL, *SHOWN, "model.learning_rate=1e-9", "data.total_frames=64", "init_from=cloned"]
    said = run("train", *given, *QUIET, "hydra.run.dir=warm").stdout
    assert "starts with the actor and moments of cloned/checkpoints/best.ckpt; new: critic_network\n" in said
    there, here = (stored(tmp_path / name)["state_dict"] for name in ("cloned", "warm"))
    names = [name for name in here if name.startswith("actor_network.")]
    assert len(names) == 4
    for name in names:
        own = there[name.replace("actor_network.", "loss.actor_network_params.")]
        assert torch.allclose(here[name], own, atol=1e-6), name
    monkeypatch.chdir(tmp_path)
    for changed, message in (
        (
            [*SHOWN, "model.network.hidden_sizes=[4]"],
            r"the actors differ: actor_network\..* is \[8, 4\] in .*\[4, 4\]",
        ),
        (["data=uniform", "model=dqn"], "the networks differ: "),
    ):
        with pytest.raises(UsageError, match=message) as raised:
            train(composed_run(*SMALL, *changed, "init_from=cloned", "logger=none", "data.total_frames=64"))
        assert len(str(raised.value).splitlines()) == 1


RESUMED = ["ckpt_path=FIRST/checkpoints/last.ckpt"]
MISTAKES = {
    "another network": ([*NORMALISED, "model.network.hidden_sizes=[8]"], "does not fit this run: the networks differ"),
    "another learner": (
        [*NORMALISED, "model=a2c", "model.network.hidden_sizes=[8]"],
        "run: it is of PPOModule, this run has A2CModule; select its experiment= or model=: the actors",
    ),
    "another environment": ([*NORMALISED, "env=acrobot"], r"the networks differ: .*\[64, 4\] in the checkpoint"),
    "raw observations": (["data.normalize_observation=false"], r"it used normalised .*observation=true\."),
    "another clip": ([*NORMALISED, "data.normalize_clip=5"], "has clip=10.0, this normaliser has clip=5.0"),
    "another epsilon": (
        [*NORMALISED, "data.normalize_epsilon=1e-4"],
        "has epsilon=1e-08, this normaliser has epsilon=0.0001",
    ),
    "nothing to be kept": (["freeze_statistics=true"], "this run does not normalise; remove it"),
    "no word": ([*NORMALISED, "freeze_statistics=maybe"], "freeze_statistics=maybe: expected true or false"),
    "no start": ([*NORMALISED, "init_from=null", "freeze_statistics=true"], "set their source with init_from=RUN"),
    "nowhere": (["init_from=nowhere"], "init_from=nowhere: it must be a run folder, a checkpoint or"),
    "no hub": (["init_from=me/cartpole"], "=me/cartpole: me/cartpole is not a folder; the hub needs huggingface_hub"),
    "no run": (["init_from=."], r"init_from=\.: \. has neither checkpoints/best.ckpt nor"),
    "resumed": ([*RESUMED, "init_from=nowhere"], "init_from=nowhere has no effect on a resumed run"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_misfit_exits_with_one_line_before_training(name, first, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    arguments, message = MISTAKES[name]
    given = [argument.replace("FIRST", str(first)) for argument in arguments]
    with pytest.raises(UsageError, match=message) as raised:
        train(composed_run(*TINY, f"init_from={first}", "logger=none", *given))
    assert len(str(raised.value).splitlines()) == 1
    assert not list(tmp_path.iterdir())
