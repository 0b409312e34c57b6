"""If a part gets another class, it keeps only the settings for the new class."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from omegaconf import OmegaConf

from cli.commands import TINY, unchanged_process
from kit.store import only_our_schemas
from torchrl_lightning._hydra.paths import CONF_DIR
from torchrl_lightning.cli.command import run_command

MINE = {"_target_": "mine.Part"}
NOTE = "note: ignored settings of replaced parts: "


def composed(folder: Path, *arguments: str) -> tuple[list[dict[str, Any]], str]:
    """Compose the runs of a command line; return their configs and the content of stderr."""
    runs: list[dict[str, Any]] = []

    def task(cfg: Any) -> float:
        runs.append({name: OmegaConf.to_container(cfg[name], resolve=True) for name in ("data", "model")})
        return 0.0

    with (
        only_our_schemas(),
        unchanged_process(),
        contextlib.chdir(folder),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()) as said,
        mock.patch.object(sys, "argv", ["torchrl-lightning-train", *arguments]),
    ):
        try:
            run_command("train", task, resumes=True)
        except SystemExit as end:
            said.write(str(end.code))
    return runs, said.getvalue()


def part(config: dict[str, Any], path: str) -> Any:
    node: Any = config
    for key in path.split("."):
        node = node[key]
    return {key: value for key, value in node.items() if key not in ("_partial_", "_convert_")}


# part: the groups that contain it, and one of its settings in our YAML files
PARTS = {
    "data.buffer.storage": ("data=uniform", "max_size"),
    "data.buffer.sampler": ("data=uniform", "with_replacement"),
    "data.buffer.sampler.prioritized": ("data=episodic_prioritized", "alpha"),
    "data.buffer.transform": ("data=hindsight", "strategy"),
    "data.buffer.estimator": ("data=rollout", "lmbda"),
    "data.buffer": ("data=uniform", "storage"),
    "data.source": ("data=branched", "real_ratio"),
    "data.collector": ("collector=process", "num_workers"),
    "model.network": ("model=dqn", "hidden_sizes"),
    "model.planner": ("model=pets", "horizon"),
    "model.dynamics": ("model=mbpo", "num_elites"),
}


@pytest.mark.parametrize("path", PARTS)
def test_part_that_the_command_line_replaces_keeps_no_setting(path, tmp_path):
    groups, setting = PARTS[path]
    own = f"{path}={{_target_: mine.Part, size: 3}}"
    (config,), said = composed(tmp_path, "~experiment", groups, own)
    assert part(config, path) == {**MINE, "size": 3}
    assert said.count(NOTE) == 1
    assert f"{path}.{setting}" in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("reverse", [False, True])
def test_setting_of_the_same_command_line_is_the_new_parts(tmp_path, reverse):
    own = ["data.buffer.sampler._target_=mine.Part", "data.buffer.sampler.alpha=0.3"]
    (config,), said = composed(tmp_path, "~experiment", "data=prioritized", *own[:: -1 if reverse else 1])
    assert part(config, "data.buffer.sampler") == {**MINE, "alpha": 0.3}
    assert "sampler.beta" in said
    assert "sampler.alpha" not in said


def test_part_without_a_new_class_keeps_its_settings(tmp_path):
    own = ["model.optimizer={_target_: torch.optim.SGD, _partial_: true, lr: 0.1}"]
    same = ["data.buffer.sampler._target_=torchrl_lightning.UniformSampler"]
    (config,), said = composed(tmp_path, "~experiment", "data=uniform", *own, *same)
    assert part(config, "model.optimizer") == {"_target_": "torch.optim.SGD", "lr": 0.1}
    assert part(config, "data.buffer.sampler")["with_replacement"] is True
    assert said == ""


def test_part_of_this_package_is_checked_against_its_own_settings(tmp_path):
    ours = "data.buffer.sampler={_target_: torchrl_lightning.UniformSampler, %s}"
    (config,), said = composed(tmp_path, "~experiment", "data=prioritized", ours % "stratified: true")
    assert part(config, "data.buffer.sampler") == {
        "_target_": "torchrl_lightning.UniformSampler",
        "with_replacement": True,
        "stratified": True,
    }
    assert "sampler.alpha" in said
    runs, said = composed(tmp_path, "~experiment", "data=prioritized", ours % "alpha: 0.3")
    told = "data.buffer.sampler.alpha: unknown setting; known are stratified"
    assert (runs, told in said) == ([], True), said


def test_interpolation_of_a_replaced_storage_is_dropped(tmp_path):
    own = "data.buffer.storage={_target_: mine.Part, cells: 64}"
    (config,), _ = composed(tmp_path, "~experiment", "data=prioritized", own)
    assert config["data"]["buffer"]["sampler"]["max_capacity"] is None


EXPERIMENT = """# @package _global_
defaults:
  - override /data: uniform
  - override /model: dqn
data:
  total_frames: 512
  buffer:
    storage: {max_size: 640}
    sampler: {_target_: mine.Part, size: 3}
model:
  optimizer: {_target_: torch.optim.RMSprop, _partial_: true, lr: 0.01, alpha: 0.9}
