from __future__ import annotations

import contextlib
import math
from unittest import mock

import numpy as np
import pytest
from omegaconf import OmegaConf

from cli.commands import unchanged_process
from kit.demonstrations import episode, recorded
from torchrl_lightning._hydra.paths import CONF_DIR
from torchrl_lightning.cli.error_messages import UsageError
from torchrl_lightning.cli.record import record
from torchrl_lightning.demonstrations import read_demonstration

PLANNER = """
import numpy as np

def act(observation):
    assert observation.shape == (4,)
    return int(observation[2] + observation[3] > 0)

def bad(observation):
    return 2

def half(observation):
    return 0.5

def still(observation):
    return 1

def far(observation):
    return [7.0]
"""


def test_scripted_policy_is_recorded_next_to_existing_files(run, tmp_path):
    (tmp_path / "planner.py").write_text(PLANNER)
    command = ["record", "policy=planner:act", "env=cartpole", "episodes=2", "directory=demos", "hydra.run.dir=run"]
    said = run(*command).stdout
    assert "2 of 2 episodes recorded, mean return" in said
    run(*command, "min_return=100")
    paths = sorted((tmp_path / "demos").iterdir())
    assert [path.name for path in paths] == [f"demonstration_{i:03d}.safetensors" for i in range(4)]
    found = read_demonstration(paths[0])
    assert found.total_reward >= 100  # constant pushes return less than 100
    assert found.metadata["environment"] == "CartPole-v1"


def test_demonstrations_are_written_for_minari_once(run, tmp_path, monkeypatch):
    minari = pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "sets"))
    recorded(tmp_path / "demos", episodes=2)
    command = ["record", "convert=demos", "dataset=minari:cartpole/own-v0", "hydra.run.dir=run"]
    said = run(*command, "env=cartpole").stdout
    assert "minari:cartpole/own-v0: 2 episodes, mean return " in said
    assert minari.load_dataset("cartpole/own-v0").total_episodes == 2
    assert "own-v0 exists. Name another version" in run(*command, "env=cartpole", expect=1).stderr
    assert "convert=demos needs dataset=minari:ID and its environment, env=NAME." in run(*command, expect=1).stderr


def test_own_class_takes_no_settings_of_the_presets(run, tmp_path):
    environment = "from gymnasium.envs.classic_control import CartPoleEnv\n\n\ndef made():\n    return CartPoleEnv()\n"
    (tmp_path / "planner.py").write_text(f"{environment}{PLANNER}")
    own = ["env=torchrl", "data.env.id._target_=planner.made"]
    command = ["record", "policy=planner:act", *own, "data.env.time_limit=30", "episodes=1e0", "directory=demos"]
    assert "1 of 1 episodes recorded" in run(*command, "hydra.run.dir=run").stdout


def test_checkpoint_is_recorded_in_the_environment_of_its_run(trained, run, tmp_path):
    done = run("record", f"ckpt_path={trained[0]}", "episodes=3", "directory=demos", "hydra.run.dir=run")
    assert len(list((tmp_path / "demos").iterdir())) == 3
    assert "3 of 3 episodes recorded" in done.stdout


def test_table_lists_demonstrations_and_their_errors(run, tmp_path):
    (tmp_path / "planner.py").write_text(PLANNER)
    run("record", "policy=planner:act", "env=cartpole", "directory=demos", "hydra.run.dir=run")
    (tmp_path / "demos" / "torn.npz").write_bytes(b"PK")
    arrays = {"Observation": np.zeros((2, 3)), "Action": [[0], [1]], "Reward": [[0.0], [1.5]], "FrameSkip": 1}
    np.savez(tmp_path / "demos" / "other.npz", **arrays)
    head, ours, other, torn = run("record", "table=demos", "hydra.run.dir=run").stdout.splitlines()[-4:]
    assert head.split() == ["file", "length", "return", "by", "environment", "recipe", "check"]
    assert ours.split()[3:] == ["agent", "CartPole-v1", "id", "whole"]
    assert other.split() == ["other.npz", "2", "1.5", "agent", "unknown", "unknown", "whole"]
    assert "torn.npz was refused: it is not a complete .npz file" in torn
    ours, other = run("record", "table=demos", "env=cartpole", "hydra.run.dir=run").stdout.splitlines()[-3:-1]
    assert ours.endswith("fits")
    assert "[3]" in other
    (ours,) = run("record", "table=demos", "env=acrobot", "hydra.run.dir=run").stdout.splitlines()[-3:-2]
    assert "was recorded with id='CartPole-v1', but the environment has id='Acrobot-v1'. Use" in ours


