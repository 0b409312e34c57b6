"""Each run of a sweep is composed with its own groups; flags like --multirun may be anywhere."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from cli.commands import unchanged_process
from kit.store import only_our_schemas
from torchrl_lightning.cli.command import run_command
from torchrl_lightning.cli.error_messages import read_options


def sweep(folder: Path, *arguments: str) -> tuple[list[dict[str, Any]], str]:
    """Compose the runs of a command line; return the config, groups and folder of each, and the error or ''."""
    runs: list[dict[str, Any]] = []

    def task(cfg: Any) -> float:
        choices = OmegaConf.to_container(HydraConfig.get().runtime.choices)
        runs.append({"cfg": cfg, "choices": choices, "folder": HydraConfig.get().runtime.output_dir})
        return 0.0

    said: Any = ""
    with (
        only_our_schemas(),
        unchanged_process(),
        contextlib.chdir(folder),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()) as complained,
        mock.patch.object(sys, "argv", ["torchrl-lightning-train", *arguments]),
    ):
        try:
            run_command("train", task, resumes=True)
        except SystemExit as end:
            said = end.code
    return runs, f"{complained.getvalue()}{said if isinstance(said, str) else ''}" if said else ""


def chosen(runs: list[dict[str, Any]], group: str) -> list[str]:
    return [run["choices"][group] for run in runs]


RIGHT: list[tuple[list[str], str, list[str]]] = [
    (["env=recipe,mountaincar_sparse", "data.env.time_limit=50"], "env", ["recipe", "mountaincar_sparse"]),
    (["env=recipe,mountaincar_sparse", "++data.env.time_limit=50"], "env", ["recipe", "mountaincar_sparse"]),
    (
        ["env=recipe,mountaincar_sparse", "data.env.time_limit=5,6"],
        "env",
        [*["recipe"] * 2, *["mountaincar_sparse"] * 2],
    ),
    (["data.env.time_limit=50", "env=choice(recipe,mountaincar_sparse)"], "env", ["recipe", "mountaincar_sparse"]),
    (["env=glob(mountaincar_s*)", "data.env.time_limit=50"], "env", ["mountaincar_sparse"]),
    (["~experiment", "model=ppo,a2c", "data.total_frames=64"], "model", ["ppo", "a2c"]),
    (["model/network=gru,lstm", "model.network.hidden_size=8"], "model/network", ["gru", "lstm"]),
    (["model/network=mlp,gru", "model.learning_rate=1e-3"], "model/network", ["mlp", "gru"]),
    (
        ["experiment=dqn_cartpole,dqn_mountaincar", "data.batch_size=32"],
        "experiment",
        ["dqn_cartpole", "dqn_mountaincar"],
    ),
    (["experiment=dqn_cartpole,sac_pendulum", "data.warmup_frames=64"], "experiment", ["dqn_cartpole", "sac_pendulum"]),
    (["model=ppo,a2c", "seed=range(0,2)"], "model", ["ppo", "ppo", "a2c", "a2c"]),
    (["+data.buffer.recurrent=true,false"], "experiment", ["ppo_cartpole"] * 2),
    (["callbacks=none,default", "hydra.sweep.dir=there"], "callbacks", ["none", "default"]),
]


@pytest.mark.parametrize(("arguments", "group", "options"), RIGHT, ids=lambda value: str(value))
def test_runs_of_a_sweep_have_their_own_groups(
    arguments: list[str], group: str, options: list[str], tmp_path: Path
) -> None:
    runs, error = sweep(tmp_path, "--multirun", *arguments)
    assert error == ""
    assert chosen(runs, group) == options
    assert len({run["folder"] for run in runs}) == len(runs)


def test_run_of_a_sweep_may_have_no_collector(tmp_path: Path) -> None:
    runs, error = sweep(tmp_path, "--multirun", "collector=process,[]")
    assert error == ""
    assert ["collector" in run["choices"] for run in runs] == [True, False]
    assert [run["cfg"].data.collector is None for run in runs] == [False, True]


WRONG: list[tuple[list[str], str]] = [
    (["env=cartpole,recipe", "data.env.time_limit=50"], "in the run env=cartpole: data.env.time_limit"),
    (["env=recipe,cartpole", "data.env.time_limit=50"], "in the run env=cartpole: data.env.time_limit"),
    (
        ["env=recipe,mountaincar_sparse", "data.env.time_limt=50"],
        "in the run env=recipe: data.env.time_limt: .*time_limit",
    ),
    (["env=recipe,nothing", "data.env.time_limit=50"], "env=nothing: unknown option"),
    (
        ["model/network=mlp,gru", "model.network.hidden_size=8"],
        "in the run model/network=mlp: model.network.hidden_size",
    ),
    (
        ["model/network=gru,mlp", "model.network.hidden_size=8"],
        "in the run model/network=mlp: model.network.hidden_size",
    ),
    (
        ["experiment=dqn_cartpole,ppo_cartpole", "data.warmup_frames=8"],
        "in the run experiment=ppo_cartpole: data.warmup",
    ),
    (
        ["env=recipe,mountaincar_sparse", "data.env.time_limit=many"],
        "in the run env=recipe: data.env.time_limit: .*'many'",
    ),
    (["seed=0,1", "data.nothing=3"], "data.nothing: "),
    (["collector=process,null"], r"collector: .*collector=\[\]"),
    (["collector=null,process", "data.num_envs=2"], r"collector: .*collector=\[\]"),
    (["hparams_search=null", "seed=0,1"], r"hparams_search: .*hparams_search=\[\]"),
    (["model/network=gru,null"], "model/network: .*select an option of the group"),
]

MISTAKES_IN_EVERY_RUN = [
    ["env=recipe,mountaincar_sparse", "data.env.time_limt=50"],
    ["env=recipe,mountaincar_sparse", "data.env.time_limit=many"],
    ["seed=0,1", "data.nothing=3"],
    ["hparams_search=null", "seed=0,1"],
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=lambda value: str(value))
def test_run_that_cannot_be_composed_is_named_and_the_others_run(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    runs, error = sweep(tmp_path, "--multirun", *arguments)
    lines = error.strip().splitlines()
    assert re.search(message, lines[0]), error
    if arguments in MISTAKES_IN_EVERY_RUN:
        assert (runs, len(lines)) == ([], 1)
    else:
        assert len(runs) == 1
        assert lines[1:] == ["error: 1 of 2 runs failed."]


def test_mistake_in_every_run_of_a_sweep_is_counted_in_its_line(tmp_path: Path) -> None:
    runs, error = sweep(tmp_path, "--multirun", "sed=0,1,2")
    assert runs == []
    assert error == "error: in the run sed=0: sed: unknown setting; did you mean seed? 3 of 3 runs failed."


def test_folder_of_a_sweep_and_its_record_keep_the_command(tmp_path: Path) -> None:
    runs, _ = sweep(tmp_path, "-m", "env=recipe,mountaincar_sparse", "data.env.time_limit=50", "hydra.sweep.dir=all")
    assert [Path(run["folder"]).relative_to(tmp_path).parts[0] for run in runs] == ["all", "all"]
    stored = OmegaConf.load(tmp_path / "all" / "multirun.yaml")
    assert list(stored.hydra.overrides.task) == ["env=recipe,mountaincar_sparse", "data.env.time_limit=50"]
    assert [run["cfg"].data.env.time_limit for run in runs] == [50, 50]


ORDERS = [
    ["data.total_frames=64", "--multirun", "seed=0,1"],
    ["data.total_frames=64", "seed=0,1", "--multirun"],
    ["--multirun", "data.total_frames=64", "seed=0,1"],
    ["data.total_frames=8", "-m", "seed=0,1", "data.total_frames=64"],
    ["data.total_frames=64", "--config-name", "train", "seed=0,1", "-m"],
    ["data.total_frames=64", "--config-name=train", "-m", "seed=0,1"],
    ["-m", "seed=0,1", "--config-name", "train", "data.total_frames=64"],
]


@pytest.mark.parametrize("arguments", ORDERS, ids=" ".join)
def test_options_and_settings_may_be_mixed(arguments: list[str], tmp_path: Path) -> None:
    runs, error = sweep(tmp_path, *arguments)
    assert error == ""
    assert [run["cfg"].seed for run in runs] == [0, 1]
    assert [run["cfg"].data.total_frames for run in runs] == [64, 64]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], []),
        (["a=1"], ["a=1"]),
        (["a=1", "-m", "a=1", "b=2"], ["a=1", "a=1", "b=2"]),
        (["a=1", "-cd", "folder", "b=2"], ["a=1", "b=2"]),
        (["a=1", "--info", "defaults", "b=2"], ["a=1", "b=2"]),
    ],
)
def test_settings_keep_their_order(arguments: list[str], expected: list[str]) -> None:
    assert read_options(arguments).overrides == expected