"""


@pytest.fixture
def experiment(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(EXPERIMENT)
    return ["--config-dir", ".", "experiment=mine"]


def test_experiment_replaces_a_part_and_a_command_line_its(tmp_path, experiment):
    (config,), said = composed(tmp_path, *experiment, "data.buffer.sampler.size=4")
    assert part(config, "data.buffer.sampler") == {**MINE, "size": 4}
    assert config["data"]["buffer"]["storage"]["max_size"] == 640
    assert said.splitlines() == [f"{NOTE}data.buffer.sampler.with_replacement."]
    own = ["data.buffer.sampler._target_=their.Part", "model.optimizer._target_=torch.optim.SGD"]
    (config,), said = composed(tmp_path, *experiment, *own)
    assert part(config, "data.buffer.sampler") == {"_target_": "their.Part"}
    assert config["model"]["optimizer"] == {"_target_": "torch.optim.SGD", "_partial_": True}
    lost = ("data.buffer.sampler.with_replacement", "data.buffer.sampler.size", "model.optimizer.lr")
    assert said.splitlines() == [f"{NOTE}{', '.join(lost)}, model.optimizer.alpha."]


@pytest.mark.parametrize(
    "swept",
    [
        ["data.buffer.sampler._target_=mine.Part,torchrl_lightning.UniformSampler"],
        ["data.buffer.sampler={_target_: mine.Part},{_target_: torchrl_lightning.UniformSampler}"],
    ],
)
def test_runs_of_a_sweep_have_their_own_parts(tmp_path, swept):
    runs, _ = composed(tmp_path, "~experiment", "data=prioritized", "--multirun", *swept)
    first, second = (part(config, "data.buffer.sampler") for config in runs)
    assert first == MINE
    assert second["_target_"] == "torchrl_lightning.UniformSampler"
    assert "alpha" not in second


def test_swept_part_takes_a_setting_that_the_old_one_lacks(tmp_path):
    own = ["data.buffer.sampler._target_=mine.Part,mine.Other", "data.buffer.sampler.size=3"]
    runs, said = composed(tmp_path, "~experiment", "data=uniform", "--multirun", *own)
    assert [part(config, "data.buffer.sampler") for config in runs] == [
        {**MINE, "size": 3},
        {"_target_": "mine.Other", "size": 3},
    ], said


OWN = """
from torchrl_lightning import UniformSampler


class Newest(UniformSampler):
    def __init__(self, newest=1):
        super().__init__()
        self.newest = newest


class Other(UniformSampler):
    def __init__(self):
        super().__init__()
"""
RUN = [
    *("~experiment", "data=uniform", "model=dqn", "env=cartpole", "data.num_envs=2", "data.warmup_frames=64"),
    *("data.updates_per_epoch=20", "data.batch_size=8", "data.buffer.storage.max_size=200", "eval_episodes=1"),
    *("data.total_frames=128", "data.eval_episodes=1", "hydra.run.dir=first"),
]


@pytest.mark.parametrize("size", ["5", "${data.batch_size}"])
def test_resumed_run_has_the_parts_of_its_checkpoint(run, tmp_path, size):
    (tmp_path / "own.py").write_text(OWN)
    said = run("train", *RUN, f"data.buffer.sampler={{_target_: own.Newest, newest: '{size}'}}").stderr
    assert said.count(NOTE) == 1
    stored = yaml.safe_load((tmp_path / "first/.hydra/config.yaml").read_text())
    resumed = ["ckpt_path=first/checkpoints/last.ckpt", "data.total_frames=192", "trusted=true"]
    (config,), said = composed(tmp_path, *resumed)
    assert {**stored["data"]["buffer"]["sampler"], "newest": config["data"]["buffer"]["sampler"]["newest"]} == (
        config["data"]["buffer"]["sampler"]
    ), said
    assert int(config["data"]["buffer"]["sampler"]["newest"]) == (5 if size == "5" else 8)
    assert "192 frames" in run("train", *resumed, "hydra.run.dir=second").stdout
    (config,), _ = composed(tmp_path, *resumed, "data.buffer.sampler._target_=own.Other")
    assert part(config, "data.buffer.sampler") == {"_target_": "own.Other"}


def test_part_that_cannot_be_removed_gets_its_default(tmp_path):
    runs, said = composed(tmp_path, "~experiment", "data=uniform", "~data.buffer.sampler")
    assert (runs, "use data.buffer.sampler=null for the default" in said) == ([], True), said
    (config,), _ = composed(tmp_path, "~experiment", "data=uniform", "data.buffer.sampler=null")
    assert config["data"]["buffer"]["sampler"] is None


@pytest.mark.parametrize("experiment", sorted(path.stem for path in CONF_DIR.glob("experiment/*.yaml")))
def test_shipped_experiments_replace_no_part(experiment, tmp_path):
    assert composed(tmp_path, f"experiment={experiment}")[1] == ""


def test_group_with_another_class_keeps_its_settings(tmp_path):
    (config,), said = composed(tmp_path, *TINY, "model._target_=mine.PPO")
    assert config["model"]["_target_"] == "mine.PPO"
    assert config["model"]["clip_epsilon"] == 0.2
    assert said == ""