CARTPOLE = {"policy": "planner:act", "data": {"env": "CartPole-v1"}}
FAILED = r"all 2 episodes failed, .*; the best had a return of -200\. min_return=NUMBER"


@pytest.mark.parametrize(
    ("told", "reward", "least", "kept", "failed"),
    [
        (False, 0.0, None, [2, 4], 2),  # only the reward marks a failure
        (True, 0.0, None, [2, 4], 2),
        (True, 0.5, None, [2, 4], 2),  # every episode earns this reward
        (False, 0.0, -1, [1, 2, 3, 4], 2),
        (False, 0.5, None, [1, 2, 3, 4], 0),
        (True, 0.7, 0.7, [1, 2, 3, 4], 2),  # rewards are rounded to float32
        (True, -0.3, -0.3, [1, 2, 3, 4], 2),
        (True, 0.7, math.inf, None, 2),
    ],
)
def test_failures_are_counted_and_recorded_only_by_min_return(told, reward, least, kept, failed, tmp_path, capsys):
    demos = [
        episode(length, reward, metadata={"success": length % 2 == 0})
        if told
        else episode(length, max(reward, length % 2 == 0))
        for length in (1, 2, 3, 4)
    ]
    given = {**CARTPOLE, "episodes": 4, "min_return": least, "directory": str(tmp_path), "policy": "operator:index"}
    cfg = OmegaConf.create({**OmegaConf.load(CONF_DIR / "record.yaml"), **given})
    with (
        unchanged_process(),
        mock.patch("torchrl_lightning.demonstrations.record_demonstrations", return_value=demos),
        pytest.raises(UsageError, match="min_return=inf") if kept is None else contextlib.nullcontext(),
    ):
        record(cfg)
    if kept is None:
        return
    assert [read_demonstration(path).length for path in sorted(tmp_path.iterdir())] == kept
    assert (f"; {failed} failed, because" in capsys.readouterr().out) == bool(failed)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "nothing given; set either ckpt_path="),
        ({"table": "demos", "policy": "planner:act"}, "policy and table given"),
        ({"table": "nowhere"}, "table=nowhere: the directory contains no demonstrations"),
        ({"ckpt_path": "nowhere.ckpt"}, r"ckpt_path=nowhere\.ckpt is not a file"),
        ({"ckpt_path": "nowhere.ckpt", "data": {"env": "CartPole-v1"}}, "remove env="),
        ({"policy": "planner:act"}, "policy=planner:act needs an environment; select one with env=NAME"),
        ({"keyboard": True}, "keyboard=True needs an environment"),
        ({**CARTPOLE, "keyboard": True}, "policy and keyboard given"),
        ({**CARTPOLE, "policy": "planner"}, "policy=planner: expected MODULE:FUNCTION"),
        ({**CARTPOLE, "policy": "planner:none"}, "has no attribute 'none'"),
        ({**CARTPOLE, "policy": "planner:bad"}, "policy=planner:bad returned 2, which is not an action of"),
        ({**CARTPOLE, "policy": "planner:half"}, r"returned 0\.5, which is not an action of"),
        ({**CARTPOLE, "data": {"env": "No-v0"}}, "data.env: Gymnasium does not know the environment 'No-v0'"),
        ({**CARTPOLE, "episodes": 0}, "episodes=0: expected a positive whole number"),
        ({**CARTPOLE, "min_return": "much"}, "min_return=much: expected a number or null"),
        ({**CARTPOLE, "min_return": float("nan")}, "min_return=nan: expected a number or null"),
        ({**CARTPOLE, "data": {"env": "MountainCar-v0"}, "policy": "planner:still", "episodes": 2}, FAILED),
        ({**CARTPOLE, "min_return": 501}, "none of 1 episodes had a return of at least min_return=501; the best had"),
    ],
)
def test_mistake_is_named(settings, message, tmp_path, monkeypatch):
    (tmp_path / "planner.py").write_text(PLANNER)
    cfg = OmegaConf.create({**OmegaConf.load(CONF_DIR / "record.yaml"), "directory": "demos", **settings})
    monkeypatch.syspath_prepend(tmp_path)
    with unchanged_process(), contextlib.chdir(tmp_path), pytest.raises(UsageError, match=message):
        record(cfg)
    assert not list(tmp_path.glob("demos/*"))


@pytest.mark.parametrize("ends", [True, False])
def test_keyboard_episodes_are_recorded(ends, tmp_path):
    given = {"keyboard": True, "keys": {"a": 0, "d": 1}, "directory": str(tmp_path), "data": {"env": "CartPole-v1"}}
    cfg = OmegaConf.create({**OmegaConf.load(CONF_DIR / "record.yaml"), **given})
    episodes = [episode(7, is_human=True)] if ends else []
    with (
        unchanged_process(),
        mock.patch("torchrl_lightning.demonstrations.play_demonstrations", return_value=episodes) as play,
        contextlib.nullcontext() if ends else pytest.raises(UsageError, match="no episode was completed"),
    ):
        assert record(cfg) == 1.0  # the last step earns the reward
    options = {"keys": {"a": 0, "d": 1}, "noop": 0, "seed": 1000, "clip_actions": False}
    play.assert_called_once_with("CartPole-v1", 1, **options)
    assert [read_demonstration(path).is_human for path in tmp_path.iterdir()] == ([True] if ends else [])


def test_actions_outside_of_the_bounds_are_refused_or_clipped(run, tmp_path):
    (tmp_path / "planner.py").write_text(PLANNER)
    command = [
        "record",
        "policy=planner:far",
        "env=pendulum",
        "min_return=-inf",
        "directory=demos",
        "hydra.run.dir=run",
    ]
    said = run(*command, expect=1).stderr
    assert said.startswith(
        "error: policy=planner:far returned [7.0], which is not an action of Box(-2.0, 2.0, (1,), float32)"
    )
    assert "clip_actions=true" in said
    assert "1 of 1 episodes recorded" in run(*command, "clip_actions=true").stdout
    (path,) = (tmp_path / "demos").iterdir()
    assert read_demonstration(path).steps["action"].unique().tolist() == [2.0]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"clip_actions": "maybe"}, "clip_actions=maybe: expected true or false"),
        (
            {"clip_actions": True, "table": "demos", "policy": None},
            r"clip_actions=true has no effect with table=, which",
        ),
        (
            {"clip_actions": True, "convert": "demos", "policy": None},
            r"clip_actions=true has no effect with convert=, w",
        ),
    ],
)
def test_clip_actions_is_refused_if_nothing_is_played(given, says):
    cfg = OmegaConf.create({**OmegaConf.load(CONF_DIR / "record.yaml"), **CARTPOLE, **given})
    with pytest.raises(UsageError, match=says):
        record(cfg)


def test_discrete_actions_are_not_clipped(tmp_path, monkeypatch):
    (tmp_path / "choosing.py").write_text(PLANNER)
    monkeypatch.syspath_prepend(tmp_path)
    given = {**CARTPOLE, "policy": "choosing:still", "clip_actions": True, "directory": str(tmp_path / "demos")}
    cfg = OmegaConf.create({**OmegaConf.load(CONF_DIR / "record.yaml"), **given})
    with unchanged_process(), pytest.raises(ValueError, match="clip_actions"):
        record(cfg)
